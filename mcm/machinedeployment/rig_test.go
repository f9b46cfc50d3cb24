package machinedeployment_test

import (
	"context"
	goruntime "runtime"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/kubetest"
	"github.com/machinebus/machinebus/mcm/machinedeployment"
)

// patience bounds every wait; it is far above what is waited for.
const patience = 5 * time.Minute

var (
	apiServer *rest.Config // of the API server that all tests share
	scheme    = kubetest.Scheme()
)

func TestMain(m *testing.M) {
	env := kubetest.Environment()
	var stopOracle func() error
	kubetest.Main(m, env, func(cfg *rest.Config) (err error) {
		apiServer = cfg
		goruntime.LockOSThread() // the oracle dies with the thread that starts it
		stopOracle, err = startOracle(env.KubeConfig)

		return err
	}, func() error { return stopOracle() })
}

// A rig is a namespace with the controller at work, and a player in place of sets
// and machines.
type rig struct {
	client.Client

	namespace string
	player    *player
	stop      func() // stops the controllers
	// proxy, if set, is the controller's way to the API server, and only its.
	proxy *kubetest.Proxy
	// target, if set, is the controller's way to the Nodes.
	target client.Client
	// now, if set, is the controller's clock.
	now        func() time.Time
	reconciler *machinedeployment.Reconciler
}

func newRig(t *testing.T) *rig {
	t.Helper()
	c, namespace := kubetest.Namespace(t, apiServer)
	r := &rig{Client: c, namespace: namespace}

	return r
}

// newSlowRig is newRunningRig with a controller whose watches can be held back.
func newSlowRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t)
	r.proxy = kubetest.NewProxy(t, apiServer)
	r.start(t)

	return r
}

func newRunningRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t)
	r.start(t)

	return r
}

// start runs the controllers until the test ends or r.stop is called.
func (r *rig) start(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	sets := newManager(t, apiServer, r.namespace)
	managers, deployments := []ctrl.Manager{sets}, sets
	if r.proxy != nil {
		deployments = newManager(t, r.proxy.Config(), r.namespace)
		managers = append(managers, deployments)
	}
	r.reconciler = &machinedeployment.Reconciler{
		Control: deployments.GetClient(), Live: deployments.GetAPIReader(), Target: r.Client,
		Settings: machinedeployment.Settings{Namespace: r.namespace, AnnotateNodes: true},
		Now:      r.now,
		Events:   deployments.GetEventRecorderFor("mcm"), //nolint:staticcheck // the newer API keeps only the first text of a reason
	}
	if r.target != nil {
		r.reconciler.Target = r.target
	}
	if err := r.reconciler.SetupWithManager(ctx, deployments, 4); err != nil {
		t.Fatal(err)
	}
	if r.player == nil {
		r.player = &player{broken: map[string]bool{}}
	}
	r.player.Client = r.Client
	err := ctrl.NewControllerManagedBy(sets).Named("player").For(&v1alpha1.MachineSet{}).Owns(&v1alpha1.Machine{}).Complete(r.player)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, len(managers))
	for _, mgr := range managers {
		go func() { done <- mgr.Start(ctx) }()
	}
	r.stop = sync.OnceFunc(func() {
		cancel()
		for range managers {
			if err := <-done; err != nil {
				t.Error("manager:", err)
			}
		}
	})
	t.Cleanup(r.stop)
	// Caches that are not full yet have nothing to be late with.
	for _, o := range []client.Object{&v1alpha1.MachineDeployment{}, &v1alpha1.MachineSet{}, &v1alpha1.Machine{}} {
		if _, err := deployments.GetCache().GetInformer(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	if !deployments.GetCache().WaitForCacheSync(ctx) {
		t.Fatal("the controller's caches do not fill")
	}
}

func newManager(t *testing.T, cfg *rest.Config, namespace string) ctrl.Manager {
	t.Helper()
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"},
		Cache:      cache.Options{DefaultNamespaces: map[string]cache.Config{namespace: {}}},
		Controller: config.Controller{SkipNameValidation: new(true)},
	})
	if err != nil {
		t.Fatal(err)
	}

	return mgr
}

func (r *rig) create(t *testing.T, o client.Object) {
	t.Helper()
	if err := r.Create(t.Context(), o); err != nil {
		t.Fatal(err)
	}
}

// deployment returns a rolling deployment of the class small.
func (r *rig) deployment(replicas int32, change ...func(*v1alpha1.MachineDeployment)) *v1alpha1.MachineDeployment {
	labels := map[string]string{"name": "pool"}
	d := &v1alpha1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "pool"},
		Spec: v1alpha1.MachineDeploymentSpec{
			Replicas: replicas, Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: v1alpha1.MachineTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: "MachineClass", Name: "small"}},
			},
			Strategy: v1alpha1.MachineDeploymentStrategy{
				Type: v1alpha1.RollingUpdateMachineDeploymentStrategyType,
				RollingUpdate: &v1alpha1.RollingUpdateMachineDeployment{UpdateConfiguration: v1alpha1.UpdateConfiguration{
					MaxSurge: new(intstr.FromInt32(1)), MaxUnavailable: new(intstr.FromInt32(1)),
				}},
			},
		},
	}
	for _, f := range change {
		f(d)
	}

	return d
}

// change patches the deployment.
func (r *rig) change(t *testing.T, d *v1alpha1.MachineDeployment, f func(*v1alpha1.MachineDeployment)) {
	t.Helper()
	got := r.get(t, d)
	if got == nil {
		t.Fatal("there is no deployment")
	}
	before := got.DeepCopy()
	f(got)
	if err := r.Patch(t.Context(), got, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) get(t *testing.T, d *v1alpha1.MachineDeployment) *v1alpha1.MachineDeployment {
	t.Helper()
	got := &v1alpha1.MachineDeployment{}
	err := r.Get(t.Context(), client.ObjectKeyFromObject(d), got)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}

	return got
}

// sets returns the namespace's sets by the name of their class.
func (r *rig) sets(t *testing.T) map[string]*v1alpha1.MachineSet {
	t.Helper()
	list := &v1alpha1.MachineSetList{}
	if err := r.List(t.Context(), list, client.InNamespace(r.namespace)); err != nil {
		t.Fatal(err)
	}
	sets := map[string]*v1alpha1.MachineSet{}
	for i := range list.Items {
		class := list.Items[i].Spec.Template.Spec.Class.Name
		if sets[class] != nil {
			t.Fatalf("there are two sets of class %s: %s and %s", class, sets[class].Name, list.Items[i].Name)
		}
		sets[class] = &list.Items[i]
	}

	return sets
}

// replicas returns the replicas of the sets by class.
func (r *rig) replicas(t *testing.T) map[string]int32 {
	t.Helper()
	replicas := map[string]int32{}
	for class, set := range r.sets(t) {
		replicas[class] = set.Spec.Replicas
	}

	return replicas
}

func (r *rig) machines(t *testing.T) []v1alpha1.Machine {
	t.Helper()
	list := &v1alpha1.MachineList{}
	if err := r.List(t.Context(), list, client.InNamespace(r.namespace)); err != nil {
		t.Fatal(err)
	}

	return list.Items
}

// until waits until the deployment is as wanted; nil means that it is gone.
func (r *rig) until(t *testing.T, what string, d *v1alpha1.MachineDeployment, ok func(*v1alpha1.MachineDeployment) bool) *v1alpha1.MachineDeployment {
	t.Helper()
	var got *v1alpha1.MachineDeployment
	if !poll(t, func() bool { got = r.get(t, d); return ok(got) }) {
		if got != nil {
			got.ManagedFields = nil
		}
		t.Fatalf("waited in vain for %s: the deployment is\n%+v\nits sets have %v, its events are\n%s", what, got, r.replicas(t),
			strings.Join(r.events(t), "\n"))
	}

	return got
}

// complete waits until the deployment says that it is where it is to be.
func (r *rig) complete(t *testing.T, d *v1alpha1.MachineDeployment) *v1alpha1.MachineDeployment {
	t.Helper()

	return r.until(t, "completion", d, func(d *v1alpha1.MachineDeployment) bool {
		progressing := condition(d, v1alpha1.MachineDeploymentProgressing)

		return d.Status.ObservedGeneration == d.Generation && d.Status.Replicas == d.Spec.Replicas &&
			d.Status.UpdatedReplicas == d.Spec.Replicas && d.Status.AvailableReplicas == d.Spec.Replicas &&
			progressing.Reason == v1alpha1.ReasonNewMachineSetAvailable
	})
}

func condition(d *v1alpha1.MachineDeployment, kind v1alpha1.MachineDeploymentConditionType) v1alpha1.MachineDeploymentCondition {
	for _, c := range d.Status.Conditions {
		if c.Type == kind {
			return c
		}
	}

	return v1alpha1.MachineDeploymentCondition{}
}

// poll waits until ok holds; false means that this takes unreasonably long.
func poll(t *testing.T, ok func() bool) bool {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-limit.C:
			return false
		}
	}

	return true
}

// events returns the namespace's Events as "Reason: message".
func (r *rig) events(t *testing.T) []string {
	t.Helper()
	list := &corev1.EventList{}
	if err := r.List(t.Context(), list, client.InNamespace(r.namespace)); err != nil {
		t.Fatal(err)
	}
	var texts []string
	for i := range list.Items {
		texts = append(texts, list.Items[i].Reason+": "+list.Items[i].Message)
	}

	return texts
}

// event waits for an Event with that reason and text.
func (r *rig) event(t *testing.T, reason, part string) {
	t.Helper()
	if !poll(t, func() bool {
		for _, text := range r.events(t) {
			if strings.HasPrefix(text, reason+": ") && strings.Contains(text, part) {
				return true
			}
		}

		return false
	}) {
		t.Errorf("no Event %s with %q; there are\n%s", reason, part, strings.Join(r.events(t), "\n"))
	}
}
