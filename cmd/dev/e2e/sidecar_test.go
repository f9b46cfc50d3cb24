package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// oldSidecar holds the Lease of the machine controller manager's provider process.
const oldSidecar = "provider-of-former-times"

// TestSidecarAlive starts mcm while the provider process of the machine controller manager
// works: mcm waits, and says for whom. When that one dies, mcm does its work. Then it holds the
// other's Lease, so that this one waits in turn.
func TestSidecarAlive(t *testing.T) {
	e := newEnv(t)
	nats, err := e.site.StartNATS(e.ctx())
	e.must(err)
	ctx, die := context.WithCancel(e.ctx())
	defer die()
	died := make(chan struct{})
	e.must(e.renewSidecarLease(ctx))
	go func() { defer close(died); e.keepSidecarLease(ctx) }()

	manager, err := e.site.StartManager(e.ctx(), stack.ManagerOptions{
		Control: e.cluster.Kubeconfig, Namespace: e.name, Cluster: e.name, NATSURL: nats.URL, Unready: true,
		Args: []string{"-v=2", "--leader-elect=true", "--leader-elect-lease-duration=3s", "--leader-elect-renew-deadline=2s", "--leader-elect-retry-period=500ms"},
	})
	e.must(err)
	tap := e.tap(nats.URL)
	e.startDrivers(1, nats.URL, tap)
	e.createClass()
	names := e.createMachines(1, className)
	e.eventually("mcm says for whom it waits", func(ctx context.Context) error {
		text, err := readyText(ctx, manager.Address)
		if err == nil && !strings.Contains(text, oldSidecar) {
			err = fmt.Errorf("it says %q", text)
		}
		return err
	})
	if holder, err := e.leaseHolder(e.ctx(), e.leaseKey().Name); err != nil || holder != "" {
		t.Errorf("%q holds the Lease of mcm meanwhile (%v), want no holder", holder, err)
	}
	e.wantInstances(0)

	die()
	<-died
	e.waitRunning(names...)
	if holder, err := e.leaseHolder(e.ctx(), "machine-controller"); err != nil || holder == oldSidecar || holder == "" {
		t.Errorf("%q holds the other's Lease (%v), want mcm", holder, err)
	}
	e.must(manager.Kill())
	e.must(manager.Restart(e.ctx())) // the Lease of its former self does not keep it waiting for long
	e.deleteAll(names...)
}

// keepSidecarLease renews the Lease as a leader does, until ctx ends.
func (e *env) keepSidecarLease(ctx context.Context) {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := e.renewSidecarLease(ctx); err != nil && ctx.Err() == nil {
				e.Errorf("renew the Lease: %v", err)
			}
		}
	}
}

func (e *env) renewSidecarLease(ctx context.Context) error {
	holder, duration, now := oldSidecar, int32(15), metav1.NewMicroTime(time.Now())
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: e.name, Name: "machine-controller"}}
	err := e.kube.Get(ctx, client.ObjectKeyFromObject(lease), lease)
	lease.Spec = coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &duration, AcquireTime: &now, RenewTime: &now}
	switch {
	case apierrors.IsNotFound(err):
		return e.kube.Create(ctx, lease)
	case err != nil:
		return err
	default:
		return e.kube.Update(ctx, lease)
	}
}

// leaseHolder returns who holds a Lease, empty for no one and for no Lease.
func (e *env) leaseHolder(ctx context.Context, name string) (string, error) {
	lease := &coordinationv1.Lease{}
	err := e.kube.Get(ctx, client.ObjectKey{Namespace: e.name, Name: name}, lease)
	if apierrors.IsNotFound(err) || err == nil && lease.Spec.HolderIdentity == nil {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return *lease.Spec.HolderIdentity, nil
}

// readyText returns what /readyz says of a manager that is not ready.
func readyText(ctx context.Context, address string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/readyz", http.NoBody)
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode == http.StatusOK {
		err = errors.New("it is ready")
	}
	return string(text), err
}
