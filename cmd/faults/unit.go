package main

import (
	"context"
	"errors"
	"os"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/machinebus/machinebus/cmd/internal/stack"
)

// restartDelay is how long what has ended stays away, unless a fault says
// otherwise. A kubelet waits longer.
const restartDelay = 500 * time.Millisecond

// A target is what one fault at a time can hit.
type target struct {
	name string
	// identity is what tells the creates of a driver apart; empty for what is no driver.
	identity string
	deaf     bool       // a driver that ignores its deadlines
	busy     sync.Mutex // held by the fault at work
	unit     *unit
	link     *stack.Link
	back     *stack.Link // the same from the other side, where either may connect
	// noLateArrivals: what was sent must not arrive long after its sender gave it up. No
	// driver contract could make up for that.
	noLateArrivals bool
}

// each does something to the target's links.
func (t *target) each(do func(*stack.Link)) {
	for _, l := range []*stack.Link{t.link, t.back} {
		if l != nil {
			do(l)
		}
	}
}

// live tells whether there is anything to hit: of the links that a program has to
// several servers it uses one.
func (t *target) live() bool {
	some := t.link == nil
	t.each(func(l *stack.Link) { some = some || l.Live() })
	return some
}

// hits returns [errMissed] as long as what was done to the links has hit nothing.
func (t *target) hits() error {
	n := 0
	t.each(func(l *stack.Link) { n += l.Hits() })
	if n == 0 {
		return errMissed
	}
	return nil
}

// aim chooses one of those that can be hit, or of all when none can.
func aim(all []*target, pick int) *target {
	live := slices.DeleteFunc(slices.Clone(all), func(t *target) bool { return !t.live() })
	if len(live) == 0 {
		live = all
	}
	return live[pick%len(live)]
}

// hold keeps back what one side says.
func (t *target) hold(d stack.Direction) {
	t.link.Hold(d)
	if t.back != nil {
		t.back.Hold(stack.ToServer + stack.ToClient - d)
	}
}

// A unit is a process that is started again whenever it ends, as a kubelet would.
type unit struct {
	site *stack.Site
	// crashed is told of an end that is not ours, unless mayEnd matches the error.
	crashed func(error)
	mayEnd  *regexp.Regexp

	starting sync.Mutex // held while it is started, and while it must not be

	mu      sync.Mutex
	process *stack.Process
	away    time.Duration // until the next start
}

// keep starts the process again and again until ctx ends.
func (u *unit) keep(ctx context.Context) {
	for {
		p := u.current()
		select {
		case <-ctx.Done():
			return
		case <-p.Done():
		}
		u.ended(p)
		u.mu.Lock()
		delay := max(u.away, restartDelay)
		u.away = 0
		u.mu.Unlock()
		for again := (*stack.Process)(nil); again == nil; {
			if wait(ctx, delay) != nil {
				return
			}
			var err error
			u.starting.Lock()
			again, err = u.site.Restart(p)
			u.starting.Unlock()
			if err != nil {
				delay = restartDelay // it is tried again
				continue
			}
			u.mu.Lock()
			u.process = again
			u.mu.Unlock()
		}
	}
}

// ended tells of a process that has ended and should not have.
func (u *unit) ended(p *stack.Process) {
	err := p.Failure()
	p.ExpectEnd() // it has been told of
	if err != nil && (u.mayEnd == nil || !u.mayEnd.MatchString(err.Error())) {
		u.crashed(err)
	}
}

func (u *unit) current() *stack.Process {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.process
}

// there returns the process, or [errMissed] when it has ended and is not back yet.
func (u *unit) there() (*stack.Process, error) {
	p := u.current()
	select {
	case <-p.Done():
		return nil, errMissed
	default:
		return p, nil
	}
}

// kill ends the process, which stays away for so long.
func (u *unit) kill(away time.Duration) error {
	p, err := u.there()
	if err != nil {
		return err
	}
	u.mu.Lock()
	u.away = away
	u.mu.Unlock()
	return p.Kill()
}

// down kills the process and does something before it is started again.
func (u *unit) down(do func() error) error {
	u.starting.Lock()
	defer u.starting.Unlock()
	p, err := u.there()
	if err != nil {
		return err
	}
	return errors.Join(p.Kill(), do())
}

// freeze stops the process for so long.
func (u *unit) freeze(ctx context.Context, length time.Duration) error {
	return u.frozen(func() error { return wait(ctx, length) })
}

// frozen does something while the process is stopped.
func (u *unit) frozen(do func() error) error {
	p, err := u.there()
	if err != nil {
		return err
	}
	if err := p.Pause(); err != nil {
		return err
	}
	err = do()
	if resumed := p.Resume(); resumed != nil {
		return resumed
	}
	return err
}

var replicaLogged = regexp.MustCompile(`\breplica=(\S+)`)

// replica returns the id under which a driver's current process is on the bus, or
// "" while it has not said.
func (u *unit) replica() string {
	content, err := os.ReadFile(u.current().Log)
	if err != nil {
		return ""
	}
	if found := replicaLogged.FindSubmatch(content); found != nil {
		return string(found[1])
	}
	return ""
}

// wait passes time, which is what these faults are made of.
func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
