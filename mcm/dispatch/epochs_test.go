package dispatch_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/dispatch"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A lead counts epochs as a Lease does, in memory.
type lead struct {
	epoch   atomic.Uint64
	refused atomic.Bool // the Lease cannot be written
	raises  atomic.Int64
}

func newLead(epoch uint64) *lead {
	l := &lead{}
	l.epoch.Store(epoch)

	return l
}

func (l *lead) Epoch() uint64 { return l.epoch.Load() }

func (l *lead) Raise(_ context.Context, above uint64) error {
	if l.refused.Load() {
		return errors.New("the Lease is another's")
	}
	l.raises.Add(1)
	l.epoch.Store(above + 1)

	return nil
}

// A manager whose Lease was deleted leads drivers that know a higher epoch: it goes
// above that, and they follow without being restarted.
func TestEpochs_DriversKnowHigher(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	rep := r.replica(t, func(context.Context, *replica.Task) *driverv1.Result {
		return &driverv1.Result{Status: &driverv1.Status{Code: driverv1.Code_CODE_OK}}
	})
	conn := bustest.Connect(t, bus.Config{URLs: []string{r.srv.URL()}, Name: "mcm"})
	announcer, err := bus.NewAnnouncer(conn, cluster)
	if err != nil {
		t.Fatal(err)
	}
	before := &driverv1.Hello{Mcm: "before", Epoch: 100}
	if err := announcer.Hello(before); err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "the replica knows epoch 100", func() bool { return r.session(rep).GetEpoch() == 100 })

	lead := newLead(1)
	client, err := caller.New(conn, caller.Config{Cluster: cluster, Epoch: lead.Epoch, Logger: bustest.Quiet()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	epochs := dispatch.NewEpochs(lead, "now", client.Replicas, client.Ahead(), logr.Discard())
	hello := &dispatch.Hello{Greeter: announcer, Message: &driverv1.Hello{Mcm: "now"}, Epoch: lead.Epoch, Behind: client.Behind()}
	begin(t, epochs.Start)
	begin(t, hello.Start)
	bustest.Eventually(t, "the replica knows the manager's epoch", func() bool {
		return r.session(rep).GetEpoch() == 101 && lead.Epoch() == 101
	})
	if err := epochs.Check(nil); err != nil {
		t.Errorf("no other manager lives, and the check says %v", err)
	}
	if n := lead.raises.Load(); n != 1 {
		t.Errorf("the epoch was raised %d times, want once", n)
	}
	if !epochs.NeedLeaderElection() {
		t.Error("a manager that does not lead would raise the epoch")
	}
}

// begin runs a part until the test ends.
func begin(t *testing.T, start func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// heard has a driver replica say that it has heard of an epoch.
func heard(epoch uint64) func() []caller.Replica {
	return func() []caller.Replica {
		return []caller.Replica{{Session: &driverv1.Session{Provider: provider, Replica: "r-1", Epoch: epoch}}}
	}
}

// figures are the values of metrics without labels.
func figures(t *testing.T, collectors []prometheus.Collector) map[string]float64 {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(collectors...)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		got[f.GetName()] = f.GetMetric()[0].GetGauge().GetValue() + f.GetMetric()[0].GetCounter().GetValue()
	}

	return got
}

// A bubble runs Epochs by a clock of its own.
type bubble struct {
	*dispatch.Epochs

	*lead

	ahead chan struct{}
	lines chan string
	start func()
}

// inBubble has do act before the manager leads, which it does with start.
func inBubble(t *testing.T, name string, epoch uint64, replicas func() []caller.Replica, do func(*bubble)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{lead: newLead(epoch), ahead: make(chan struct{}, 1), lines: make(chan string, 100)}
		b.Epochs = dispatch.NewEpochs(b.lead, name, replicas, b.ahead, funcr.New(func(_, args string) { b.lines <- args }, funcr.Options{}))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		b.start = func() {
			go func() { done <- b.Start(ctx) }()
			synctest.Wait()
		}
		do(b)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// pass lets time go by.
func pass(d time.Duration) {
	<-time.After(d) // of the bubble's clock
	synctest.Wait()
}

// Two managers that both lead do not fight: the one with the lower epoch waits until
// the other is silent, is not ready meanwhile, and goes on by itself.
func TestEpochs_Rival(t *testing.T) {
	t.Parallel()
	inBubble(t, "own", 101, heard(200), func(b *bubble) {
		b.OnHello(&driverv1.Hello{Mcm: "stray", Epoch: 200})
		if err := b.Check(nil); err != nil {
			t.Errorf("a manager that does not lead is not ready: %v", err)
		}
		b.start()
		for range 3 {
			b.OnHello(&driverv1.Hello{Mcm: "stray", Epoch: 200})
			b.ahead <- struct{}{}
			pass(5 * time.Second)
			if err := b.Check(nil); err == nil || !strings.Contains(err.Error(), "stray") {
				t.Errorf("check is %v, want an error that names the stray manager", err)
			}
		}
		if got := b.Epoch(); got != 101 {
			t.Errorf("epoch %d while the other manager lives, want 101", got)
		}
	})
	inBubble(t, "own", 5, heard(0), func(b *bubble) {
		b.start()
		b.OnHello(&driverv1.Hello{Mcm: "before", Epoch: 4})
		pass(time.Second)
		if err := b.Check(nil); err != nil {
			t.Errorf("a manager that was replaced makes this one unready: %v", err)
		}
	})
}

// Once the other manager is silent for long enough, drivers that know its epoch are led
// again, without any of them being heard once more.
func TestEpochs_RivalGone(t *testing.T) {
	t.Parallel()
	var known atomic.Uint64
	inBubble(t, "own", 5, func() []caller.Replica { return heard(known.Load())() }, func(b *bubble) {
		b.start()
		known.Store(200)
		b.OnHello(&driverv1.Hello{Mcm: "stray", Epoch: 200})
		pass(7 * time.Second)
		if got := b.Epoch(); got != 5 {
			t.Errorf("epoch %d while the other manager may live, want 5", got)
		}
		pass(2 * time.Second)
		if got := b.Epoch(); got != 201 {
			t.Errorf("epoch %d after the other manager has gone, want 201", got)
		}
		if err := b.Check(nil); err != nil {
			t.Errorf("the other manager is gone, and the check says %v", err)
		}
		if n := len(b.lines); n != 2 {
			t.Errorf("%d lines logged, want one about the other manager and one about the new epoch", n)
		}
		want := map[string]float64{"mcm_dispatch_epoch": 201, "mcm_dispatch_epoch_raised_total": 1, "mcm_dispatch_rival_heard": 0}
		if diff := cmp.Diff(want, figures(t, b.Collectors())); diff != "" {
			t.Errorf("metrics (-want +got):\n%s", diff)
		}
	})
}

// Of two managers with the same epoch drivers would follow both: exactly one goes ahead.
func TestEpochs_SameEpoch(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]uint64{"a": 5, "c": 6} {
		inBubble(t, name, 5, heard(5), func(b *bubble) {
			b.start()
			b.OnHello(&driverv1.Hello{Mcm: "b", Epoch: 5})
			pass(time.Second)
			if got := b.Epoch(); got != want {
				t.Errorf("manager %s beside manager b: epoch %d, want %d", name, got, want)
			}
		})
	}
}

// A driver that makes epochs up, each higher than the last, neither has the Lease
// written all the time nor uses up what it can count.
func TestEpochs_MadeUp(t *testing.T) {
	t.Parallel()
	inBubble(t, "own", 5, heard(1<<63), func(b *bubble) {
		b.start()
		for range 100 {
			select {
			case b.ahead <- struct{}{}:
			default:
			}
			pass(100 * time.Millisecond)
		}
		if n := b.raises.Load(); n > 3 {
			t.Errorf("the epoch was raised %d times in 10s, want at most once in 5s", n)
		}
		if got := b.Epoch(); got > 1<<18 {
			t.Errorf("epoch %d after 10s of a driver that makes epochs up", got)
		}
	})
}

// A manager that cannot store an epoch does not use it, is not ready meanwhile, and
// tries again.
func TestEpochs_NotStored(t *testing.T) {
	t.Parallel()
	inBubble(t, "own", 5, heard(100), func(b *bubble) {
		b.refused.Store(true)
		if err := b.Check(nil); err != nil {
			t.Errorf("a manager that does not lead is not ready: %v", err)
		}
		b.start()
		pass(time.Minute)
		if got := b.Epoch(); got != 5 {
			t.Errorf("epoch %d, which nothing has stored", got)
		}
		const text = "driver replica virtual/r-1 knows epoch 100 and refuses creates and deletes of epoch 5"
		if err := b.Check(nil); err == nil || !strings.Contains(err.Error(), text) || !strings.Contains(err.Error(), "the Lease is another's") {
			t.Errorf("check is %v, want %q and the cause", err, text)
		}
		b.refused.Store(false)
		pass(6 * time.Second)
		if got := b.Epoch(); got != 101 {
			t.Errorf("epoch %d once it can be stored, want 101", got)
		}
		if err := b.Check(nil); err != nil {
			t.Errorf("the epoch is stored, and the check says %v", err)
		}
	})
}

// A manager that could not store an epoch is ready again once no driver refuses its own.
func TestEpochs_NotStoredAndNotNeeded(t *testing.T) {
	t.Parallel()
	var known atomic.Uint64
	known.Store(100)
	inBubble(t, "own", 5, func() []caller.Replica { return heard(known.Load())() }, func(b *bubble) {
		b.refused.Store(true)
		b.start()
		if err := b.Check(nil); err == nil {
			t.Error("it is ready although drivers refuse its epoch")
		}
		known.Store(5) // the drivers were restarted
		pass(6 * time.Second)
		if err := b.Check(nil); err != nil {
			t.Errorf("no driver refuses its epoch, and the check says %v", err)
		}
	})
}

// Another manager of this cluster may have made instances whose Machines this one's
// register does not have: while it is heard, whatever its epoch, nothing is collected.
func TestEpochs_Beside(t *testing.T) {
	t.Parallel()
	for _, epoch := range []uint64{4, 5, 200} {
		inBubble(t, "own", 5, heard(0), func(b *bubble) {
			b.start()
			b.OnHello(&driverv1.Hello{Mcm: "own", Epoch: 5})
			if err := b.Beside(); err != nil {
				t.Errorf("it hears itself, and says %v", err)
			}
			b.OnHello(&driverv1.Hello{Mcm: "other", Epoch: epoch})
			if err := b.Beside(); err == nil || !strings.Contains(err.Error(), "manager other") {
				t.Errorf("beside another manager of epoch %d it says %v, want that one's name", epoch, err)
			}
			pass(time.Minute)
			if err := b.Beside(); err != nil {
				t.Errorf("the other manager is gone, and it says %v", err)
			}
		})
	}
}
