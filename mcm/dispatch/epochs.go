package dispatch

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/machinebus/machinebus/bus/caller"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// rivalGone is how long another leading manager must be silent to count as gone: it
	// has missed a hello. One that is back then has the lower epoch, and waits.
	rivalGone = helloEvery + 3*time.Second
	// raiseEvery is the least time between two raises: each writes the Lease, and
	// any driver can ask for one.
	raiseEvery = helloEvery
	// mostRaise is how far one raise goes: a driver that makes numbers up must not
	// use up what the Lease can count.
	mostRaise = 1 << 16
)

// A Leadership counts the epochs of a manager that leads.
type Leadership interface {
	// Epoch returns the present one; 0 before this manager leads.
	Epoch() uint64
	// Raise makes the epoch higher than the given one, and returns when that is
	// stored. It fails when this manager cannot prove that it leads.
	Raise(ctx context.Context, above uint64) error
}

// Epochs keeps the epoch of the leading manager above all that drivers have heard:
// they refuse what comes with a lower one. It runs on the leader only, so that no
// other manager raises an epoch.
//
// While another manager says hello with an epoch that is not lower, this one waits:
// of two that both believe to lead, the one with the higher epoch has the drivers,
// and the other one is not ready. So neither fights for them.
type Epochs struct {
	lead     Leadership
	name     string
	replicas func() []caller.Replica
	ahead    <-chan struct{}
	log      logr.Logger

	heard  chan struct{} // another manager's hello came
	raised prometheus.Counter
	last   time.Time // of the last raise; only Start uses it

	mu      sync.Mutex
	leading bool
	rival   rival
	beside  rival // the last one heard while this manager led, whatever its epoch
	warned  rival // the one last logged
	refused error // why drivers refuse the present epoch, and it stays; nil if not
}

// A rival is another manager that says that it leads.
type rival struct {
	name  string
	epoch uint64
	seen  time.Time
}

// NewEpochs returns the Epochs of the manager that says hello by this name. The
// replicas are those that live, and ahead gets a value when one of them has heard a
// higher epoch, as of a [caller.Caller].
func NewEpochs(lead Leadership, name string, replicas func() []caller.Replica, ahead <-chan struct{}, log logr.Logger) *Epochs {
	return &Epochs{
		lead: lead, name: name, replicas: replicas, ahead: ahead, log: log, heard: make(chan struct{}, 1),
		raised: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "mcm_dispatch_epoch_raised_total",
			Help: "How often drivers had heard a higher epoch than that of this manager, which leads, and it went above that.",
		}),
	}
}

// Collectors returns the metrics for registration.
func (e *Epochs) Collectors() []prometheus.Collector {
	return []prometheus.Collector{
		e.raised,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "mcm_dispatch_epoch", Help: "Epoch of this manager's lead; 0 before it leads.",
		}, func() float64 { return float64(e.lead.Epoch()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "mcm_dispatch_rival_heard",
			Help: "1 while this manager leads and another one says that it leads with an epoch that is not lower; else 0.",
		}, func() float64 {
			e.mu.Lock()
			defer e.mu.Unlock()
			if e.rivaledLocked() != nil {
				return 1
			}

			return 0
		}),
	}
}

// OnHello takes what any manager of this control plane's name says.
func (e *Epochs) OnHello(h *driverv1.Hello) {
	own := e.lead.Epoch()
	if h.GetMcm() == e.name && h.GetEpoch() <= own {
		return // its own
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	other := rival{name: h.GetMcm(), epoch: h.GetEpoch(), seen: time.Now()}
	if e.leading {
		e.beside = other
	}
	if other.epoch < own && other.name != e.rival.name {
		return // a manager that was replaced, and does not know yet
	}
	e.rival = other
	signalHeard(e.heard)
}

func signalHeard(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// Check is a readiness check. It fails while this manager leads and another one does
// with an epoch that is not lower, and while drivers have heard a higher one and none
// above that can be stored.
func (e *Epochs) Check(_ *http.Request) error {
	e.mu.Lock()
	defer e.mu.Unlock()

	return cmp.Or(e.rivaledLocked(), e.refused)
}

// rivaledLocked names the manager that leads beside this one with an epoch that is not
// lower; nil for none.
func (e *Epochs) rivaledLocked() error {
	if own := e.lead.Epoch(); e.leading && e.rival.lives(own) {
		return e.rival.fault(own)
	}

	return nil
}

// Beside names another manager of this control plane that was heard within the last 8s
// while this one led, whatever its epoch; nil for none. It may have made instances whose
// Machines this manager's cluster does not have, as where a cluster was cloned.
func (e *Epochs) Beside() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.beside.fresh() {
		return nil
	}

	return fmt.Errorf("manager %s leads with epoch %d beside this one: end one of the two managers",
		cmp.Or(e.beside.name, "without a name"), e.beside.epoch)
}

// fresh reports whether the rival was heard lately.
func (r rival) fresh() bool { return !r.seen.IsZero() && time.Since(r.seen) < rivalGone }

// lives reports whether the rival was heard lately with an epoch that is not lower.
func (r rival) lives(own uint64) bool { return r.fresh() && r.epoch >= own }

func (r rival) fault(own uint64) error {
	return fmt.Errorf("manager %s leads with epoch %d beside this one with epoch %d, and drivers follow the higher epoch: "+
		"end one of the two managers; this one goes on %s after the other's last hello",
		cmp.Or(r.name, "without a name"), r.epoch, own, rivalGone)
}

// Start implements manager.Runnable.
func (e *Epochs) Start(ctx context.Context) error {
	e.mu.Lock()
	e.leading = true
	e.mu.Unlock()
	again := time.NewTimer(0)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-e.ahead:
		case <-e.heard:
		case <-again.C:
		}
		if wait := e.settle(ctx); wait > 0 {
			again.Reset(wait)
		}
	}
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (e *Epochs) NeedLeaderElection() bool { return true }

// settle raises the epoch if it must and may be. It returns when to look again; 0 for
// not before something is heard.
func (e *Epochs) settle(ctx context.Context) time.Duration {
	own := e.lead.Epoch()
	e.mu.Lock()
	other := e.rival
	e.mu.Unlock()
	var above uint64
	var source string
	switch {
	case !other.lives(own):
		above, source = e.highest()
		if above <= own {
			e.refuse(nil)

			return 0
		}
	case other.epoch == own && e.name > other.name:
		// Drivers would follow both: one has to go ahead, the same for both of them.
		above, source = own, "manager "+other.name
	default:
		e.warn(other, own)

		return rivalGone - time.Since(other.seen) + time.Millisecond
	}
	if since := time.Since(e.last); !e.last.IsZero() && since < raiseEvery {
		return raiseEvery - since
	}
	e.last = time.Now()
	if err := e.lead.Raise(ctx, min(above, own+mostRaise)); err != nil {
		if ctx.Err() == nil {
			e.log.Error(err, "the epoch stays below what drivers have heard, and they refuse creates and deletes; retries",
				"epoch", own, "heard", above, "from", source, "after", raiseEvery)
			e.refuse(fmt.Errorf("%s has heard epoch %d and refuses creates and deletes of epoch %d, and no higher one can be stored: %w",
				source, above, own, err))
		}

		return raiseEvery
	}
	e.refuse(nil)
	e.raised.Inc()
	e.log.Error(nil, "the epoch was raised: drivers had heard one that was not lower. The Lease was deleted or restored, or another manager led",
		"before", own, "heard", above, "from", source, "epoch", e.lead.Epoch())

	return raiseEvery
}

// refuse notes why drivers refuse the present epoch, and it stays; nil for no more.
func (e *Epochs) refuse(why error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refused = why
}

// highest returns the highest epoch that a living replica has heard.
func (e *Epochs) highest() (epoch uint64, replica string) {
	for _, r := range e.replicas() {
		if s := r.Session; s.GetEpoch() > epoch {
			epoch, replica = s.GetEpoch(), "driver replica "+s.GetProvider()+"/"+s.GetReplica()
		}
	}

	return epoch, replica
}

// warn logs a rival once.
func (e *Epochs) warn(other rival, own uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.warned.name == other.name && time.Since(e.warned.seen) < rivalGone {
		e.warned.seen = other.seen

		return
	}
	e.warned = other
	e.log.Error(other.fault(own), "not ready while this lasts")
}
