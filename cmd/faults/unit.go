package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
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
	one  sync.Mutex // held by the fault at work
	unit *unit
	link *stack.Link
	back *stack.Link // the same from the other side, where either may connect
	// lossless: what was sent must not arrive long after its sender gave it up. No
	// driver contract could make up for that.
	lossless bool
}

// each does something to the target's links.
func (t *target) each(do func(*stack.Link)) {
	for _, l := range []*stack.Link{t.link, t.back} {
		if l != nil {
			do(l)
		}
	}
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
		p.ExpectEnd()
		u.mu.Lock()
		delay := max(u.away, restartDelay)
		u.away = 0
		u.mu.Unlock()
		if wait(ctx, delay) != nil {
			return
		}
		again, err := u.site.Restart(p)
		if err != nil {
			continue // it is tried again
		}
		u.mu.Lock()
		u.process = again
		u.mu.Unlock()
	}
}

func (u *unit) current() *stack.Process {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.process
}

// kill ends the process, which stays away for so long.
func (u *unit) kill(away time.Duration) error {
	u.mu.Lock()
	u.away = away
	p := u.process
	u.mu.Unlock()
	return p.Kill()
}

// freeze stops the process for so long.
func (u *unit) freeze(ctx context.Context, length time.Duration) error {
	p := u.current()
	if err := p.Pause(); err != nil {
		return err
	}
	err := wait(ctx, length)
	return errors.Join(p.Resume(), err)
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

// leads tells whether a manager is the leader.
func leads(ctx context.Context, m *stack.Manager) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+m.Address+"/metrics", http.NoBody)
	if err != nil {
		return false, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	const enough = 8 << 20
	body, err := io.ReadAll(io.LimitReader(resp.Body, enough))
	if err != nil {
		return false, fmt.Errorf("metrics of %s: %w", m.Name, err)
	}
	for line := range strings.Lines(string(body)) {
		if strings.HasPrefix(line, "leader_election_master_status{") {
			return strings.HasSuffix(strings.TrimSpace(line), " 1"), nil
		}
	}
	return false, nil
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
