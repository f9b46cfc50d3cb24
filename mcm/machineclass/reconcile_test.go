package machineclass_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/kubetest"
	"github.com/machinebus/machinebus/mcm/machineclass"
)

const (
	// patience bounds every wait; it is far above what is waited for.
	patience = 60 * time.Second

	classFinalizer  = "machine.sapcloud.io/machine-controller-manager"
	secretFinalizer = "machine.sapcloud.io/machine-controller"
	foreign         = "test.invalid/finalizer"
)

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

// A rig is a namespace with both controllers at work.
type rig struct {
	client.Client

	namespace string
	second    string         // namespace that is served too; empty for none
	caller    *caller.Caller // asks drivers to check classes; nil for none
	failures  atomic.Int64   // that the controllers logged
}

func newRig(t *testing.T) *rig {
	t.Helper()
	c, namespace := kubetest.Namespace(t, apiServer)
	r := &rig{Client: c, namespace: namespace}

	return r
}

func newRunningRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t)
	r.run(t)

	return r
}

func (r *rig) run(t *testing.T) {
	t.Helper()
	served := map[string]cache.Config{r.namespace: {}}
	if r.second != "" {
		served[r.second] = cache.Config{}
	}
	mgr, err := ctrl.NewManager(apiServer, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}, Cache: cache.Options{DefaultNamespaces: served},
		Controller: config.Controller{SkipNameValidation: new(true)}, Logger: logr.New(&failures{n: &r.failures}),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	events := mgr.GetEventRecorderFor("mcm") //nolint:staticcheck // the newer API keeps only the first text of a reason
	if err := machineclass.NewClassReconciler(mgr.GetClient(), events).SetupWithManager(ctx, mgr); err != nil {
		t.Fatal(err)
	}
	if err := machineclass.NewSecretReconciler(mgr.GetClient(), events).SetupWithManager(ctx, mgr); err != nil {
		t.Fatal(err)
	}
	wait := func() {}
	if r.caller != nil {
		v := machineclass.NewValidator(ctx, mgr.GetClient(), events, dispatch.NewClasses(r.caller), "")
		if err := v.SetupWithManager(mgr); err != nil {
			t.Fatal(err)
		}
		wait = v.Wait
	}
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	t.Cleanup(sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error("manager:", err)
		}
		wait()
	}))
}

// failures is a logger that counts errors.
type failures struct{ n *atomic.Int64 }

func (*failures) Init(logr.RuntimeInfo)            {}
func (*failures) Enabled(int) bool                 { return false }
func (*failures) Info(int, string, ...any)         {}
func (f *failures) Error(error, string, ...any)    { f.n.Add(1) }
func (f *failures) WithValues(...any) logr.LogSink { return f }
func (f *failures) WithName(string) logr.LogSink   { return f }

func (r *rig) create(t *testing.T, o client.Object) {
	t.Helper()
	if err := r.Create(t.Context(), o); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) delete(t *testing.T, o client.Object) {
	t.Helper()
	if err := r.Delete(t.Context(), o); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: r.namespace, Name: name}
}

func (r *rig) class(name string, secrets ...string) *v1alpha1.MachineClass {
	c := &v1alpha1.MachineClass{
		ObjectMeta: r.meta(name), Provider: "virtual", ProviderSpec: runtime.RawExtension{Raw: []byte(`{}`)},
	}
	for i, secret := range secrets {
		ref := &corev1.SecretReference{Name: secret}
		if i == 0 {
			ref.Namespace = r.namespace // the second is without one, which means the same
			c.SecretRef = ref
		} else {
			c.CredentialsSecretRef = ref
		}
	}

	return c
}

func (r *rig) machine(name, kind, class string) *v1alpha1.Machine {
	return &v1alpha1.Machine{ObjectMeta: r.meta(name), Spec: v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: kind, Name: class}}}
}

func (r *rig) secret(name string) *corev1.Secret { return &corev1.Secret{ObjectMeta: r.meta(name)} }

// finalizers returns those of a stored object; ok is false when it is gone.
func (r *rig) finalizers(t *testing.T, o client.Object) (list []string, ok bool) {
	t.Helper()
	err := r.Get(t.Context(), client.ObjectKeyFromObject(o), o)
	if apierrors.IsNotFound(err) {
		return nil, false
	}
	if err != nil {
		t.Fatal(err)
	}

	return o.GetFinalizers(), true
}

// until waits until the object has exactly these finalizers.
func (r *rig) until(t *testing.T, o client.Object, want ...string) {
	t.Helper()
	var got []string
	if !poll(func() bool {
		list, ok := r.finalizers(t, o)
		got = list

		return ok && slices.Equal(got, want)
	}) {
		t.Fatalf("%T %s has finalizers %q, want %q", o, o.GetName(), got, want)
	}
}

func (r *rig) untilGone(t *testing.T, o client.Object) {
	t.Helper()
	if !poll(func() bool { _, ok := r.finalizers(t, o); return !ok }) {
		t.Fatalf("%T %s is still there, with finalizers %q", o, o.GetName(), o.GetFinalizers())
	}
}

// events returns the texts of the Events on objects of that name.
func (r *rig) events(t *testing.T, name string) []string {
	t.Helper()
	list := &corev1.EventList{}
	if err := r.List(t.Context(), list, client.InNamespace(r.namespace)); err != nil {
		t.Fatal(err)
	}
	var texts []string
	for i := range list.Items {
		if e := &list.Items[i]; e.InvolvedObject.Name == name {
			texts = append(texts, e.Reason+": "+e.Message)
		}
	}

	return texts
}

func (r *rig) event(t *testing.T, name, text string) {
	t.Helper()
	var got []string
	if !poll(func() bool { got = r.events(t, name); return slices.Contains(got, text) }) {
		t.Errorf("no Event %q on %s; there are\n%s", text, name, strings.Join(got, "\n"))
	}
}

// poll waits until ok holds; false means that this takes unreasonably long.
func poll(ok func() bool) bool {
	tick, limit := time.NewTicker(20*time.Millisecond), time.NewTimer(patience)
	defer tick.Stop()
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

func TestAClassStaysWhileMachinesUseIt(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	class := r.class("small")
	class.Finalizers = []string{foreign}
	r.create(t, class)
	var machines []*v1alpha1.Machine
	for i := range 7 {
		m := r.machine(fmt.Sprintf("m%d", i), "MachineClass", "small")
		machines = append(machines, m)
		r.create(t, m)
	}
	r.until(t, class, foreign, classFinalizer)
	for _, m := range machines[5:] {
		r.delete(t, m)
	}
	r.delete(t, class)
	r.event(t, "small", "DeletionBlocked: The class cannot be deleted until no machine refers to it: "+
		"5 machines still use it (m0, m1, m2, m3, m4)")
	for _, m := range machines[:5] {
		r.until(t, class, foreign, classFinalizer)
		r.delete(t, m)
	}
	r.until(t, class, foreign)
	if got := r.events(t, "small"); len(got) != 1 {
		t.Errorf("there are %d Events, want one and not one for each machine that goes:\n%s", len(got), strings.Join(got, "\n"))
	}
	class.Finalizers = nil
	if err := r.Update(t.Context(), class); err != nil {
		t.Fatal(err)
	}
	r.untilGone(t, class)
}

func TestAClassWithoutMachinesIsFree(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	kept, free := r.class("kept"), r.class("free")
	r.create(t, free)
	r.create(t, kept)
	wrong := r.machine("wrong", "AWSMachineClass", "free")
	r.create(t, wrong)
	right := r.machine("right", "MachineClass", "kept")
	r.create(t, right)
	r.until(t, kept, classFinalizer)
	r.until(t, free)

	r.delete(t, right)
	r.until(t, kept)
	r.delete(t, kept)
	r.untilGone(t, kept)
	r.delete(t, free)
	r.untilGone(t, free)
}

func TestAMachineChangesItsClass(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	before, after := r.class("before"), r.class("after")
	r.create(t, before)
	r.create(t, after)
	m := r.machine("m", "MachineClass", "before")
	r.create(t, m)
	r.until(t, before, classFinalizer)
	m.Spec.Class.Name = "after"
	if err := r.Update(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	r.until(t, after, classFinalizer)
	r.until(t, before)
}

func TestARemovedFinalizerComesBack(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	class := r.class("small")
	r.create(t, class)
	r.create(t, r.machine("m", "MachineClass", "small"))
	r.until(t, class, classFinalizer)
	if err := r.Patch(t.Context(), class, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))); err != nil {
		t.Fatal(err)
	}
	r.until(t, class, classFinalizer)
}

func TestASecretStaysWhileClassesUseIt(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	boot, cloud, other := r.secret("boot"), r.secret("cloud"), r.secret("other")
	for _, s := range []*corev1.Secret{boot, cloud, other} {
		r.create(t, s)
	}
	small, large := r.class("small", "boot", "cloud"), r.class("large", "boot")
	r.create(t, small)
	r.create(t, large)
	r.until(t, boot, secretFinalizer)
	r.until(t, cloud, secretFinalizer)
	r.until(t, other)

	r.delete(t, boot)
	r.event(t, "boot", "DeletionBlocked: The secret cannot be deleted until no machine class refers to it: "+
		"2 machine classes still use it ("+r.namespace+"/large, "+r.namespace+"/small)")
	small.SecretRef.Name = "other"
	if err := r.Update(t.Context(), small); err != nil {
		t.Fatal(err)
	}
	r.until(t, other, secretFinalizer)
	r.until(t, boot, secretFinalizer)
	r.delete(t, large)
	r.untilGone(t, boot)
	r.delete(t, small)
	r.until(t, cloud)
	r.until(t, other)
}

// What another manager has left is put in order when this one starts.
func TestTakeOver(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	used, unused := r.class("used", "used"), r.class("unused")
	unused.Finalizers = []string{classFinalizer}
	deleted := r.class("deleted")
	deleted.Finalizers = []string{classFinalizer}
	usedSecret, unusedSecret := r.secret("used"), r.secret("unused")
	unusedSecret.Finalizers = []string{secretFinalizer}
	for _, o := range []client.Object{
		used, unused, deleted, usedSecret, unusedSecret, r.machine("m", "MachineClass", "used"),
		r.machine("last", "MachineClass", "deleted"),
	} {
		r.create(t, o)
	}
	r.delete(t, deleted)
	r.run(t)
	r.until(t, used, classFinalizer)
	r.until(t, unused)
	r.until(t, usedSecret, secretFinalizer)
	r.until(t, unusedSecret)
	r.event(t, "deleted", "DeletionBlocked: The class cannot be deleted until no machine refers to it: 1 machine still uses it (last)")
	r.delete(t, r.machine("last", "", ""))
	r.untilGone(t, deleted)
}

func TestASecretOfAnotherNamespace(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		served bool
	}{
		"that is served":     {"who writes classes here must not keep what is there", true},
		"that is not served": {"the manager cannot read it, and must not try for ever", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, other := newRig(t), newRig(t)
			if tc.served {
				r.second = other.namespace
			}
			shared, own := other.secret("shared"), r.secret("own")
			r.create(t, shared)
			r.create(t, own)
			class := r.class("small", "shared", "own")
			class.SecretRef.Namespace = other.namespace
			r.create(t, class)
			r.run(t)
			r.until(t, own, secretFinalizer)
			r.until(t, shared)
			if n := r.failures.Load(); n > 0 {
				t.Errorf("%d reconciles failed: %s", n, tc.reason)
			}
		})
	}
}
