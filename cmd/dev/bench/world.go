package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

const (
	// user is mcm's user name at the API server.
	user = "mcm"
	// namespace is mcm's; className is the class of deploy/examples.
	namespace, className = "default", "demo"
	// workers is how many machines mcm and peers reconcile in parallel.
	workers = 10
	// patience bounds waits.
	patience = 5 * time.Minute
)

// A world is a cluster, a cloud, an mcm and drivers, as processes.
type world struct {
	site    *stack.Site
	cluster *stack.DevCluster
	kube    client.WithWatch
	cloud   *stack.Cloud
	manager *stack.Manager
	drivers []*stack.Driver
	tap     *stack.Tap

	worldOptions

	replaced int // drivers
}

// worldOptions are what differs between benchmarks.
type worldOptions struct {
	slots    int           // of each driver
	patience time.Duration // with machines
	// calm keeps other load off the API server: no controller works on Nodes, and their
	// Leases are hardly renewed.
	calm bool
}

// calmControllers are Kubernetes' controllers for namespaces and owner references.
var calmControllers = []string{"namespace-controller", "garbage-collector-controller", "serviceaccount-controller"}

// calmLease is how often a Node's Lease is renewed if nothing reads it.
const calmLease = 10 * time.Minute

// newWorld starts one. It must be closed.
func (b *bench) newWorld(ctx context.Context) (*world, error) {
	const slots = 512 // of two drivers: for all of 1,000 machines
	return b.newWorldWith(ctx, worldOptions{slots: slots, patience: patience})
}

func (b *bench) newWorldWith(ctx context.Context, o worldOptions) (_ *world, err error) {
	missing := stack.Missing(b.bin, "devcluster", "mcm", "virtual-cloud", "driver-virtual")
	if len(missing) > 0 {
		return nil, fmt.Errorf("not built in %s: %v; run: make bench", b.bin, missing)
	}
	w := &world{worldOptions: o}
	if w.site, err = stack.NewSite(stack.SiteOptions{Bin: b.bin, Dir: b.dir}); err != nil {
		return nil, err
	}
	if err := w.start(ctx, b); err != nil {
		return nil, errors.Join(err, w.close())
	}
	return w, nil
}

func (w *world) close() error {
	if w.tap != nil {
		w.tap.Close()
	}
	return w.site.Close()
}

func (w *world) start(ctx context.Context, b *bench) (err error) {
	var cloudArgs []string
	if w.calm {
		cloudArgs = []string{"--join-lease-period=" + calmLease.String()}
		w.cluster, err = w.site.StartDevClusterOf(ctx, calmControllers, user)
	} else {
		w.cluster, err = w.site.StartDevCluster(ctx, user)
	}
	if err != nil {
		return err
	}
	if w.kube, err = stack.NewClient(w.cluster.Kubeconfig); err != nil {
		return err
	}
	if _, err := stack.ApplyCRDs(ctx, w.kube, b.crds); err != nil {
		return err
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: user},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
	}
	if err := w.kube.Create(ctx, binding); err != nil {
		return err
	}
	if err := w.countRequests(ctx); err != nil {
		return err
	}
	if w.cloud, err = w.site.StartCloud(ctx, "virtual-cloud", w.cluster.Kubeconfig, cloudArgs...); err != nil {
		return err
	}
	// With profiles, to inspect what mcm does meanwhile.
	managerArgs := []string{fmt.Sprintf("--concurrent-syncs=%d", workers), "--profiling"}
	if w.slots > dispatch.DefaultLimits().Secret.InFlight {
		managerArgs = append(managerArgs, "--provider-max-in-flight=0", "--secret-max-in-flight=0")
	}
	w.manager, err = w.site.StartManager(ctx, stack.ManagerOptions{Control: w.cluster.UserKubeconfig(user), Args: managerArgs})
	if err != nil {
		return err
	}
	if w.tap, err = stack.OpenTap(ctx, w.manager.NATSURL, "default"); err != nil {
		return err
	}
	for i := range 2 {
		driver, err := w.startDriver(ctx, fmt.Sprintf("driver-virtual-%d", i+1))
		if err != nil {
			return err
		}
		w.drivers = append(w.drivers, driver)
	}
	return w.applyClass(ctx, b.examples)
}

func (w *world) startDriver(ctx context.Context, name string) (*stack.Driver, error) {
	return w.site.StartDriver(ctx, w.tap, stack.DriverOptions{
		Name: name, NATSURL: w.manager.NATSURL, Args: []string{fmt.Sprintf("--slots=%d", w.slots)},
	})
}

// applyClass applies the class and the secret of deploy/examples, for our cloud.
func (w *world) applyClass(ctx context.Context, dir string) error {
	for _, file := range []string{"secret.yaml", "machineclass.yaml"} {
		objects, err := stack.LoadYAML(filepath.Join(dir, file))
		if err != nil {
			return err
		}
		for _, object := range objects {
			switch object.GetKind() {
			case "Secret":
				err = unstructured.SetNestedField(object.Object, w.cloud.APIToken, "stringData", "apiToken")
			case v1alpha1.KindMachineClass:
				err = unstructured.SetNestedField(object.Object, w.cloud.Endpoint, "providerSpec", "endpoint")
			}
			if err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
		}
		if err := stack.Apply(ctx, w.kube, objects...); err != nil {
			return err
		}
	}
	return nil
}

// latency sets how long the cloud takes for creates and deletes.
func (w *world) latency(ctx context.Context, creates, deletes time.Duration) error {
	_, err := w.cloud.Admin.Patch(ctx, cloudapi.KnobsPatch{
		CreateLatency: (*cloudapi.Duration)(&creates), DeleteLatency: (*cloudapi.Duration)(&deletes),
	})
	return err
}

func newMachine(in, name string) *v1alpha1.Machine {
	return &v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{Namespace: in, Name: name},
		Spec:       v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: v1alpha1.KindMachineClass, Name: className}},
	}
}

// createMachines makes machines and returns when all are Running.
func (w *world) createMachines(ctx context.Context, names []string) error {
	err := inParallel(names, func(name string) error { return w.kube.Create(ctx, newMachine(namespace, name)) })
	if err != nil {
		return err
	}
	return w.running(ctx, names)
}

// running returns when all machines are Running.
func (w *world) running(ctx context.Context, names []string) error {
	return w.follow(ctx, fmt.Sprintf("%d machines are Running", len(names)), func(machines map[string]*v1alpha1.Machine) bool {
		running := 0
		for _, m := range machines {
			if m.Status.CurrentStatus.Phase == v1alpha1.MachineRunning {
				running++
			}
		}
		return running == len(names)
	})
}

// deleteMachines deletes machines, and returns when all are gone.
func (w *world) deleteMachines(ctx context.Context, names []string) error {
	err := inParallel(names, func(name string) error { return w.kube.Delete(ctx, newMachine(namespace, name)) })
	if err != nil {
		return err
	}
	return w.follow(ctx, "all machines are gone", func(machines map[string]*v1alpha1.Machine) bool { return len(machines) == 0 })
}

// inParallel calls a function for each name, for as many at a time as there are workers.
func inParallel(names []string, do func(name string) error) error {
	work := make(chan string, len(names))
	for _, name := range names {
		work <- name
	}
	close(work)
	errs := make([]error, workers)
	var group sync.WaitGroup
	for i := range workers {
		group.Go(func() {
			for name := range work {
				errs[i] = errors.Join(errs[i], do(name))
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// follow watches the machines of mcm's namespace until they are as wanted.
func (w *world) follow(ctx context.Context, what string, wanted func(map[string]*v1alpha1.Machine) bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, w.patience, fmt.Errorf("waited until %s: not within %s", what, w.patience))
	defer cancel()
	var list v1alpha1.MachineList
	if err := w.kube.List(ctx, &list, client.InNamespace(namespace)); err != nil {
		return err
	}
	machines := map[string]*v1alpha1.Machine{}
	for i := range list.Items {
		machines[list.Items[i].Name] = &list.Items[i]
	}
	events, err := w.kube.Watch(ctx, &v1alpha1.MachineList{}, client.InNamespace(namespace),
		&client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: list.ResourceVersion}})
	if err != nil {
		return err
	}
	defer events.Stop()
	failed := time.NewTicker(time.Second)
	defer failed.Stop()
	for !wanted(machines) {
		select {
		case event, ok := <-events.ResultChan():
			if !ok {
				return fmt.Errorf("waited until %s: the API server ended the watch", what)
			}
			m, isMachine := event.Object.(*v1alpha1.Machine)
			switch {
			case !isMachine:
				return apierrors.FromObject(event.Object)
			case event.Type == watch.Deleted:
				delete(machines, m.Name)
			default:
				machines[m.Name] = m
			}
		case <-failed.C:
			if err := w.site.Failed(); err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

func machineNames(n int, prefix string) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("%s-%03d", prefix, i)
	}
	return names
}
