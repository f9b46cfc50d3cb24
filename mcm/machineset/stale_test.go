package machineset_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/machineset"
)

// poke has the set looked at.
func (r *rig) poke(t *testing.T, set *v1alpha1.MachineSet, n int) {
	t.Helper()
	change(t, r, set, func(set *v1alpha1.MachineSet) { set.Annotations = map[string]string{"poke": fmt.Sprint(n)} })
}

// TestStaleMachines has passes over a cache that shows none of the machines there
// are.
func TestStaleMachines(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.startManager(t, managerOptions{})
	r.proxy.Hold("machines")
	set := r.set("a", 3)
	r.create(t, set)
	until(t, "the machines are made", func() bool { return r.proxy.Requests("POST machines") >= 3 })
	for i := range 3 {
		looks := r.proxy.Requests("GET machines")
		r.poke(t, set, i)
		until(t, "a pass reads the machines", func() bool { return r.proxy.Requests("GET machines") > looks })
	}
	until(t, "the status counts all machines", func() bool { return r.get(t, set).Status.Replicas == 3 })
	r.proxy.Release("machines")
	r.scale(t, set, 4)
	until(t, "the set has one machine more", func() bool { return r.get(t, set).Status.Replicas == 4 })
	if made, deleted := r.proxy.Requests("POST machines"), r.proxy.Requests("DELETE machines"); made != 4 || deleted != 0 {
		t.Errorf("made %d and deleted %d machines for 4 replicas", made, deleted)
	}
}

// TestStaleDeletion lets the cache show a machine that is gone, and fewer
// replicas: it must not be made up for by deleting another one.
func TestStaleDeletion(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 4)
	r.create(t, set)
	r.settled(t, set, 4)
	r.proxy.Hold("machines", "machinesets")
	all := r.machines(t)
	r.delete(t, all[0])
	until(t, "one machine is gone", func() bool { return len(r.machines(t)) == 3 })
	r.scale(t, set, 3)
	want := names(r.machines(t))
	r.proxy.Reset()
	r.proxy.Release("machinesets") // now the cache has 4 machines for 3 replicas
	until(t, "a pass reads the machines", func() bool { return r.proxy.Requests("GET machines") > 0 })
	r.proxy.Release("machines")
	r.settled(t, set, 3)
	if diff := cmp.Diff(want, names(r.machines(t))); diff != "" || r.proxy.Requests("DELETE machines") != 0 {
		t.Errorf("machines (-want +got):\n%s", diff)
	}
}

// TestStaleReplicas lets the cache show more replicas than are wished for by
// now: what lacks only there must not be made.
func TestStaleReplicas(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 3)
	r.create(t, set)
	r.settled(t, set, 3)
	r.proxy.Hold("machinesets")
	r.scale(t, set, 2)
	r.proxy.Reset()
	r.delete(t, r.machines(t)[0]) // now the cache has 2 machines for 3 replicas
	until(t, "a pass reads the set", func() bool { return r.proxy.Requests("GET machinesets") > 0 })
	r.proxy.Release("machinesets")
	r.settled(t, set, 2)
	if n := r.proxy.Requests("POST machines"); n != 0 {
		t.Errorf("made %d machines for replicas that were taken back", n)
	}
}

// TestTakeOver has a manager take over whose cache, filled while it stood by,
// shows nothing of what the leader did.
func TestTakeOver(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.play(t)
	first, stop := r.startManager(t, managerOptions{direct: true, elect: true})
	<-first.Elected()
	second, _ := r.startManager(t, managerOptions{elect: true})
	r.proxy.Hold("machines")
	set := r.set("a", 5)
	r.create(t, set)
	r.settled(t, set, 5)
	want := names(r.machines(t))
	stop()
	<-second.Elected()
	until(t, "the new leader reads the machines", func() bool { return r.proxy.Requests("GET machines") > 0 })
	r.scale(t, set, 4)
	until(t, "a machine goes", func() bool { return r.proxy.Requests("DELETE machines") > 0 })
	r.proxy.Release("machines")
	r.settled(t, set, 4)
	got := names(r.machines(t))
	if n := r.proxy.Requests("POST machines"); n != 0 || slices.ContainsFunc(got, func(name string) bool { return !slices.Contains(want, name) }) {
		t.Errorf("the new leader made %d machines; there are %v, there were %v", n, got, want)
	}
	if n := r.proxy.Requests("DELETE machines"); n != 1 {
		t.Errorf("the new leader deleted %d machines, want 1", n)
	}
}

// An old view of the API server shows one set as it was; all else is current. Of
// machines it knows only the set's.
type oldView struct {
	client.Client

	set *v1alpha1.MachineSet
}

func (v oldView) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	if set, ok := o.(*v1alpha1.MachineSet); ok {
		v.set.DeepCopyInto(set)

		return nil
	}

	return v.Client.Get(ctx, key, o, opts...)
}

func (v oldView) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	var o client.ListOptions
	if !strings.HasSuffix(o.ApplyOptions(opts).FieldSelector.String(), string(v.set.UID)) {
		return nil // the index of the cache, asked for machines without an owner
	}

	return v.Client.List(ctx, list, client.InNamespace(v.set.Namespace))
}

// TestConflictKeepsErrors has a pass fail in two ways: a machine refuses the
// template, and the set has changed when its status is to be stored. The first must
// not be forgotten over the second, or it would be tried again without a pause.
func TestConflictKeepsErrors(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	set := r.set("a", 0)
	set.Finalizers = []string{v1alpha1.FinalizerName}
	r.create(t, set)
	_, stop := r.startManager(t, managerOptions{direct: true})
	r.scale(t, set, 1)
	until(t, "there is a machine", func() bool { return r.get(t, set).Status.Replicas == 1 })
	stop()
	change(t, r, set, func(set *v1alpha1.MachineSet) {
		set.Spec.Template.Spec.MachineDrainTimeout = &metav1.Duration{Duration: time.Hour}
	})
	stale := r.get(t, set)
	r.poke(t, set, 1)
	r.proxy.Refuse("PATCH machines", true)
	c, err := client.New(r.proxy.Config(), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	reconciler := &machineset.Reconciler{Client: oldView{c, stale}, Live: c, Events: record.NewFakeRecorder(1)}
	_, err = reconciler.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(set)})
	if err == nil || !strings.Contains(err.Error(), "hand the template down") {
		t.Errorf("error is %v, want that of the machine", err)
	}
}

// TestConflictOnRelease has a set change at the moment that its finalizer goes. Nothing
// else would start the next pass: the event of that change has come by then.
func TestConflictOnRelease(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	set := r.set("a", 0)
	set.Finalizers = []string{v1alpha1.FinalizerName}
	r.create(t, set)
	r.delete(t, set)
	stale := r.get(t, set)
	r.poke(t, set, 1)
	reconciler := &machineset.Reconciler{Client: oldView{r.Client, stale}, Live: r.Client, Events: record.NewFakeRecorder(1)}
	request := reconcile.Request{NamespacedName: client.ObjectKeyFromObject(set)}
	result, err := reconciler.Reconcile(t.Context(), request)
	if err != nil || result.RequeueAfter == 0 || result.RequeueAfter > time.Minute {
		t.Errorf("after a conflict the next pass comes in %s, error %v; want it within a minute", result.RequeueAfter, err)
	}
	reconciler.Client = oldView{r.Client, r.get(t, set)}
	if _, err := reconciler.Reconcile(t.Context(), request); err != nil || r.get(t, set) != nil {
		t.Errorf("the set is still there after another pass, error %v", err)
	}
}
