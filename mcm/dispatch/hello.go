package dispatch

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/go-logr/logr"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// helloEvery is the time between two hellos of the leading manager.
	helloEvery = 5 * time.Second
	// helloSoon is the least time between them: by then replicas have confirmed the last.
	helloSoon = bus.SessionInterval
	// namesakeGone is how long a namesake must be silent to count as gone.
	namesakeGone = 3 * helloEvery
)

// A Greeter publishes hellos; bus.Announcer is one.
type Greeter interface {
	Hello(h *driverv1.Hello) error
}

// Hello announces on the bus that this manager leads, until ctx ends. It runs on the leader
// only.
type Hello struct {
	Greeter Greeter
	Message *driverv1.Hello
	// Epoch returns the epoch of the present leadership; nil means that there is none.
	Epoch func() uint64
	// Behind signals that a driver does not know that epoch; nil for never.
	Behind <-chan struct{}
}

// Start implements manager.Runnable.
func (h *Hello) Start(ctx context.Context) error {
	tick := time.NewTicker(helloEvery)
	defer tick.Stop()
	soon := time.NewTimer(0)
	defer soon.Stop()
	for {
		if h.Epoch != nil {
			h.Message.Epoch = h.Epoch()
		}
		if err := h.Greeter.Hello(h.Message); err != nil {
			ctrl.LoggerFrom(ctx).V(1).Info("cannot send the hello that this manager leads; retries", "err", err.Error())
		}
		soon.Reset(helloSoon)
		select {
		case <-ctx.Done():
			return nil
		case <-soon.C:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-h.Behind:
		}
	}
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (h *Hello) NeedLeaderElection() bool { return true }

// A Namesake watches for another control plane with this one's name on the bus: drivers could
// not distinguish their machines. Managers of different namespaces of one cluster are
// namesakes too: they would answer each other's fetches.
type Namesake struct {
	uid, scope string
	log        logr.Logger

	mu    sync.Mutex
	other string // "" for none
	seen  time.Time
	over  *time.Timer
}

// NewNamesake returns a Namesake for the control plane whose kube-system namespace has this
// uid and whose managers serve this namespace, or all with "". It logs when a namesake comes
// and goes.
func NewNamesake(clusterUID, scope string, log logr.Logger) *Namesake {
	return &Namesake{uid: clusterUID, scope: scope, log: log}
}

// OnHello handles a hello of any manager with this name.
func (n *Namesake) OnHello(h *driverv1.Hello) {
	if h.GetClusterUid() == n.uid && h.GetScope() == n.scope {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	first := n.other == ""
	n.other, n.seen = cmp.Or(h.GetMcm(), "without a name"), time.Now()
	if n.over != nil {
		n.over.Reset(namesakeGone)
	} else {
		n.over = time.AfterFunc(namesakeGone, n.gone)
	}
	if first {
		n.log.Error(n.fault(), "another control plane has this one's name: this manager is not ready and sends no operations meanwhile")
	}
}

// gone forgets a namesake that has been silent for namesakeGone.
func (n *Namesake) gone() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.other == "" || time.Since(n.seen) < namesakeGone {
		return // heard just now
	}
	n.log.Info("the manager of another cluster or namespace with the same name is silent; operations continue", "manager", n.other)
	n.other = ""
}

// Check is a readiness check: it fails while there is a namesake.
func (n *Namesake) Check(_ *http.Request) error { return n.Heard() }

// Heard returns an error that names the namesake and the remedy; nil for none.
func (n *Namesake) Heard() error {
	n.mu.Lock()
	defer n.mu.Unlock()

	return n.fault()
}

// fault is Heard; the caller holds n.mu.
func (n *Namesake) fault() error {
	if n.other == "" {
		return nil
	}

	return fmt.Errorf("manager %s serves another cluster or namespace under the same name on this bus: "+
		"give each its own --cluster-name", n.other)
}
