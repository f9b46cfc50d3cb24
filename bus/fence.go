package bus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// fenceTries bounds the looks at one replica's session; more than a few means
	// that it renews, and so lives.
	fenceTries = 10
	// tombstoneTTL only has to keep the grave recognisable while people look:
	// once it is gone, the session that it lies on cannot be renewed either.
	tombstoneTTL = time.Hour
)

// A glimpse is what was last heard of a replica's session, and when.
type glimpse struct {
	session  string // session_id
	sequence uint64
	seen     time.Time
}

// A burial is one fencing that any number of calls wait for.
type burial struct {
	done  chan struct{}
	alive bool
	err   error
}

// fence makes sure that a silent replica has stopped: it returns when nothing
// that was accepted there before can begin anything more, or when the replica
// turns out to be alive.
func (c *Caller) fence(ctx context.Context, provider, replica string) (alive bool, err error) {
	key := replicaKey(provider, replica)
	c.mu.Lock()
	b, running := c.burials[key]
	if !running {
		b = &burial{done: make(chan struct{})}
		c.burials[key] = b
	}
	c.mu.Unlock()
	if !running {
		c.spawn(func() {
			b.alive, b.err = c.bury(c.ctx, provider, replica)
			c.mu.Lock()
			delete(c.burials, key)
			c.mu.Unlock()
			close(b.done)
		})
	}
	select {
	case <-b.done:
		return b.alive, b.err
	case <-c.ctx.Done():
		return false, c.ctx.Err() //nolint:wrapcheck // closed
	case <-ctx.Done():
		return false, ctx.Err() //nolint:wrapcheck // the caller's own
	}
}

func (c *Caller) bury(ctx context.Context, provider, replica string) (alive bool, err error) {
	subject := wildcard(c.cfg.Cluster, TreeSession, provider, replica)
	book := c.ledger(provider)
	var look autopsy
	for range fenceTries {
		found, err := book.last(ctx, subject)
		if err != nil {
			c.lost(provider, err)

			return false, fmt.Errorf("cannot look whether replica %s lives: %w", replica, err)
		}
		heard := c.replicas.glimpse(provider, replica)
		switch verdict, until := look.judge(found, heard, time.Now()); verdict {
		case isBuried:
			c.replicas.bury(provider, replica, found.envelope.GetSession().GetSessionId())

			return false, nil
		case isAlive:
			return true, nil
		case isUncertain:
			if err := sleep(ctx, time.Until(until)); err != nil {
				return false, err
			}
		case isSilent:
			t := c.tombstone(provider, replica, found, heard)
			_, err := book.put(ctx, subject, &driverv1.Envelope{Body: &driverv1.Envelope_Tombstone{Tombstone: t}}, look.sequence, tombstoneTTL)
			if errors.Is(err, errConflict) { // it has renewed, or the look was at an old copy
				if err := sleep(ctx, sweepEvery); err != nil {
					return false, err
				}

				continue
			}
			if err != nil {
				c.lost(provider, err)

				return false, fmt.Errorf("cannot write a tombstone for replica %s: %w", replica, err)
			}
			c.replicas.bury(provider, replica, t.GetSessionId())
			c.log.Warn("replica is fenced: what it held goes to others", "replica", replica, "provider", provider, "session", t.GetSessionId())

			return false, nil
		}
	}

	return true, nil
}

func (c *Caller) tombstone(provider, replica string, found *record, heard glimpse) *driverv1.Tombstone {
	t := &driverv1.Tombstone{
		Cluster: c.cfg.Cluster, Provider: provider, Replica: replica, Epoch: c.cfg.Epoch(), WrittenAt: timestamppb.Now(),
		SessionId: heard.session, Sequence: heard.sequence,
	}
	if found != nil {
		t.SessionId, t.Sequence = found.envelope.GetSession().GetSessionId(), found.envelope.GetSession().GetSequence()
	}

	return t
}

// sleep waits for d or for ctx's end.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err() //nolint:wrapcheck // the caller's own
	}
}

// A condition is what is known of a replica that was not heard of for long.
type condition int

const (
	isBuried    condition = iota // a tombstone, or its own last word, is there
	isAlive                      // it has renewed
	isUncertain                  // its newest session is not old enough
	isSilent                     // look.sequence is to be replaced by a tombstone
)

// An autopsy judges what stands at a replica's session subject, look after look.
// It has no clock of its own.
type autopsy struct {
	looked   bool
	sequence uint64    // stream sequence of what the last look found; 0 for nothing
	since    time.Time // from when on that has not been replaced, by our clock
}

// judge tells what a look means. A session that was sent no later than heard.seen
// and found to be the newest counts as silent from then on; one that was never
// heard counts from the first look that found it.
func (a *autopsy) judge(found *record, heard glimpse, now time.Time) (condition, time.Time) {
	sequence := uint64(0)
	if found != nil {
		sequence = found.sequence
		s := found.envelope.GetSession()
		if found.envelope.GetTombstone() != nil || s.GetStopped() {
			return isBuried, now
		}
	}
	switch s := found.session(); {
	case a.looked && sequence == a.sequence:
	case a.looked && found != nil:
		return isAlive, now
	case found != nil && s.GetSessionId() == heard.session && s.GetSequence() <= heard.sequence:
		a.since = heard.seen
	default:
		// Never heard; or it expired, or the stream is a new one, and nothing tells
		// how long ago a session that we did not hear was acknowledged.
		a.since = now
	}
	a.looked, a.sequence = true, sequence
	if until := a.since.Add(deathLimit); now.Before(until) {
		return isUncertain, until
	}

	return isSilent, now
}

// session returns the session a record holds, nil for none.
func (r *record) session() *driverv1.Session {
	if r == nil {
		return nil
	}

	return r.envelope.GetSession()
}
