package stack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Tap collects the sessions of a control plane's drivers, and the audit messages of
// operations that ended. It is safe for concurrent use.
type Tap struct {
	conn *bus.Conn
	stop []func()

	mu       sync.Mutex
	sessions map[string]*driverv1.Session
	audits   []*driverv1.Audit
}

// OpenTap starts to listen to one control plane. URLs are separated by commas.
func OpenTap(ctx context.Context, natsURL, cluster string) (*Tap, error) {
	t := &Tap{sessions: map[string]*driverv1.Session{}}
	conn, err := bus.Connect(ctx, bus.Config{
		URLs: strings.Split(natsURL, ","), Name: "machinebus tap", FailFast: true, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return nil, err
	}
	t.conn = conn
	stop, err := bus.WatchSessions(conn, cluster, t.onSession)
	if err != nil {
		t.Close()
		return nil, fmt.Errorf("listen for sessions: %w", err)
	}
	t.stop = append(t.stop, stop)
	stop, err = bus.Watch(conn, "mcm.v1."+cluster+"."+string(bus.TreeAudit)+".>", t.onAudit)
	if err != nil {
		t.Close()
		return nil, fmt.Errorf("listen for audit messages: %w", err)
	}
	t.stop = append(t.stop, stop)
	return t, nil
}

// onAudit is called for the messages of `nats sub 'mcm.v1.<cluster>.audit.>'`.
func (t *Tap) onAudit(_, _ string, _ map[string][]string, payload []byte) {
	env, err := bus.Decode(payload, "")
	if err != nil || env.GetAudit() == nil {
		return // checking the messages is for the bus's own tests
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.audits = append(t.audits, env.GetAudit())
}

func (t *Tap) onSession(s *driverv1.Session) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sessions[s.GetReplica()] = s
}

// Close stops listening.
func (t *Tap) Close() {
	for _, stop := range t.stop {
		stop()
	}
	t.conn.Close()
}

// Sessions returns the last session of each replica that was heard, including dead ones.
func (t *Tap) Sessions() map[string]*driverv1.Session {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.sessions)
}

// Audits returns the audit messages heard so far, in order.
func (t *Tap) Audits() []*driverv1.Audit {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.audits)
}

// Running returns the ids of the operations of a kind that are running according to a
// replica's last session.
func (t *Tap) Running(replica string, op driverv1.Operation) []string {
	var ids []string
	for _, state := range t.Sessions()[replica].GetOperations() {
		if state.GetOperation() == op && !state.GetSettled() {
			ids = append(ids, state.GetOperationId())
		}
	}
	return ids
}

// HasSubscriber reports whether the server knows a subscriber of a subject. That may
// be a process that has just exited.
func (t *Tap) HasSubscriber(ctx context.Context, subject string) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_, err := t.conn.Client().RequestWithContext(ctx, subject, nil)
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return false, nil
	case err == nil || errors.Is(err, context.DeadlineExceeded): // empty requests get no answer
		return true, nil
	default:
		return false, fmt.Errorf("find the subscribers of %s: %w", subject, err)
	}
}
