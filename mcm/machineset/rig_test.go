package machineset_test

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/kubetest"
	"github.com/machinebus/machinebus/mcm/machineset"
)

// patience bounds every wait; it is far above what is waited for.
const patience = 5 * time.Minute

var (
	apiServer *rest.Config // of the API server that all tests share
	scheme    = kubetest.Scheme()
)

func TestMain(m *testing.M) {
	kubetest.Main(m, kubetest.Environment(), func(cfg *rest.Config) error {
		apiServer = cfg

		return flag.Set("test.parallel", "8") // they wait more than they work
	})
}

// A rig is a namespace, with a proxy in front of the API server for the manager.
// Reads of the rig itself go to the API server directly.
type rig struct {
	client.Client

	namespace string
	proxy     *kubetest.Proxy
}

func newRig(t *testing.T) *rig {
	t.Helper()
	c, namespace := kubetest.Namespace(t, apiServer)
	r := &rig{Client: c, namespace: namespace, proxy: kubetest.NewProxy(t, apiServer)}

	return r
}

// newRunningRig is newRig with a manager and a machine controller.
func newRunningRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t)
	r.play(t)
	r.startManager(t, managerOptions{})

	return r
}

type managerOptions struct {
	// direct lets the manager pass the proxy by.
	direct bool
	// elect has the manager wait until it leads.
	elect bool
}

// startManager runs a manager until the test ends or stop is called.
func (r *rig) startManager(t *testing.T, o managerOptions) (mgr ctrl.Manager, stop func()) {
	t.Helper()
	cfg := r.proxy.Config()
	if o.direct {
		cfg = apiServer
	}
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"},
		Cache: cache.Options{
			DefaultNamespaces: map[string]cache.Config{r.namespace: {}}, DefaultTransform: cache.TransformStripManagedFields(),
		},
		Controller:     config.Controller{SkipNameValidation: new(true)},
		LeaderElection: o.elect, LeaderElectionID: "test", LeaderElectionNamespace: r.namespace,
		LeaderElectionReleaseOnCancel: true, RetryPeriod: new(100 * time.Millisecond),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	sets := &machineset.Reconciler{
		Client: mgr.GetClient(), Live: mgr.GetAPIReader(),
		Events: mgr.GetEventRecorderFor("mcm"), //nolint:staticcheck // the newer API keeps only the first text of a reason
	}
	if err := sets.SetupWithManager(ctx, mgr, 4); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error("manager:", err)
		}
	})
	t.Cleanup(stop)
	if !mgr.GetCache().WaitForCacheSync(ctx) {
		t.Fatal("the manager's caches do not fill")
	}

	return mgr, stop
}

func (r *rig) set(name string, replicas int32) *v1alpha1.MachineSet {
	labels := map[string]string{"pool": name}

	return &v1alpha1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: name},
		Spec: v1alpha1.MachineSetSpec{
			Replicas: replicas, Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: v1alpha1.MachineTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: "MachineClass", Name: "small"}},
			},
		},
	}
}

func (r *rig) create(t *testing.T, o client.Object) {
	t.Helper()
	if err := r.Create(t.Context(), o); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) delete(t *testing.T, o client.Object, opts ...client.DeleteOption) {
	t.Helper()
	if err := r.Delete(t.Context(), o, opts...); err != nil {
		t.Fatal(err)
	}
}

// change changes a stored object outside of its status.
func change[T client.Object](t *testing.T, r *rig, o T, do func(T)) {
	t.Helper()
	r.modify(t, o, func() { do(o) }, func(before client.Object) error { return r.Patch(t.Context(), o, client.MergeFrom(before)) })
}

// changeStatus changes a stored object's status.
func changeStatus[T client.Object](t *testing.T, r *rig, o T, do func(T)) {
	t.Helper()
	r.modify(t, o, func() { do(o) }, func(before client.Object) error {
		return r.Status().Patch(t.Context(), o, client.MergeFrom(before))
	})
}

func (r *rig) modify(t *testing.T, o client.Object, do func(), store func(before client.Object) error) {
	t.Helper()
	if err := r.Get(t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
		t.Fatal(err)
	}
	before, ok := o.DeepCopyObject().(client.Object)
	if !ok {
		t.Fatalf("%T is no object", o)
	}
	do()
	if err := store(before); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) scale(t *testing.T, set *v1alpha1.MachineSet, replicas int32) {
	t.Helper()
	change(t, r, set, func(set *v1alpha1.MachineSet) { set.Spec.Replicas = replicas })
}

// machines returns all machines of the namespace.
func (r *rig) machines(t *testing.T) []*v1alpha1.Machine {
	t.Helper()
	list := &v1alpha1.MachineList{}
	if err := r.List(t.Context(), list, client.InNamespace(r.namespace)); err != nil {
		t.Fatal(err)
	}
	var all []*v1alpha1.Machine
	for i := range list.Items {
		all = append(all, &list.Items[i])
	}

	return all
}

func names(machines []*v1alpha1.Machine) []string {
	var all []string
	for _, m := range machines {
		all = append(all, m.Name)
	}
	slices.Sort(all)

	return all
}

// get reads a set; nil when it is gone.
func (r *rig) get(t *testing.T, set *v1alpha1.MachineSet) *v1alpha1.MachineSet {
	t.Helper()
	got := &v1alpha1.MachineSet{}
	err := r.Get(t.Context(), client.ObjectKeyFromObject(set), got)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}

	return got
}

// until waits until ok holds.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-limit.C:
			t.Fatalf("waited in vain until %s", what)
		}
	}
}

// settled waits until the set reports so many replicas, all of them ready, of its
// latest generation, and returns it.
func (r *rig) settled(t *testing.T, set *v1alpha1.MachineSet, replicas int32) (got *v1alpha1.MachineSet) {
	t.Helper()
	until(t, fmt.Sprintf("set %s has %d ready replicas", set.Name, replicas), func() bool {
		got = r.get(t, set)

		return got.Status.Replicas == replicas && got.Status.ReadyReplicas == replicas &&
			got.Status.ObservedGeneration == got.Generation
	})

	return got
}

// event waits for an Event on the set.
func (r *rig) event(t *testing.T, set *v1alpha1.MachineSet, reason, part string) {
	t.Helper()
	until(t, fmt.Sprintf("there is an Event %s with %q", reason, part), func() bool {
		list := &corev1.EventList{}
		if err := r.List(t.Context(), list, client.InNamespace(r.namespace)); err != nil {
			t.Fatal(err)
		}

		return slices.ContainsFunc(list.Items, func(e corev1.Event) bool {
			return e.InvolvedObject.Name == set.Name && e.Reason == reason && strings.Contains(e.Message, part)
		})
	})
}
