package bus

import (
	"time"

	"github.com/nats-io/nuid"
)

// Clocks of a replica's lease. A replica stops beginning things fenceBound after
// it sent the last session that the operations stream acknowledged; mcm declares
// it dead deathLimit after it heard that session, which cannot be earlier. The TTL
// only cleans up.
const (
	fenceBound = 1200 * time.Millisecond
	sessionTTL = 3 * time.Second
)

// A lease is what a replica knows of its own standing in one control plane: until
// when mcm cannot have given its operations to somebody else. It has no clock of
// its own and is not safe for concurrent use.
type lease struct {
	id string // session_id
	// generation grows whenever mcm may have moved what was accepted before: an
	// attempt accepted in another one is fenced for good.
	generation uint64
	last       uint64               // stream sequence of the newest session of ours; the next one is to replace it
	acked      time.Time            // when the newest acknowledged session was sent; zero for none
	sends      map[uint64]time.Time // when sessions without an acknowledgement were sent, by their own sequence
	expects    map[uint64]uint64    // and what each was to replace
	ended      bool
}

func newLease() *lease {
	return &lease{id: nuid.Next(), sends: map[uint64]time.Time{}, expects: map[uint64]uint64{}}
}

// send notes that a session is sent now and returns the stream sequence that it
// has to replace.
func (l *lease) send(sequence uint64, now time.Time) (expected uint64) {
	l.sends[sequence], l.expects[sequence] = now, l.last
	for s, sent := range l.sends {
		if now.Sub(sent) > answerKept {
			delete(l.sends, s)
			delete(l.expects, s)
		}
	}

	return l.last
}

// stored notes that one of our sessions is in the stream, as its acknowledgement says.
func (l *lease) stored(sequence, at uint64) {
	sent, known := l.sends[sequence]
	if at < l.last || !known {
		return
	}
	l.last = at
	if l.acked.IsZero() || elapsed(l.acked, sent) > fenceBound {
		l.generation++ // there was a time when nothing held
	}
	if sent.After(l.acked) {
		l.acked = sent
	}
	for s := range l.sends {
		if s <= sequence {
			delete(l.sends, s)
			delete(l.expects, s)
		}
	}
}

// refused notes that the stream holds something else than a session was to
// replace: the record with sequence at, 0 for none. It tells whether that ended
// the lease: not if the session was merely overtaken by the acknowledgement of the
// one before. A tombstone is there, or the acknowledgement of a session of ours was
// lost, or the stream is a new one: we do not ask which, and count as taken for
// dead.
func (l *lease) refused(sequence, at uint64) (lost bool) {
	expected, known := l.expects[sequence]
	delete(l.sends, sequence)
	delete(l.expects, sequence)
	if !known || expected != l.last || l.ended {
		return false
	}
	generation := l.generation + 1
	*l = *newLease()
	l.generation, l.last = generation, at

	return true
}

// end gives the lease up for good.
func (l *lease) end() { l.ended, l.generation = true, l.generation+1 }

// holds tells that mcm cannot have moved anything that was accepted in this
// generation.
func (l *lease) holds(now time.Time) bool {
	return !l.ended && !l.acked.IsZero() && elapsed(l.acked, now) <= fenceBound
}

// elapsed is the time between two moments by the clock that ran further: the
// monotonic one stands still while a machine is suspended, the wall clock can be
// set back.
func elapsed(from, to time.Time) time.Duration {
	return max(to.Sub(from), to.Round(0).Sub(from.Round(0)))
}
