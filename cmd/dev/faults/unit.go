package main

import (
	"context"
	"errors"
	"os"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/machinebus/machinebus/bus/chaos"
	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// restartDelay is how long an ended process stays down, unless a fault sets another time.
// A kubelet waits longer.
const restartDelay = 500 * time.Millisecond

// A target can be hit by one fault at a time.
type target struct {
	name string
	// identity is the create identity of a driver; empty for other targets.
	identity string
	deaf     bool       // a driver that ignores its deadlines
	busy     sync.Mutex // held by the active fault
	unit     *unit
	link     *chaos.Link
	back     *chaos.Link // the opposite direction, if either side may connect
	// noLateArrivals means that requests must not arrive long after their sender gave up,
	// for which no driver contract could compensate.
	noLateArrivals bool
}

// each calls do for the target's links.
func (t *target) each(do func(*chaos.Link)) {
	for _, l := range []*chaos.Link{t.link, t.back} {
		if l != nil {
			do(l)
		}
	}
}

// live reports whether a fault can have an effect: a program with links to several servers
// uses only one of them.
func (t *target) live() bool {
	some := t.link == nil
	t.each(func(l *chaos.Link) { some = some || l.Clients() > 0 })
	return some
}

// hits returns [errMissed] if breaking the links had no effect.
func (t *target) hits() error {
	n := 0
	t.each(func(l *chaos.Link) { n += l.Hits() })
	if n == 0 {
		return errMissed
	}
	return nil
}

// aim chooses one of the live targets, or of all if none is live.
func aim(all []*target, pick int) *target {
	live := slices.DeleteFunc(slices.Clone(all), func(t *target) bool { return !t.live() })
	if len(live) == 0 {
		live = all
	}
	return live[pick%len(live)]
}

// hold holds back data in one direction.
func (t *target) hold(d chaos.Direction) {
	t.link.Hold(d)
	if t.back != nil {
		t.back.Hold(chaos.ToServer + chaos.ToClient - d)
	}
}

// A unit is a process that is restarted whenever it ends, as by a kubelet.
type unit struct {
	site *stack.Site
	// crashed is called if the process exits unexpectedly, unless mayEnd matches the error.
	crashed func(error)
	mayEnd  *regexp.Regexp

	starting sync.Mutex // held while it is started, and while it must not be started

	mu      sync.Mutex
	process *stack.Process
	away    time.Duration // until the next start
}

// keep restarts the process until ctx ends.
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
				delay = restartDelay // and retry
				continue
			}
			u.mu.Lock()
			u.process = again
			u.mu.Unlock()
		}
	}
}

// ended calls crashed if the process has exited unexpectedly.
func (u *unit) ended(p *stack.Process) {
	err := p.Failure()
	p.ExpectEnd() // it is reported once
	if err != nil && (u.mayEnd == nil || !u.mayEnd.MatchString(err.Error())) {
		u.crashed(err)
	}
}

func (u *unit) current() *stack.Process {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.process
}

// there returns the process, or [errMissed] if it has ended and is not restarted yet.
func (u *unit) there() (*stack.Process, error) {
	p := u.current()
	select {
	case <-p.Done():
		return nil, errMissed
	default:
		return p, nil
	}
}

// kill kills the process, which stays down for so long.
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

// down kills the process and calls do before it is restarted.
func (u *unit) down(do func() error) error {
	u.starting.Lock()
	defer u.starting.Unlock()
	p, err := u.there()
	if err != nil {
		return err
	}
	return errors.Join(p.Kill(), do())
}

// freeze pauses the process for so long.
func (u *unit) freeze(ctx context.Context, length time.Duration) error {
	return u.frozen(func() error { return wait(ctx, length) })
}

// frozen calls do while the process is paused.
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

// replica returns the replica id of a driver's current process, or "" if it has not logged
// it yet.
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

// wait waits for d. It returns an error if ctx ends first.
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
