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
	// helloEvery is the time between the leading manager's signs of life.
	helloEvery = 5 * time.Second
	// helloSoon is the least of it: by then replicas have said what they heard of the
	// last one.
	helloSoon = bus.SessionInterval
	// namesakeGone is how long a namesake must not be heard to be gone.
	namesakeGone = 3 * helloEvery
)

// A Greeter says who leads; bus.Announcer is one.
type Greeter interface {
	Hello(h *driverv1.Hello) error
}

// Hello says on the bus that this manager leads, until ctx ends. It runs on the
// leader only.
type Hello struct {
	Greeter Greeter
	Message *driverv1.Hello
	// Epoch returns that of the present leadership; nil means that epochs are not
	// counted.
	Epoch func() uint64
	// Behind gets a value when a driver does not know that epoch; nil for never.
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
			ctrl.LoggerFrom(ctx).V(1).Info("hello not sent", "err", err.Error())
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

// A Namesake watches for another control plane that uses this one's name on the
// bus: drivers could not tell their machines apart. Managers that serve
// different namespaces of one cluster are such too: they would answer each other's
// fetches.
type Namesake struct {
	uid, scope string
	log        logr.Logger

	mu    sync.Mutex
	other string // "" for none
	seen  time.Time
	over  *time.Timer
}

// NewNamesake returns a Namesake for the control plane whose kube-system
// namespace has this uid and whose managers serve this namespace, or all with "".
// What it finds, and the end of that, it logs too.
func NewNamesake(clusterUID, scope string, log logr.Logger) *Namesake {
	return &Namesake{uid: clusterUID, scope: scope, log: log}
}

// OnHello takes what any manager of this name says.
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
		n.log.Error(n.fault(), "not ready, and no operation is sent, while this lasts")
	}
}

// gone forgets a namesake that was not heard any more.
func (n *Namesake) gone() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.other == "" || time.Since(n.seen) < namesakeGone {
		return // heard at this moment
	}
	n.log.Info("the manager that served another cluster or namespace under the same name is not heard any more", "manager", n.other)
	n.other = ""
}

// Check is a readiness check: it fails for as long as a namesake is heard.
func (n *Namesake) Check(_ *http.Request) error { return n.Heard() }

// Heard names the namesake that is heard and the remedy; nil for none.
func (n *Namesake) Heard() error {
	n.mu.Lock()
	defer n.mu.Unlock()

	return n.fault()
}

// fault says who the namesake is, and nil for none.
func (n *Namesake) fault() error {
	if n.other == "" {
		return nil
	}

	return fmt.Errorf("manager %s serves another cluster or namespace under the same name on this bus: "+
		"give each its own --cluster-name", n.other)
}
