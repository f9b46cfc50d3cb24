package caller

import "time"

// A past is what the attempts at an operation so far may have done. It reads no clock.
type past struct {
	lastRan uint32    // the last attempt that may have had an effect; 0 for none
	until   time.Time // by when the deadlines of all up to that are over, but of those that have ended

	lastSent    uint32    // the last attempt that this call has sent
	untilBefore time.Time // until, without that

	// unbegun is the attempt that, by the last look at its claim, has begun nothing; it
	// begins nothing once the next attempt has replaced that claim. 0 for none.
	notBegun uint32
	// unclaimed: by the last look at the claim none of the attempts that were made can
	// have begun anything, or its deadline is over.
	nothingBegun bool

	// earlierCreate is when the deadline of a lost create of an earlier operation of the
	// machine is over; zero for none.
	earlierCreate time.Time
}

// longAgo is a time that is over; unlike the zero Time, it is known.
var timeOver = time.Unix(0, 0)

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}

	return b
}

// noteAttempt notes that an attempt may have an effect until its deadline.
func (p *past) noteAttempt(attempt uint32, deadline time.Time) {
	if attempt > p.lastRan { // else it was made before
		p.lastRan, p.until = attempt, later(p.until, deadline)
	}
}

// noteSent notes that this call sends an attempt that is new.
func (p *past) noteSent(attempt uint32) { p.lastSent, p.untilBefore = attempt, p.lastDeadline() }

// noteEnded notes that an attempt has ended and has no effect that its result leaves out,
// if it is the last one that this call has sent.
func (p *past) noteEnded(attempt uint32) {
	if attempt == p.lastSent {
		p.until = later(p.untilBefore, timeOver)
	}
}

// lastDeadline is by when the deadlines of all attempts are over that may have begun, as far
// as the last look at the claim shows.
func (p *past) lastDeadline() time.Time {
	switch {
	case p.notBegun == 0 || p.notBegun != p.lastRan:
		return p.until
	case p.notBegun == p.lastSent:
		return later(p.untilBefore, timeOver)
	case p.notBegun == 1:
		return timeOver // there was none before it
	default:
		return p.until
	}
}

// mayHaveEffect reports whether an attempt may have had an effect, or an earlier operation's create.
func (p *past) mayHaveEffect() bool { return p.lastRan > 0 || !p.earlierCreate.IsZero() }
