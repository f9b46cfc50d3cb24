package cloud

import (
	"context"
	"log/slog"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// advance is for tests in bubbles of testing/synctest, whose time is made up: it
// waits for nothing but that clock.
func advance(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // see above
}

func newCloud(t *testing.T, o Options) *Cloud {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	t.Cleanup(stop)
	o.Logger = slog.New(slog.DiscardHandler)
	c, err := New(ctx, o)
	if err != nil {
		t.Fatal(err)
	}

	return c
}

func names(list []cloudapi.Instance) []string {
	names := []string{}
	for _, i := range list {
		names = append(names, i.Name)
	}

	return names
}

func TestCreateLatency(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		reason string
		effect cloudapi.Effect
		during []string // instances while the create is at work
	}{
		"end":   {reason: "the instance exists after the latency", effect: cloudapi.EffectEnd, during: []string{}},
		"start": {reason: "the instance exists before the latency", effect: cloudapi.EffectStart, during: []string{"m"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := newCloud(t, Options{Knobs: cloudapi.Knobs{
					CreateLatency: cloudapi.Duration(time.Minute), CreateEffect: tc.effect,
				}})
				done := make(chan error, 1)
				began := time.Now()
				go func() {
					_, _, err := c.Create(machine("m"))
					done <- err
				}()
				advance(time.Minute - 1)
				if diff := cmp.Diff(tc.during, names(c.List(cloudapi.Filter{}))); diff != "" {
					t.Errorf("%s: list meanwhile (-want +got):\n%s", tc.reason, diff)
				}
				if s := c.Stats(); s.ConcurrentCreates != 1 {
					t.Errorf("%d creates at work, want 1", s.ConcurrentCreates)
				}
				if err := <-done; err != nil {
					t.Fatal(err)
				}
				if took := time.Since(began); took != time.Minute {
					t.Errorf("the create took %s, want the latency", took)
				}
				if diff := cmp.Diff([]string{"m"}, names(c.List(cloudapi.Filter{}))); diff != "" {
					t.Errorf("%s: list afterwards (-want +got):\n%s", tc.reason, diff)
				}
			})
		})
	}
}

func TestBootAndDelete(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		heard := &listener{}
		c := newCloud(t, Options{Listener: heard, Knobs: cloudapi.Knobs{
			BootDelay: cloudapi.Duration(time.Minute), DeleteLatency: cloudapi.Duration(time.Second),
		}})
		stateOf := func(id string) cloudapi.State {
			synctest.Wait()
			i, err := c.Get(id)
			if err != nil {
				return cloudapi.StateGone
			}

			return i.State
		}
		i, _, err := c.Create(machine("m"))
		if err != nil {
			t.Fatal(err)
		}
		early, _, err := c.Create(machine("early"))
		if err != nil {
			t.Fatal(err)
		}
		states := []cloudapi.State{stateOf(i.ID)}
		if _, err := c.Delete(early.ID); err != nil {
			t.Fatal(err)
		}
		advance(time.Minute)
		states = append(states, stateOf(i.ID))
		for range 2 { // the second waits for the first
			go func() {
				if gone, err := c.Delete(i.ID); err != nil || gone.State != cloudapi.StateGone {
					t.Errorf("delete: %v, %v", gone.State, err)
				}
			}()
		}
		states = append(states, stateOf(i.ID))
		advance(time.Second)
		states = append(states, stateOf(i.ID))

		want := []cloudapi.State{
			cloudapi.StatePending, cloudapi.StateRunning, cloudapi.StateDeleting, cloudapi.StateGone,
		}
		if diff := cmp.Diff(want, states); diff != "" {
			t.Errorf("states (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([]string{"stopped early", "booted m", "stopped m"}, heard.named(early, i)); diff != "" {
			t.Errorf("the listener heard (-want +got):\n%s", diff)
		}
		if _, err := c.Delete(i.ID); codeOf(err) != cloudapi.CodeNotFound {
			t.Errorf("delete of an absent instance: %v, want %s", err, cloudapi.CodeNotFound)
		}
	})
}

// listener writes down what it hears. The cloud's lock guards it.
type listener struct{ events [][2]string }

func (l *listener) Booted(i cloudapi.Instance) {
	l.events = append(l.events, [2]string{"booted", i.ID})
}
func (l *listener) Stopped(id string)    { l.events = append(l.events, [2]string{"stopped", id}) }
func (l *listener) Knobs(cloudapi.Knobs) {}

func (l *listener) named(instances ...cloudapi.Instance) []string {
	byID := map[string]string{}
	for _, i := range instances {
		byID[i.ID] = i.Name
	}
	var named []string
	for _, e := range l.events {
		named = append(named, e[0]+" "+byID[e[1]])
	}

	return named
}

func TestListLag(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCloud(t, Options{Knobs: cloudapi.Knobs{ListLag: cloudapi.Duration(3 * time.Second)}})
		i, _, err := c.Create(machine("m"))
		if err != nil {
			t.Fatal(err)
		}
		filter := cloudapi.Filter{Tags: map[string]string{cloudapi.TagMachineUID: "uid-of-m"}}
		advance(3*time.Second - 1)
		if list := c.List(filter); len(list) != 0 {
			t.Errorf("listed within the lag: %v", names(list))
		}
		if n := c.Stats().Hidden; n != 1 {
			t.Errorf("%d were left out, want one", n)
		}
		if _, err := c.Get(i.ID); err != nil {
			t.Errorf("get by id within the lag: %v, want the instance", err)
		}
		advance(1)
		if diff := cmp.Diff([]string{"m"}, names(c.List(filter))); diff != "" {
			t.Errorf("list after the lag (-want +got):\n%s", diff)
		}
	})
}

func TestRateLimit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCloud(t, Options{Knobs: cloudapi.Knobs{RequestsPerSecond: 2}})
		for range 2 {
			if err := c.admit(cloudapi.OpList); err != nil {
				t.Fatalf("a second's worth: %v", err)
			}
		}
		err := c.admit(cloudapi.OpList)
		if err == nil || err.Status != http.StatusTooManyRequests || err.RetryAfter != 500*time.Millisecond {
			t.Fatalf("above the limit: %+v, want 429 and half a second", err)
		}
		advance(err.RetryAfter)
		if err := c.admit(cloudapi.OpList); err != nil {
			t.Errorf("after RetryAfter: %v", err)
		}
	})
}

func TestShutdownEndsWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		c, err := New(ctx, Options{
			Identity: cloudapi.IdentityToken, Logger: slog.New(slog.DiscardHandler),
			Knobs: cloudapi.Knobs{Hold: []string{"held"}, CreateLatency: cloudapi.Duration(time.Hour)},
		})
		if err != nil {
			t.Fatal(err)
		}
		errs := make(chan error, 3)
		for _, name := range []string{"held", "slow", "slow"} { // the third waits for the second
			go func() {
				_, _, err := c.Create(withToken(machine(name), name))
				errs <- err
			}()
		}
		synctest.Wait()
		stop()
		for range cap(errs) {
			if err := <-errs; codeOf(err) != cloudapi.CodeUnavailable {
				t.Errorf("%v, want %s", err, cloudapi.CodeUnavailable)
			}
		}
		if s := c.Stats(); s.Live != 0 || s.ConcurrentCreates != 0 {
			t.Errorf("%d instances and %d creates are left, want none", s.Live, s.ConcurrentCreates)
		}
	})
}
