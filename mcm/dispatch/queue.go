package dispatch

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// A turn is one operation's place in the queue. queue.mu guards its fields, except those that
// never change.
type turn struct {
	provider, secret, owner string
	kind                    Kind

	// granted is closed when the operation may be sent; nil before it enters. A refused turn
	// gets a new channel. Only the operation's own goroutine waits for it.
	granted chan struct{}
	running bool   // granted, and counts as in flight
	number  uint64 // orders the operations of one owner
}

// lanes are the kinds of operation in the order of their turns: an endless stream of creates
// delays neither deletes nor initializes.
var lanes = []Kind{Delete, Initialize, Create}

// minSweep is the number of secrets below which idle ones are not dropped.
const minSweep = 64

// A queue decides which operation is sent next, within the limits. Providers are
// independent. At one provider the kinds of operation take turns. Within a kind the owners
// take turns, so that a deployment of three machines does not wait for one of three thousand.
// An owner's operations go in their order of arrival. An operation that is blocked by its
// secret's limit delays no other. Its methods are safe for concurrent use and never block.
type queue struct {
	limits Limits
	now    func() time.Time
	after  func(time.Duration, func())

	mu      sync.Mutex
	lines   map[string]*line     // by provider
	secrets map[[2]string]*quota // by provider and secret
	sweepAt int                  // number of secrets at which idle ones are dropped
	entered uint64
}

// A line holds the operations of one provider.
type line struct {
	*quota

	lanes  map[Kind]*lane
	next   int       // index in lanes of the next kind
	wakeAt time.Time // when a timer calls grant; zero for never
	slots  [2]slots  // by slotsOf
}

// slots is the knowledge about the drivers' slots for some kinds of operation.
type slots struct {
	// full: operations came back because the provider's drivers had no free slot. Then only
	// spare more are sent, until a driver reports more free slots.
	full   bool
	spare  int
	probe  int // number of operations to send in search of a driver without sessions
	reason string
}

// A spare is the number of free slots at the drivers, by slotsOf.
type spare [2]int

// slotsOf returns which of a driver's slots an operation takes. Deletes have their own, so
// that they do not wait for creates that hang.
func slotsOf(kind Kind) int {
	if kind == Delete {
		return 1
	}

	return 0
}

// A lane holds the waiting operations of one kind.
type lane struct {
	owners  []string // the next one first
	waiting map[string][]*turn
}

func newQueue(limits Limits) *queue {
	return &queue{
		limits: limits, now: time.Now, after: func(d time.Duration, f func()) { time.AfterFunc(d, f) },
		lines: map[string]*line{}, secrets: map[[2]string]*quota{},
	}
}

// enter adds an operation. A resumed one, which runs at its driver already, does not wait.
func (q *queue) enter(t *turn, resumed bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t.granted = make(chan struct{})
	l := q.line(t.provider)
	if resumed {
		q.beginLocked(l, t, true)

		return
	}
	q.entered++
	t.number = q.entered
	lane := l.lanes[t.kind]
	if len(lane.waiting[t.owner]) == 0 {
		lane.owners = append(lane.owners, t.owner)
	}
	lane.waiting[t.owner] = append(lane.waiting[t.owner], t)
	q.grantLocked(l)
}

// enterFirst puts an operation at the head of the queue. Its former manager or replica is
// gone.
func (q *queue) enterFirst(t *turn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.line(t.provider)
	if t.running {
		q.endLocked(l, t)
	}
	t.granted = make(chan struct{})
	l.lanes[t.kind].putBack(t)
	q.grantLocked(l)
}

// bypass grants a waiting operation its turn at once, whatever the limits: it begins nothing
// at a driver.
func (q *queue) bypass(t *turn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.running {
		return
	}
	l := q.line(t.provider)
	l.lanes[t.kind].remove(t)
	q.beginLocked(l, t, true)
	q.grantLocked(l) // those behind it
}

// leave takes out an operation that has ended or was cancelled.
func (q *queue) leave(t *turn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.line(t.provider)
	if t.running {
		q.endLocked(l, t)
		if s := l.slotsOf(t.kind); s.full {
			s.spare++ // its slot is free
		}
	} else {
		l.lanes[t.kind].remove(t)
	}
	q.grantLocked(l)
}

// putBack puts an operation for which no driver had a free slot back to the head of the
// queue. If first is true, the caller must start to call refill periodically.
func (q *queue) putBack(t *turn, reason string) (first bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.line(t.provider)
	q.endLocked(l, t)
	t.granted = make(chan struct{})
	l.lanes[t.kind].putBack(t)
	first = !l.slots[0].full && !l.slots[1].full
	*l.slotsOf(t.kind) = slots{full: true, reason: reason}

	return first
}

// refill sets the number of free slots at a provider's drivers. If it is not known, the queue
// sends a growing number of operations as probes. It reports whether operations still wait
// for slots.
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
	q.grantLocked(l)
	for i := range l.slots {
		s := &l.slots[i]
		s.full = s.full && s.spare <= 0 && l.waits(i)
		more = more || s.full
	}

	return more
}

func (l *line) slotsOf(kind Kind) *slots { return &l.slots[slotsOf(kind)] }

// waits reports whether an operation waits for slots of a kind.
func (l *line) waits(slots int) bool {
	for kind, lane := range l.lanes {
		if slotsOf(kind) == slots && len(lane.owners) > 0 {
			return true
		}
	}

	return false
}

// contains reports whether an operation waits in the queue.
func (q *queue) contains(t *turn) bool {
	q.mu.Lock()
	defer q.mu.Unlock()

	return t.granted != nil && !t.running
}

// reason returns what a waiting operation waits for.
func (q *queue) reason(t *turn) string {
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

// grantLocked grants all operations their turns that may be sent now. The caller holds q.mu.
func (q *queue) grantLocked(l *line) {
	for {
		t, wait := q.pick(l)
		if t != nil {
			l.lanes[t.kind].takeFirst(t.owner)
			if s := l.slotsOf(t.kind); s.full {
				s.spare--
			}
			q.beginLocked(l, t, false)

			continue
		}
		if wait > 0 {
			q.wakeLocked(l, q.now().Add(wait))
		}

		return
	}
}

// wakeLocked calls grantLocked for a line at a time, if no earlier call is planned.
func (q *queue) wakeLocked(l *line, at time.Time) {
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
		q.grantLocked(l)
	})
}

// pick returns the operation to send next, or nil if none may be sent. Then wait is the time
// until one may, or 0 if no time limits them.
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

func (q *queue) beginLocked(l *line, t *turn, resumed bool) {
	now := q.now()
	l.take(t.kind, resumed, now)
	q.secret(t).take(t.kind, resumed, now)
	t.running = true
	close(t.granted)
}

func (q *queue) endLocked(l *line, t *turn) {
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

// secret returns the quota of a turn's credentials. It drops idle ones from time to time,
// because new secrets may come without end.
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
		limit = Limit{} // no credentials to share
	}
	s = newQuota(limit)
	q.secrets[key] = s

	return s
}

// takeFirst takes out an owner's first operation, and puts the owner behind all others.
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

// putBack undoes takeFirst and makes the owner the next.
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
