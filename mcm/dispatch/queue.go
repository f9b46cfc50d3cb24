package dispatch

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// A turn is one operation's place in the queue. Its fields are guarded by
// queue.mu, but for those that never change.
type turn struct {
	provider, secret, owner string
	kind                    Kind

	// granted is closed when the operation may be sent; nil before it enters. A refused
	// turn gets a new one; only the operation's own goroutine waits for it.
	granted chan struct{}
	running bool   // was granted, and counts as in flight
	number  uint64 // by which its owner's operations stay in order
}

// lanes are the kinds of operation, which take turns: creates without end delay
// neither a delete nor what has still to be done for an instance that exists.
var lanes = []Kind{Delete, Initialize, Create}

// minSweep is how many secrets are too few to look for idle ones among them.
const minSweep = 64

// A queue decides which operation is sent next, within the limits. Providers
// have nothing to do with each other. At one provider the kinds of operation
// take turns; of a kind the owners take turns, so that a deployment of three
// machines does not wait for one of three thousand; and an owner's operations go
// in the order in which they came. What cannot go yet, because its secret's limit
// is reached, delays nobody else. Its methods are safe for concurrent use and
// never block.
type queue struct {
	limits Limits
	now    func() time.Time
	after  func(time.Duration, func())

	mu      sync.Mutex
	lines   map[string]*line     // by provider
	secrets map[[2]string]*quota // by provider and secret
	sweepAt int                  // how many secrets are so many that idle ones are forgotten
	entered uint64
}

// A line is what is asked of one provider.
type line struct {
	*quota

	lanes  map[Kind]*lane
	next   int       // index in lanes of the kind whose turn it is
	wakeAt time.Time // when a timer looks again; zero for never
	slots  [2]slots  // by slotsOf
}

// slots are what is known of the drivers' slots for some kinds of operation.
type slots struct {
	// full: operations came back because the provider's drivers have no room. Then
	// only spare more are sent, until it is known that there is more room.
	full   bool
	spare  int
	probe  int // how many are sent to find out whether a driver is there that does not say
	reason string
}

// A spare is how many more operations there is room for, by slotsOf.
type spare [2]int

// slotsOf tells which of a driver's slots an operation takes. Deletes have their own:
// creates that hang keep none waiting.
func slotsOf(kind Kind) int {
	if kind == Delete {
		return 1
	}

	return 0
}

// A lane holds the waiting operations of one kind.
type lane struct {
	owners  []string // whose turn it is, first
	waiting map[string][]*turn
}

func newQueue(limits Limits) *queue {
	return &queue{
		limits: limits, now: time.Now, after: func(d time.Duration, f func()) { time.AfterFunc(d, f) },
		lines: map[string]*line{}, secrets: map[[2]string]*quota{},
	}
}

// enter adds an operation. One that runs at its driver already does not wait.
func (q *queue) enter(t *turn, again bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t.granted = make(chan struct{})
	l := q.line(t.provider)
	if again {
		q.begin(l, t, true)

		return
	}
	q.entered++
	t.number = q.entered
	lane := l.lanes[t.kind]
	if len(lane.waiting[t.owner]) == 0 {
		lane.owners = append(lane.owners, t.owner)
	}
	lane.waiting[t.owner] = append(lane.waiting[t.owner], t)
	q.pump(l)
}

// first puts an operation at the head of the queue that a manager before this one, or
// a replica that is gone, has left.
func (q *queue) first(t *turn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.line(t.provider)
	if t.running {
		q.end(l, t)
	}
	t.granted = make(chan struct{})
	l.lanes[t.kind].putBack(t)
	q.pump(l)
}

// skip lets an operation go that waits: nothing more is to begin for it.
func (q *queue) skip(t *turn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.running {
		return
	}
	l := q.line(t.provider)
	l.lanes[t.kind].remove(t)
	q.begin(l, t, true)
	q.pump(l) // what waited behind it may go
}

// leave takes an operation out: it has ended, or is given up.
func (q *queue) leave(t *turn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.line(t.provider)
	if t.running {
		q.end(l, t)
		if s := l.slotsOf(t.kind); s.full {
			s.spare++ // its slot is free now
		}
	} else {
		l.lanes[t.kind].remove(t)
	}
	q.pump(l)
}

// refuse puts an operation back to the head of the queue that no driver of its
// provider had room for. It tells whether that is news: then the caller must see
// to it that refill is called from time to time.
func (q *queue) refuse(t *turn, reason string) (news bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.line(t.provider)
	q.end(l, t)
	t.granted = make(chan struct{})
	l.lanes[t.kind].putBack(t)
	news = !l.slots[0].full && !l.slots[1].full
	*l.slotsOf(t.kind) = slots{full: true, reason: reason}

	return news
}

// refill says how many more operations a provider's drivers have room for. When
// nothing is known of them, ever more are sent to find out. It tells whether
// anything still waits for room.
func (q *queue) refill(provider string, n spare, known bool) (more bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.line(provider)
	for i := range l.slots {
		s := &l.slots[i]
		if !known {
			s.probe = max(1, 2*s.probe)
			n[i] = s.probe
		}
		s.spare = n[i]
	}
	q.pump(l)
	for i := range l.slots {
		s := &l.slots[i]
		s.full = s.full && s.spare <= 0 && l.waits(i)
		more = more || s.full
	}

	return more
}

func (l *line) slotsOf(kind Kind) *slots { return &l.slots[slotsOf(kind)] }

// waits tells that an operation waits that takes slots of some kind.
func (l *line) waits(slots int) bool {
	for kind, lane := range l.lanes {
		if slotsOf(kind) == slots && len(lane.owners) > 0 {
			return true
		}
	}

	return false
}

// holds tells that an operation is in the queue.
func (q *queue) holds(t *turn) bool {
	q.mu.Lock()
	defer q.mu.Unlock()

	return t.granted != nil && !t.running
}

// why says what a waiting operation waits for.
func (q *queue) why(t *turn) string {
	q.mu.Lock()
	defer q.mu.Unlock()
	l, now := q.line(t.provider), q.now()
	if s := l.slotsOf(t.kind); s.full {
		return s.reason
	}
	if reason := l.full(t.kind, "provider "+t.provider, "provider", now); reason != "" {
		return reason
	}
	if reason := q.secret(t).full(t.kind, "secret "+t.secret, "secret", now); reason != "" {
		return reason
	}

	return fmt.Sprintf("other machines of provider %s come first", t.provider)
}

// pump lets go what may go. q.mu is held.
func (q *queue) pump(l *line) {
	for {
		t, wait := q.pick(l)
		if t != nil {
			l.lanes[t.kind].takeFirst(t.owner)
			if s := l.slotsOf(t.kind); s.full {
				s.spare--
			}
			q.begin(l, t, false)

			continue
		}
		if wait > 0 {
			q.wake(l, q.now().Add(wait))
		}

		return
	}
}

// wake looks at a line again at a time, or earlier.
func (q *queue) wake(l *line, at time.Time) {
	if !l.wakeAt.IsZero() && !at.Before(l.wakeAt) {
		return
	}
	l.wakeAt = at
	q.after(at.Sub(q.now()), func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if l.wakeAt.Equal(at) {
			l.wakeAt = time.Time{}
		}
		q.pump(l)
	})
}

// pick returns the operation whose turn it is; nil when none may go, and then
// how long until one may, 0 if that is not a matter of time.
func (q *queue) pick(l *line) (next *turn, wait time.Duration) {
	now := q.now()
	own := l.delay(now)
	for i := range lanes {
		index := (l.next + i) % len(lanes)
		if s := l.slotsOf(lanes[index]); !l.room(lanes[index]) || s.full && s.spare <= 0 {
			continue
		}
		lane := l.lanes[lanes[index]]
		for _, owner := range lane.owners {
			t := lane.waiting[owner][0]
			secret := q.secret(t)
			if !secret.room(t.kind) {
				continue
			}
			if own > 0 {
				return nil, own
			}
			if d := secret.delay(now); d > 0 {
				if wait == 0 || d < wait {
					wait = d
				}

				continue
			}
			l.next = (index + 1) % len(lanes)

			return t, 0
		}
	}

	return nil, wait
}

func (q *queue) begin(l *line, t *turn, again bool) {
	now := q.now()
	l.take(t.kind, again, now)
	q.secret(t).take(t.kind, again, now)
	t.running = true
	close(t.granted)
}

func (q *queue) end(l *line, t *turn) {
	l.give(t.kind)
	q.secret(t).give(t.kind)
	t.running = false
}

func (q *queue) line(provider string) *line {
	l, ok := q.lines[provider]
	if !ok {
		l = &line{quota: newQuota(q.limits.Provider), lanes: map[Kind]*lane{}}
		for _, kind := range lanes {
			l.lanes[kind] = &lane{waiting: map[string][]*turn{}}
		}
		q.lines[provider] = l
	}

	return l
}

// secret returns the quota of a turn's credentials. There may be ever new
// secrets, so those that are idle are forgotten now and then.
func (q *queue) secret(t *turn) *quota {
	key := [2]string{t.provider, t.secret}
	s, ok := q.secrets[key]
	if ok {
		return s
	}
	if now := q.now(); len(q.secrets) >= q.sweepAt {
		maps.DeleteFunc(q.secrets, func(_ [2]string, s *quota) bool { return s.idle(now) })
		q.sweepAt = 2*len(q.secrets) + minSweep
	}
	limit := q.limits.Secret
	if t.secret == "" {
		limit = Limit{} // nothing to have in common
	}
	s = newQuota(limit)
	q.secrets[key] = s

	return s
}

// takeFirst takes out an owner's first operation; the owner's next turn comes
// after all others'.
func (a *lane) takeFirst(owner string) {
	rest := a.waiting[owner][1:]
	a.owners = slices.DeleteFunc(a.owners, func(o string) bool { return o == owner })
	if len(rest) == 0 {
		delete(a.waiting, owner)

		return
	}
	a.waiting[owner] = rest
	a.owners = append(a.owners, owner)
}

// putBack undoes takeFirst, and makes the owner the next.
func (a *lane) putBack(t *turn) {
	a.owners = slices.DeleteFunc(a.owners, func(o string) bool { return o == t.owner })
	a.owners = slices.Insert(a.owners, 0, t.owner)
	rest := a.waiting[t.owner]
	place := slices.IndexFunc(rest, func(o *turn) bool { return o.number > t.number })
	if place < 0 {
		place = len(rest)
	}
	a.waiting[t.owner] = slices.Insert(rest, place, t)
}

func (a *lane) remove(t *turn) {
	rest := slices.DeleteFunc(a.waiting[t.owner], func(o *turn) bool { return o == t })
	if len(rest) > 0 {
		a.waiting[t.owner] = rest

		return
	}
	delete(a.waiting, t.owner)
	a.owners = slices.DeleteFunc(a.owners, func(o string) bool { return o == t.owner })
}
