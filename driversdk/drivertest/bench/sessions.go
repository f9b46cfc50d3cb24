package bench

import (
	"maps"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Session is one sign of life, and when it came.
type Session struct {
	*driverv1.Session

	At time.Time
}

// sessionsKept bounds what is remembered of a replica.
const sessionsKept = 1000

// Session returns the newest session of the replica to check.
func (b *Bench) Session() Session {
	b.mu.Lock()
	defer b.mu.Unlock()
	if all := b.sessions[b.Target]; len(all) > 0 {
		return all[len(all)-1]
	}

	return Session{}
}

// SessionsOf returns the sessions of a replica, newest last.
func (b *Bench) SessionsOf(replica string) []Session {
	b.mu.Lock()
	defer b.mu.Unlock()

	return slices.Clone(b.sessions[replica])
}

// Replicas returns the replicas that have sent a session.
func (b *Bench) Replicas() []string {
	b.mu.Lock()
	defer b.mu.Unlock()

	return slices.Sorted(maps.Keys(b.sessions))
}

// AwaitSession waits for a session after the one with this sequence.
func (c *Check) AwaitSession(sequence uint64) {
	c.Eventually("the replica sends a session", func() bool { return c.Session().GetSequence() > sequence })
}

func (b *Bench) onSession(m *nats.Msg) {
	env, err := bus.DecodeMessage(m)
	if err != nil || env.GetSession() == nil {
		b.Blamef("SESSION-1", "a message on %s is not a session", m.Subject)

		return
	}
	got := Session{env.GetSession(), time.Now()}
	replica := got.GetReplica()
	if m.Subject != b.Below("session."+b.Provider+"."+replica) {
		b.Blamef("SESSION-2", "a session on %s names replica %q", m.Subject, replica)
	}
	if env.GetReplica() != replica {
		b.Blamef("ENV-7", "the envelope of a session of replica %q names %q", replica, env.GetReplica())
	}
	for _, op := range got.GetOperations() {
		b.Leak("PROGRESS-1", "a session's last_progress", op.GetLastProgress())
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sessions[replica] = append(b.sessions[replica], got)
	b.sessions[replica] = b.sessions[replica][max(0, len(b.sessions[replica])-sessionsKept):]
}
