package dispatch

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

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

	mu    sync.Mutex
	other string
	seen  time.Time
}

// NewNamesake returns a Namesake for the control plane whose kube-system
// namespace has this uid and whose managers serve this namespace, or all with "".
func NewNamesake(clusterUID, scope string) *Namesake { return &Namesake{uid: clusterUID, scope: scope} }

// OnHello takes what any manager of this name says.
func (n *Namesake) OnHello(h *driverv1.Hello) {
	if h.GetClusterUid() == n.uid && h.GetScope() == n.scope {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.other, n.seen = h.GetMcm(), time.Now()
}

// Check is a readiness check: it fails for as long as a namesake is heard.
func (n *Namesake) Check(_ *http.Request) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.other != "" && time.Since(n.seen) < 3*helloEvery {
		return fmt.Errorf("manager %s serves another cluster or namespace under the same name on this bus: "+
			"give each its own --cluster-name", n.other)
	}

	return nil
}
