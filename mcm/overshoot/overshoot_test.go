package overshoot_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/kubetest"
	"github.com/machinebus/machinebus/mcm/overshoot"
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

		return nil
	})
}

// A rig is a namespace with a running manager.
type rig struct {
	client.Client

	namespace string
}

func newRig(t *testing.T) *rig {
	t.Helper()

	return newRigWith(t, 200*time.Millisecond)
}

// newBareRig is a rig without a manager.
func newBareRig(t *testing.T) *rig {
	t.Helper()
	c, namespace := kubetest.Namespace(t, apiServer)
	r := &rig{Client: c, namespace: namespace}

	return r
}

func newRigWith(t *testing.T, period time.Duration) *rig {
	t.Helper()
	r := newBareRig(t)
	mgr, err := ctrl.NewManager(apiServer, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"},
		Cache:      cache.Options{DefaultNamespaces: map[string]cache.Config{r.namespace: {}}},
		Controller: config.Controller{SkipNameValidation: new(true)},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	settings := overshoot.DefaultSettings()
	settings.Period = period
	sets := &overshoot.SetReconciler{
		Client: mgr.GetClient(), Live: mgr.GetAPIReader(), Settings: settings,
		Events: mgr.GetEventRecorderFor("mcm"), //nolint:staticcheck // the newer API keeps only the first text of a reason
	}
	deployments := &overshoot.DeploymentReconciler{Client: mgr.GetClient(), Settings: settings}
	if err := errors.Join(sets.SetupWithManager(ctx, mgr), deployments.SetupWithManager(ctx, mgr)); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error("manager:", err)
		}
	})

	return r
}

func (r *rig) create(t *testing.T, o client.Object) {
	t.Helper()
	if err := r.Create(t.Context(), o); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) change(t *testing.T, o client.Object, do func()) {
	t.Helper()
	if err := r.Get(t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
		t.Fatal(err)
	}
	before, ok := o.DeepCopyObject().(client.Object)
	if !ok {
		t.Fatalf("%T is no object", o)
	}
	do()
	if err := r.Patch(t.Context(), o, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
}

var labels = map[string]string{"pool": "a"}

func (r *rig) deployment(name string, strategy v1alpha1.MachineDeploymentStrategy) *v1alpha1.MachineDeployment {
	return &v1alpha1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: name},
		Spec: v1alpha1.MachineDeploymentSpec{
			Replicas: 2, Selector: &metav1.LabelSelector{MatchLabels: labels}, Strategy: strategy,
			Template: v1alpha1.MachineTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: "MachineClass", Name: "small"}},
			},
		},
	}
}

// set makes a set of 2 replicas; owner may be nil.
func (r *rig) set(t *testing.T, name string, owner *v1alpha1.MachineDeployment) *v1alpha1.MachineSet {
	t.Helper()
	template := r.deployment("", v1alpha1.MachineDeploymentStrategy{}).Spec
	set := &v1alpha1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: name},
		Spec:       v1alpha1.MachineSetSpec{Replicas: 2, Selector: template.Selector, Template: template.Template},
	}
	if owner != nil {
		kind := v1alpha1.SchemeGroupVersion.WithKind(v1alpha1.KindMachineDeployment)
		set.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(owner, kind)}
	}
	r.create(t, set)

	return set
}

// machines makes n machines of a set and returns them.
func (r *rig) machines(t *testing.T, set *v1alpha1.MachineSet, n int) []*v1alpha1.Machine {
	t.Helper()
	var all []*v1alpha1.Machine
	for range n {
		m := &v1alpha1.Machine{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: r.namespace, GenerateName: set.Name + "-", Labels: labels,
				OwnerReferences: []metav1.OwnerReference{
					*metav1.NewControllerRef(set, v1alpha1.SchemeGroupVersion.WithKind(v1alpha1.KindMachineSet)),
				},
			},
			Spec: set.Spec.Template.Spec,
		}
		r.create(t, m)
		all = append(all, m)
	}

	return all
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

// A state is what an object shows of a freeze.
type state struct {
	label, condition bool
	reason, message  string
}

func (r *rig) setState(t *testing.T, set *v1alpha1.MachineSet) (s state) {
	t.Helper()
	if err := r.Get(t.Context(), client.ObjectKeyFromObject(set), set); err != nil {
		t.Fatal(err)
	}
	s.label = set.Labels["freeze"] == "True"
	for _, c := range set.Status.Conditions {
		if c.Type == "Frozen" && c.Status == corev1.ConditionTrue {
			s.condition, s.reason, s.message = true, c.Reason, c.Message
		}
	}

	return s
}

func (r *rig) deploymentState(t *testing.T, d *v1alpha1.MachineDeployment) (s state) {
	t.Helper()
	if err := r.Get(t.Context(), client.ObjectKeyFromObject(d), d); err != nil {
		t.Fatal(err)
	}
	s.label = d.Labels["freeze"] == "True"
	for _, c := range d.Status.Conditions {
		if c.Type == "Frozen" && c.Status == corev1.ConditionTrue {
			s.condition, s.reason, s.message = true, c.Reason, c.Message
		}
	}

	return s
}

func (r *rig) event(t *testing.T, set *v1alpha1.MachineSet, reason string) {
	t.Helper()
	until(t, "there is an Event "+reason, func() bool {
		list := &corev1.EventList{}
		if err := r.List(t.Context(), list, client.InNamespace(r.namespace)); err != nil {
			t.Fatal(err)
		}

		return slices.ContainsFunc(list.Items, func(e corev1.Event) bool {
			return e.InvolvedObject.Name == set.Name && e.Reason == reason
		})
	})
}

func TestSetAlone(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	set := r.set(t, "a", nil)
	all := r.machines(t, set, 6)
	until(t, "the set is frozen", func() bool { s := r.setState(t, set); return s.label && s.condition })
	s := r.setState(t, set)
	if s.reason != "OverShootingReplicaCount" || !strings.Contains(s.message, "6 machines for 2 replicas") {
		t.Errorf("condition says %s: %s", s.reason, s.message)
	}
	r.event(t, set, "FrozeMachineSet")
	if err := r.Delete(t.Context(), all[0]); err != nil {
		t.Fatal(err)
	}
	until(t, "the set is thawed", func() bool { return r.setState(t, set) == state{} })
	r.event(t, set, "UnfrozeMachineSet")
}

// TestThawAtOnce has a set go on as soon as its machines are few enough.
func TestThawAtOnce(t *testing.T) {
	t.Parallel()
	r := newRigWith(t, time.Hour)
	set := r.set(t, "a", nil)
	all := r.machines(t, set, 6)
	until(t, "the set is frozen", func() bool { s := r.setState(t, set); return s.label && s.condition })
	if err := r.Delete(t.Context(), all[0]); err != nil {
		t.Fatal(err)
	}
	until(t, "the set is thawed", func() bool { return r.setState(t, set) == state{} })
}

// TestMoreReplicas has people end freezes by more replicas, of a set alone and of a
// deployment.
func TestMoreReplicas(t *testing.T) {
	t.Parallel()
	for name, n := range map[string]int{"alone": 6, "deployment": 4} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRigWith(t, time.Hour)
			d := r.deployment("a", v1alpha1.MachineDeploymentStrategy{Type: "Recreate"})
			set := &v1alpha1.MachineSet{}
			if name == "alone" {
				set = r.set(t, "a", nil)
			} else {
				r.create(t, d)
				set = r.set(t, "a", d)
			}
			r.machines(t, set, n)
			until(t, "the set is frozen", func() bool { s := r.setState(t, set); return s.label && s.condition })
			if name == "alone" {
				r.change(t, set, func() { set.Spec.Replicas = 6 })
			} else {
				until(t, "so is the deployment", func() bool { return r.deploymentState(t, d).condition })
				r.change(t, d, func() { d.Spec.Replicas = 6 })
				until(t, "the deployment is thawed", func() bool { return r.deploymentState(t, d) == state{} })
			}
			until(t, "the set is thawed", func() bool { return r.setState(t, set) == state{} })
		})
	}
}

// TestSlowShrink has a set scaled in, whose machines take their time to go.
func TestSlowShrink(t *testing.T) {
	t.Parallel()
	r := newBareRig(t)
	set := r.set(t, "a", nil)
	r.change(t, set, func() { set.Spec.Replicas = 8 })
	all := r.machines(t, set, 8)
	until(t, "none was made in the second in which the first goes", func() bool {
		return time.Now().After(all[7].CreationTimestamp.Add(time.Second))
	})
	for _, m := range all[:6] {
		r.change(t, m, func() { m.Finalizers = []string{v1alpha1.FinalizerName} })
		if err := r.Delete(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	r.change(t, set, func() { set.Spec.Replicas = 2 })
	r.look(t, set, set)
	if s := r.setState(t, set); s.label {
		t.Error("a set of 2 replicas with 2 machines is frozen, as 6 more are on their way out")
	}
	asThere := overshoot.DefaultSettings()
	asThere.CountDeleted = true
	r.lookWith(t, asThere, set, set)
	if s := r.setState(t, set); !s.label {
		t.Error("the set is not frozen, although machines on their way out count")
	}
	r.change(t, set, func() { delete(set.Labels, v1alpha1.LabelKeyFreeze); set.Status.Conditions = nil })
	r.machines(t, set, 4)
	r.look(t, set, set)
	if s := r.setState(t, set); !s.label {
		t.Error("4 machines more than replicas were made, and the set is not frozen")
	}
}

// An old view of the cluster shows one set as it was; all else is current.
type oldView struct {
	client.Client

	set *v1alpha1.MachineSet
}

func (v oldView) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	if set, ok := o.(*v1alpha1.MachineSet); ok && key.Name == v.set.Name {
		v.set.DeepCopyInto(set)

		return nil
	}

	return v.Client.Get(ctx, key, o, opts...)
}

// List knows the index of the cache.
func (v oldView) List(ctx context.Context, list client.ObjectList, _ ...client.ListOption) error {
	return v.Client.List(ctx, list, client.InNamespace(v.set.Namespace))
}

// look has a set looked at once, as the cache shows it.
func (r *rig) look(t *testing.T, set, cached *v1alpha1.MachineSet) {
	t.Helper()
	r.lookWith(t, overshoot.DefaultSettings(), set, cached)
}

func (r *rig) lookWith(t *testing.T, settings overshoot.Settings, set, cached *v1alpha1.MachineSet) {
	t.Helper()
	reconciler := &overshoot.SetReconciler{
		Client: oldView{r.Client, cached.DeepCopy()}, Live: r.Client, Events: record.NewFakeRecorder(1), Settings: settings,
	}
	if _, err := reconciler.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(set)}); err != nil {
		t.Fatal(err)
	}
}

// TestStaleReplicas counts the machines of a set whose new replicas have not
// reached the cache.
func TestStaleReplicas(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason   string
		replicas int32
		frozen   bool
	}{
		"raised": {"the set created what its new replicas ask for", 6, false},
		"as was": {"they are too many wherever one looks", 2, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newBareRig(t)
			set := r.set(t, "a", nil)
			stale := set.DeepCopy()
			r.change(t, set, func() { set.Spec.Replicas = tc.replicas })
			r.machines(t, set, 6)
			r.look(t, set, stale) // with the old resource version the first write fails, as it should
			stale.ResourceVersion = set.ResourceVersion
			r.look(t, set, stale)
			if got := r.setState(t, set).label; got != tc.frozen {
				t.Errorf("frozen is %v, want %v: %s", got, tc.frozen, tc.reason)
			}
		})
	}
}

// TestFewer holds a set that has as many machines as it may.
func TestFewer(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	near, over := r.set(t, "near", nil), r.set(t, "over", nil)
	r.machines(t, near, 5)
	r.machines(t, over, 6)
	until(t, "the other set is frozen", func() bool { return r.setState(t, over).condition })
	if s := r.setState(t, near); s != (state{}) {
		t.Errorf("5 machines have frozen a set of 2 replicas: %+v", s)
	}
}

// TestShrink scales a set down by much, which is no overshooting.
func TestShrink(t *testing.T) {
	t.Parallel()
	r := newRigWith(t, time.Hour)
	shrinking, first, over := r.set(t, "shrinking", nil), r.set(t, "first", nil), r.set(t, "over", nil)
	r.change(t, shrinking, func() { shrinking.Spec.Replicas = 8 })
	all := r.machines(t, shrinking, 8)
	r.machines(t, first, 6)
	until(t, "the looks that the machines' creation caused are over", func() bool { return r.setState(t, first).condition })
	r.change(t, shrinking, func() {
		shrinking.Spec.Replicas = 1
		shrinking.Annotations = map[string]string{v1alpha1.AnnotationKeyDesiredReplicas: "1"}
	})
	if err := r.Delete(t.Context(), all[0]); err != nil {
		t.Fatal(err)
	}
	r.machines(t, over, 6)
	until(t, "the other set is frozen, by what came later", func() bool { return r.setState(t, over).condition })
	if s := r.setState(t, shrinking); s != (state{}) {
		t.Errorf("the shrinking set is frozen: %+v", s)
	}
}

func TestDeployment(t *testing.T) {
	t.Parallel()
	for _, strategy := range []v1alpha1.MachineDeploymentStrategyType{"Recreate", "RollingUpdate"} {
		t.Run(string(strategy), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			d := r.deployment("a", v1alpha1.MachineDeploymentStrategy{Type: strategy})
			if strategy == v1alpha1.RollingUpdateMachineDeploymentStrategyType {
				none, one := intstr.FromInt32(0), intstr.FromInt32(1)
				limits := v1alpha1.UpdateConfiguration{MaxUnavailable: &one, MaxSurge: &none}
				d.Spec.Strategy.RollingUpdate = &v1alpha1.RollingUpdateMachineDeployment{UpdateConfiguration: limits}
			}
			r.create(t, d)
			old, latest := r.set(t, "old", d), r.set(t, "new", d)
			all := r.machines(t, latest, 4)
			until(t, "the deployment is frozen", func() bool { s := r.deploymentState(t, d); return s.label && s.condition })
			s := r.deploymentState(t, d)
			if s.reason != "OverShootingReplicaCount" || !strings.Contains(s.message, "new") {
				t.Errorf("condition says %s: %s", s.reason, s.message)
			}
			if r.setState(t, old).label {
				t.Error("the other set is frozen too")
			}
			if err := r.Delete(t.Context(), all[0]); err != nil {
				t.Fatal(err)
			}
			until(t, "both are thawed", func() bool {
				return r.deploymentState(t, d) == state{} && r.setState(t, latest) == state{}
			})

			// More replicas, and it is no longer too many.
			r.machines(t, latest, 1)
			until(t, "it is frozen again", func() bool { return r.deploymentState(t, d).condition })
			r.change(t, d, func() { d.Spec.Replicas = 3 })
			until(t, "both are thawed again", func() bool {
				return r.deploymentState(t, d) == state{} && r.setState(t, latest) == state{}
			})
		})
	}
}

// TestUnfreeze has people end freezes, of a set that has too many machines and of
// one that has not.
func TestUnfreeze(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.deployment("a", v1alpha1.MachineDeploymentStrategy{Type: "Recreate"})
	r.create(t, d)
	set := r.set(t, "a", d)
	r.machines(t, set, 4)
	until(t, "both are frozen", func() bool { return r.deploymentState(t, d).condition && r.setState(t, set).condition })
	for _, o := range []client.Object{set, d} {
		thawed := r.transitions(t, set)
		r.change(t, o, func() { o.SetAnnotations(map[string]string{v1alpha1.AnnotationKeyUnfreeze: ""}) })
		until(t, "the request is answered", func() bool {
			if err := r.Get(t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
				t.Fatal(err)
			}
			_, asked := o.GetAnnotations()[v1alpha1.AnnotationKeyUnfreeze]

			return !asked
		})
		until(t, "the set was thawed", func() bool { return r.transitions(t, set) > thawed })
		until(t, "it is frozen again: it still has too many", func() bool {
			return r.setState(t, set).condition && r.deploymentState(t, d).condition
		})
	}
}

// transitions counts how often a set was thawed, by its Events.
func (r *rig) transitions(t *testing.T, set *v1alpha1.MachineSet) (n int32) {
	t.Helper()
	list := &corev1.EventList{}
	if err := r.List(t.Context(), list, client.InNamespace(r.namespace)); err != nil {
		t.Fatal(err)
	}
	for i := range list.Items {
		if e := &list.Items[i]; e.InvolvedObject.Name == set.Name && e.Reason == v1alpha1.EventUnfrozeMachineSet {
			n += e.Count
		}
	}

	return n
}

// TestDrift has label and condition contradict each other, as after an edit or a crash
// between two writes.
func TestDrift(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.deployment("a", v1alpha1.MachineDeploymentStrategy{Type: "Recreate"})
	d.Labels = map[string]string{"freeze": "True"} // though no set is
	r.create(t, d)
	until(t, "the deployment follows its sets", func() bool { return r.deploymentState(t, d) == state{} })
	set := r.set(t, "a", d)
	r.machines(t, set, 4)
	until(t, "both are frozen", func() bool { return r.deploymentState(t, d).condition && r.setState(t, set).condition })
	for _, o := range []client.Object{set, d} {
		patch := client.RawPatch("application/merge-patch+json", []byte(`{"status":{"machineSetCondition":null,"conditions":null}}`))
		if err := r.Status().Patch(t.Context(), o, patch); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "both say so again", func() bool { return r.deploymentState(t, d).condition && r.setState(t, set).condition })
	if s := r.deploymentState(t, d); s.reason != "MachineDeploymentStateSync" {
		t.Errorf("reason is %s", s.reason)
	}
	r.change(t, set, func() { delete(set.Labels, "freeze") })
	until(t, "the label is back", func() bool { return r.setState(t, set).label })
}
