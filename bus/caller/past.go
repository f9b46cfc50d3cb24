package caller

import "time"

// A past is what the attempts at an operation so far may have done. It reads no clock.
type past struct {
	ran   uint32    // the last attempt that may have had an effect; 0 for none
	until time.Time // by when the deadlines of all up to that are over, but of those that have ended

	sent   uint32    // the last attempt that this call has sent
	before time.Time // until, without that

	// unbegun is the attempt that, by the last look at its claim, has begun nothing; it
	// begins nothing once the next attempt has replaced that claim. 0 for none.
	unbegun uint32
	// unclaimed: by the last look at the claim none of the attempts that were made can
	// have begun anything, or its deadline is over.
	unclaimed bool

	// earlierCreate is when the deadline of a lost create of an earlier operation of the
	// machine is over; zero for none.
	earlierCreate time.Time
}

// longAgo is a time that is over; unlike the zero Time, it is known.
var longAgo = time.Unix(0, 0)

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}

	return b
}

// mayHaveRun notes that an attempt may have an effect until its deadline.
func (p *past) mayHaveRun(attempt uint32, deadline time.Time) {
	if attempt > p.ran { // else it was made before
		p.ran, p.until = attempt, later(p.until, deadline)
	}
}

// willRun notes that this call sends an attempt that is new.
func (p *past) willRun(attempt uint32) { p.sent, p.before = attempt, p.quietAt() }

// hasEnded notes that an attempt has ended and has no effect that its result leaves out,
// if it is the last one that this call has sent.
func (p *past) hasEnded(attempt uint32) {
	if attempt == p.sent {
		p.until = later(p.before, longAgo)
	}
}

// quietAt is by when the deadlines of all attempts are over that may have begun, as far
// as the last look at the claim shows.
func (p *past) quietAt() time.Time {
	switch {
	case p.unbegun == 0 || p.unbegun != p.ran:
		return p.until
	case p.unbegun == p.sent:
		return later(p.before, longAgo)
	case p.unbegun == 1:
		return longAgo // there was none before it
	default:
		return p.until
	}
}

// any reports whether an attempt may have had an effect, or an earlier operation's create.
func (p *past) any() bool { return p.ran > 0 || !p.earlierCreate.IsZero() }
