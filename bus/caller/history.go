package caller

import "time"

// A history records what the attempts at an operation may have done. It reads no clock.
type history struct {
	lastRan uint32    // number of the last attempt that may have had an effect; 0 for none
	until   time.Time // last deadline of these attempts that have not ended

	lastSent    uint32    // number of the last attempt that this call sent
	untilBefore time.Time // until, without that attempt

	// notBegun is the attempt that, by its claim at the last read, has begun nothing. It
	// begins nothing once the next attempt has replaced that claim. 0 for none.
	notBegun uint32
	// nothingBegun: by the last read of the claim, no attempt can have begun anything
	// whose deadline has not passed.
	nothingBegun bool

	// earlierCreate is the deadline of a lost create of an earlier operation of the
	// machine; zero for none.
	earlierCreate time.Time
}

// timeOver is a deadline in the past. Unlike the zero Time it is known.
var timeOver = time.Unix(0, 0)

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}

	return b
}

// noteAttempt notes that an attempt may have an effect until its deadline.
func (h *history) noteAttempt(attempt uint32, deadline time.Time) {
	if attempt > h.lastRan {
		h.lastRan, h.until = attempt, later(h.until, deadline)
	}
}

// noteSent notes that this call sends a new attempt.
func (h *history) noteSent(attempt uint32) { h.lastSent, h.untilBefore = attempt, h.lastDeadline() }

// noteEnded notes that an attempt has ended with a complete result. It counts only for
// the last attempt that this call sent.
func (h *history) noteEnded(attempt uint32) {
	if attempt == h.lastSent {
		h.until = later(h.untilBefore, timeOver)
	}
}

// lastDeadline returns the last deadline of the attempts that may have begun, by the last
// read of the claim.
func (h *history) lastDeadline() time.Time {
	switch {
	case h.notBegun == 0 || h.notBegun != h.lastRan:
		return h.until
	case h.notBegun == h.lastSent:
		return later(h.untilBefore, timeOver)
	case h.notBegun == 1:
		return timeOver // there was no attempt before it
	default:
		return h.until
	}
}

// mayHaveEffect reports whether an attempt, or an earlier operation's create, may have
// had an effect.
func (h *history) mayHaveEffect() bool { return h.lastRan > 0 || !h.earlierCreate.IsZero() }
