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
	// rivalGone is how long another leading manager must be silent to count as gone: it has
	// missed a hello. If it comes back, it has the lower epoch and waits.
	rivalGone = helloEvery + 3*time.Second
	// raiseEvery is the least time between two raises: each writes the Lease, and any driver
	// can cause one.
	raiseEvery = helloEvery
	// maxRaise bounds one raise: a driver that invents epochs must not use up the Lease's
	// counter.
	maxRaise = 1 << 16
)

// A Leadership counts the epochs of a manager that leads.
type Leadership interface {
	// Epoch returns the present one; 0 before this manager leads.
	Epoch() uint64
	// Raise makes the epoch higher than the given one, and returns once that is stored. It
	// returns an error if this manager cannot prove that it leads.
	Raise(ctx context.Context, above uint64) error
}

// Epochs keeps the epoch of the leading manager above all epochs that drivers know, because
// they refuse operations with a lower one. It runs on the leader only, so that no other
// manager raises an epoch.
//
// While another manager says hello with an epoch that is not lower, this one waits. If two
// managers believe that they lead, drivers follow the one with the higher epoch, and the
// other is not ready.
type Epochs struct {
	lead     Leadership
	name     string
	replicas func() []caller.Replica
	ahead    <-chan struct{}
	log      logr.Logger

	heard  chan struct{} // signals another manager's hello
	raised prometheus.Counter
	last   time.Time // of the last raise; only Start uses it

	mu      sync.Mutex
	leading bool
	rival   rival
	beside  rival // the last one heard while this manager led, whatever its epoch
	warned  rival // the last one logged
	refused error // why drivers refuse the present epoch and it cannot be raised; nil if not
}

// A rival is another manager that claims to lead.
type rival struct {
	name  string
	epoch uint64
	seen  time.Time
}

// NewEpochs returns the Epochs of the manager that says hello by this name. Replicas returns
// the live replicas, and ahead signals that one of them knows a higher epoch; both as of a
// [caller.Caller].
func NewEpochs(lead Leadership, name string, replicas func() []caller.Replica, ahead <-chan struct{}, log logr.Logger) *Epochs {
	return &Epochs{
		lead: lead, name: name, replicas: replicas, ahead: ahead, log: log, heard: make(chan struct{}, 1),
		raised: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "mcm_dispatch_epoch_raised_total",
			Help: "Times that this manager raised its epoch because drivers knew one that was not lower.",
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
			Help: "1 while this manager leads and another one claims to lead with an epoch that is not lower; otherwise 0.",
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

// OnHello handles a hello of any manager with this control plane's name.
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
		return // a replaced manager that does not know it yet
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

// Check is a readiness check. It fails while this manager and another one with an epoch that
// is not lower both lead, and while drivers know a higher epoch and this manager cannot store
// one above that.
func (e *Epochs) Check(_ *http.Request) error {
	e.mu.Lock()
	defer e.mu.Unlock()

	return cmp.Or(e.rivaledLocked(), e.refused)
}

// rivaledLocked returns an error that names another leading manager with an epoch that is not
// lower; nil for none. The caller holds e.mu.
func (e *Epochs) rivaledLocked() error {
	if own := e.lead.Epoch(); e.leading && e.rival.outranks(own) {
		return e.rival.fault(own)
	}

	return nil
}

// Beside returns an error that names another manager of this control plane, whatever its
// epoch, which has said hello within the last 8s while this one led; nil for none. It may
// have created instances whose Machines are not in this manager's cluster, such as in a clone
// of the cluster.
func (e *Epochs) Beside() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.beside.fresh() {
		return nil
	}

	return fmt.Errorf("manager %s with epoch %d leads at the same time: stop one of the two managers",
		cmp.Or(e.beside.name, "without a name"), e.beside.epoch)
}

// fresh reports whether the rival has not been silent for rivalGone.
func (r rival) fresh() bool { return !r.seen.IsZero() && time.Since(r.seen) < rivalGone }

// outranks reports whether the rival is fresh and its epoch is not lower.
func (r rival) outranks(own uint64) bool { return r.fresh() && r.epoch >= own }

func (r rival) fault(own uint64) error {
	return fmt.Errorf("manager %s with epoch %d leads at the same time as this one with epoch %d, and drivers follow the higher epoch: "+
		"stop one of the two managers; this one continues %s after the other's last hello",
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
		if wait := e.raiseIfNeeded(ctx); wait > 0 {
			again.Reset(wait)
		}
	}
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (e *Epochs) NeedLeaderElection() bool { return true }

// raiseIfNeeded raises the epoch if drivers know one that is not lower, unless another
// manager leads. It returns when to call it again; 0 for not before the next signal.
func (e *Epochs) raiseIfNeeded(ctx context.Context) time.Duration {
	own := e.lead.Epoch()
	e.mu.Lock()
	other := e.rival
	e.mu.Unlock()
	var above uint64
	var source string
	switch {
	case !other.outranks(own):
		above, source = e.highest()
		if above <= own {
			e.setRefused(nil)

			return 0
		}
	case other.epoch == own && e.name > other.name:
		// Drivers would follow both. Both managers choose the same one to go ahead.
		above, source = own, "manager "+other.name
	default:
		e.logOnce(other, own)

		return rivalGone - time.Since(other.seen) + time.Millisecond
	}
	if since := time.Since(e.last); !e.last.IsZero() && since < raiseEvery {
		return raiseEvery - since
	}
	e.last = time.Now()
	if err := e.lead.Raise(ctx, min(above, own+maxRaise)); err != nil {
		if ctx.Err() == nil {
			e.log.Error(err, "cannot raise the epoch above the one that drivers know: they refuse creates and deletes; retries",
				"epoch", own, "heard", above, "from", source, "after", raiseEvery)
			e.setRefused(fmt.Errorf("%s knows epoch %d and refuses creates and deletes of epoch %d, and no higher one can be stored: %w",
				source, above, own, err))
		}

		return raiseEvery
	}
	e.setRefused(nil)
	e.raised.Inc()
	e.log.Error(nil, "raised the epoch, because drivers knew one that was not lower: "+
		"the Lease was deleted or restored, or another manager led", "before", own, "heard", above, "from", source, "epoch", e.lead.Epoch())

	return raiseEvery
}

// setRefused stores why drivers refuse the present epoch and it cannot be raised; nil if they
// do not refuse it.
func (e *Epochs) setRefused(why error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refused = why
}

// highest returns the highest epoch that a live replica knows.
func (e *Epochs) highest() (epoch uint64, replica string) {
	for _, r := range e.replicas() {
		if s := r.Session; s.GetEpoch() > epoch {
			epoch, replica = s.GetEpoch(), "driver replica "+s.GetProvider()+"/"+s.GetReplica()
		}
	}

	return epoch, replica
}

// logOnce logs a rival once.
func (e *Epochs) logOnce(other rival, own uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.warned.name == other.name && time.Since(e.warned.seen) < rivalGone {
		e.warned.seen = other.seen

		return
	}
	e.warned = other
	e.log.Error(other.fault(own), "another manager leads too; this one is not ready meanwhile")
}
