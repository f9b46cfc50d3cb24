package main

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// A namesake is another control plane with its own API server and bus. It has the same
// name, namespace, classes and cloud account, but no Machines.
type namesake struct {
	cluster *stack.DevCluster
	manager *stack.Manager
	driver  *stack.Driver
}

// namesakes returns the target of meetNamesake.
func namesakes(w *world) []*target { return []*target{w.otherTarget} }

// meetNamesake lets another control plane of the same name search the cloud for orphans
// for a while. It must not take this one's instances for its own.
func meetNamesake(ctx context.Context, w *world, _ *target, e event) (err error) {
	if !w.due(e) {
		return errMissed
	}
	if w.other == nil {
		if w.other, err = w.startNamesake(ctx); err != nil {
			return err
		}
	} else if err := w.other.resume(ctx, w); err != nil {
		return err
	}
	return errors.Join(w.beside(ctx, e, w.other.manager), w.other.manager.Kill(), w.other.driver.Kill())
}

// beside waits until a namesake has seen another owner's instances for longer than the
// grace of an orphan.
func (w *world) beside(ctx context.Context, e event, namesake *stack.Manager) error {
	if err := w.rollout(ctx, identities[0], e, 2); err != nil {
		return err
	}
	const sees = 20 * time.Second
	within, cancel := context.WithTimeout(ctx, sees)
	defer cancel()
	err := stack.Poll(within, "the namesake sees instances of another owner", shows("mcm_safety_foreign_instances", namesake))
	if err != nil {
		return errors.Join(errMissed, err)
	}
	const grace = 15 * time.Second // and a few searches
	return wait(ctx, grace)
}

func (w *world) startNamesake(ctx context.Context) (*namesake, error) {
	n := &namesake{}
	var err error
	if n.cluster, err = w.site.StartAPIServer(ctx); err != nil {
		return nil, err
	}
	kube, err := stack.NewClient(n.cluster.Kubeconfig)
	if err != nil {
		return nil, err
	}
	if _, err := stack.ApplyCRDs(ctx, kube, w.crds); err != nil {
		return nil, err
	}
	if err := kube.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.name}}); err != nil {
		return nil, err
	}
	for _, identity := range identities {
		if err := w.createClass(ctx, kube, identity); err != nil {
			return nil, err
		}
	}
	n.manager, err = w.site.StartManager(ctx, stack.ManagerOptions{
		Name: "mcm-namesake", Control: n.cluster.Kubeconfig, Namespace: w.name, Cluster: w.name, Args: managerArgs(),
	})
	if err != nil {
		return nil, err
	}
	tap, err := stack.OpenTap(ctx, n.manager.NATSURL, w.name)
	if err != nil {
		return nil, err
	}
	defer tap.Close()
	n.driver, err = w.site.StartDriver(ctx, tap, stack.DriverOptions{
		Name: "driver-namesake", NATSURL: n.manager.NATSURL, Clusters: []string{w.name},
		Args: []string{"--provider", identities[0], "--identity", identities[0], "--settle-time", listLag.String()},
	})
	return n, err
}

// resume starts the namesake again.
func (n *namesake) resume(ctx context.Context, w *world) error {
	if err := n.manager.Restart(ctx); err != nil {
		return err
	}
	p, err := w.site.Restart(n.driver.Process)
	n.driver.Process = p
	return err
}
