package main

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus/chaos"
	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// TestUnit ends a process in several ways: only an end that is ours or allowed is no
// crash, and what has ended cannot be hit.
func TestUnit(t *testing.T) {
	t.Parallel()
	lead := regexp.MustCompile("lost the lead")
	for name, tc := range map[string]struct {
		reason  string
		script  string
		kill    bool
		mayEnd  *regexp.Regexp
		crashes int
	}{
		"killed":      {reason: "that was us", script: "exec sleep 60", kill: true},
		"failed":      {reason: "it must not", script: "echo oh no >&2; exit 1", crashes: 1},
		"ended":       {reason: "it must not end well either", script: "exit 0", crashes: 1},
		"lost lead":   {reason: "that is how it ends then", script: "echo lost the lead >&2; exit 1", mayEnd: lead},
		"other cause": {reason: "not every end is that one", script: "echo panic: oh no >&2; exit 2", mayEnd: lead, crashes: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var crashes []error
			u := unitOf(t, tc.mayEnd, tc.script, &crashes)
			p := u.process
			if tc.kill {
				if err := u.kill(time.Minute); err != nil {
					t.Fatal(err)
				}
			}
			<-p.Done()
			u.ended(p)
			if len(crashes) != tc.crashes {
				t.Errorf("crashes: %v, want %d: %s", crashes, tc.crashes, tc.reason)
			}
			if err := u.kill(0); !errors.Is(err, errMissed) {
				t.Errorf("kill() of what has ended = %v", err)
			}
			if err := u.freeze(t.Context(), time.Minute); !errors.Is(err, errMissed) {
				t.Errorf("freeze() of what has ended = %v", err)
			}
		})
	}
}

// TestOrderly checks how mcm may exit.
func TestOrderly(t *testing.T) {
	t.Parallel()
	const lost = "mcm: run: leader election lost"
	for name, tc := range map[string]struct {
		says []string
		ends string
		want bool
	}{
		"lost lead":    {[]string{"E1 leases", lost}, "exit 1", true},
		"several ills": {[]string{"mcm: run: listener closed", "leader election lost"}, "exit 1", true},
		"no API server": {
			[]string{"mcm: ask the control cluster at https://127.0.0.1:1 for machine.sapcloud.io/v1alpha1: EOF"}, "exit 1", true,
		},
		"no answer of it": {
			[]string{`mcm: read the control plane'"'"'s key from Secret shop/key: Get "https://127.0.0.1:1/api": net/http: request canceled`}, "exit 1", true,
		},
		"no answer later":     {[]string{`mcm: run: list machines: Get "https://127.0.0.1:1/api": net/http: request canceled`}, "exit 1", false},
		"another cause":       {[]string{"mcm: run: failed to wait for caches to sync"}, "exit 1", false},
		"another cause, late": {[]string{"E1 leader election lost", "mcm: run: failed to wait for caches to sync"}, "exit 1", false},
		"panic":               {[]string{"panic: assignment to entry in nil map", "", "goroutine 1 [running]:"}, "exit 2", false},
		"panic then":          {[]string{"E1 leader election lost", "panic: assignment to entry in nil map", "", "goroutine 1 [running]:"}, "exit 2", false},
		"panic of it":         {[]string{lost, "panic: leader election lost", "", "goroutine 1 [running]:", "main.main()"}, "exit 2", false},
		"deadlock then":       {[]string{lost, "fatal error: all goroutines are asleep - deadlock!"}, "exit 2", false},
		"out of memory then":  {[]string{lost}, "kill -KILL $$", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			crashes := endOf(t, orderly, "printf '%s\\n' '"+strings.Join(tc.says, "' '")+"' >&2; "+tc.ends)
			if got := len(crashes) == 0; got != tc.want {
				t.Errorf("an mcm may end so: %v, want %v: %v", got, tc.want, crashes)
			}
		})
	}
}

// endOf lets a process exit by itself, and returns the crashes reported.
func endOf(t *testing.T, mayEnd *regexp.Regexp, script string) (crashes []error) {
	t.Helper()
	u := unitOf(t, mayEnd, script, &crashes)
	<-u.process.Done()
	u.ended(u.process)
	return crashes
}

// unitOf starts a script as a unit, which appends to crashes.
func unitOf(t *testing.T, mayEnd *regexp.Regexp, script string, crashes *[]error) *unit {
	t.Helper()
	site, err := stack.NewSite(stack.SiteOptions{Bin: t.TempDir(), Dir: filepath.Join(t.TempDir(), "run")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := site.Close(); err != nil {
			t.Errorf("a crash was reported twice: %v", err)
		}
	})
	p, err := site.Start("process", "/bin/sh", "-c", script)
	if err != nil {
		t.Fatal(err)
	}
	return &unit{site: site, process: p, mayEnd: mayEnd, crashed: func(err error) { *crashes = append(*crashes, err) }}
}

// TestAim chooses only links that something uses, as long as there are any.
func TestAim(t *testing.T) {
	t.Parallel()
	server, err := net.Listen("tcp", stack.Loopback(0))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	link := func() *chaos.Link {
		l, err := chaos.OpenLink(t.Context(), server.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(l.Close)
		return l
	}
	idle, used := &target{name: "idle", link: link()}, &target{name: "used", link: link(), back: link()}
	conn, err := net.Dial("tcp", used.back.Address())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	accepted, err := server.Accept() // the link has let it through
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = accepted.Close() })
	within, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := stack.Poll(within, "the link knows of its connection", func(context.Context) error {
		if !used.live() {
			return errMissed
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for pick := range 4 {
		if got := aim([]*target{idle, used}, pick); got != used {
			t.Errorf("pick %d is the link that is %s", pick, got.name)
		}
		if got := aim([]*target{idle, idle}, pick); got != idle {
			t.Errorf("pick %d of none that is used is %s", pick, got.name)
		}
	}
	process := &target{name: "process", unit: &unit{}}
	if got := aim([]*target{idle, process}, 0); got != process {
		t.Errorf("what has no link cannot be idle; picked: %s", got.name)
	}
}
