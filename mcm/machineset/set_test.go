package machineset_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

func TestScale(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 0)
	set.Spec.Template.Annotations = map[string]string{"cost-center": "4711"}
	set.Spec.Template.Finalizers = []string{v1alpha1.FinalizerName}
	set.Annotations = map[string]string{v1alpha1.AnnotationKeyEffectiveCreationTimeout: "7m"}
	r.create(t, set)
	for _, n := range []int32{1, 6, 2} {
		r.scale(t, set, n)
		r.settled(t, set, n)
	}
	got := r.machines(t)[0]
	if !strings.HasPrefix(got.Name, "a-") {
		t.Errorf("machine is called %s", got.Name)
	}
	want := metav1.ObjectMeta{
		Labels: map[string]string{"pool": "a"}, Finalizers: []string{v1alpha1.FinalizerName},
		Annotations: map[string]string{"cost-center": "4711", v1alpha1.AnnotationKeyEffectiveCreationTimeout: "7m"},
		OwnerReferences: []metav1.OwnerReference{{
			APIVersion: "machine.sapcloud.io/v1alpha1", Kind: "MachineSet", Name: "a", UID: set.UID, Controller: new(true),
			BlockOwnerDeletion: new(true),
		}},
	}
	if diff := cmp.Diff(want, metav1.ObjectMeta{
		Labels: got.Labels, Finalizers: got.Finalizers, Annotations: got.Annotations, OwnerReferences: got.OwnerReferences,
	}); diff != "" {
		t.Errorf("metadata (-want +got):\n%s", diff)
	}
	if d := got.Spec.MachineCreationTimeout; d == nil || d.Duration != 7*time.Minute {
		t.Errorf("creation timeout is %v, want that of the set's annotation", d)
	}
	r.event(t, set, "SuccessfulCreate", "machine a-")
	r.event(t, set, "SuccessfulDelete", "machine a-")
}

// TestScaleSubresource is what kubectl scale and autoscalers use.
func TestScaleSubresource(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 0)
	r.create(t, set)
	scale := &autoscalingv1.Scale{Spec: autoscalingv1.ScaleSpec{Replicas: 2}}
	if err := r.SubResource("scale").Update(t.Context(), set, client.WithSubResourceBody(scale)); err != nil {
		t.Fatal(err)
	}
	r.settled(t, set, 2)
}

func TestReplace(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 3)
	r.create(t, set)
	r.settled(t, set, 3)
	all := r.machines(t)
	fail := func(m *v1alpha1.Machine) {
		m.Status.CurrentStatus.Phase = v1alpha1.MachineFailed
		m.Status.LastOperation = v1alpha1.LastOperation{
			Type: v1alpha1.MachineOperationHealthCheck, State: v1alpha1.MachineStateFailed, Description: "it is gone",
		}
	}
	changeStatus(t, r, all[0], func(m *v1alpha1.Machine) {
		fail(m)
		m.Status.CurrentStatus.PreserveExpiryTime = &metav1.Time{Time: time.Now().Add(time.Hour)}
	})
	changeStatus(t, r, all[1], fail)
	var got *v1alpha1.MachineSet
	until(t, "the set has a new machine", func() bool {
		got = r.get(t, set)
		there := names(r.machines(t))

		return got.Status.Replicas == 3 && got.Status.ReadyReplicas == 2 && !slices.Contains(there, all[1].Name)
	})
	if !slices.Contains(names(r.machines(t)), all[0].Name) || got.Status.PreservedFailedReplicas != 1 {
		t.Errorf("the preserved machine is gone or not reported; status is %+v", got.Status)
	}
	want := []v1alpha1.MachineSummary{{Name: all[0].Name, OwnerRef: "a", LastOperation: all[0].Status.LastOperation}}
	if diff := cmp.Diff(want, got.Status.FailedMachines); diff != "" {
		t.Errorf("failed machines (-want +got):\n%s", diff)
	}
}

// TestChosenMachine has the autoscaler remove a certain machine.
func TestChosenMachine(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 3)
	r.create(t, set)
	r.settled(t, set, 3)
	all := r.machines(t)
	marked := time.Now().UTC().Truncate(time.Second)
	change(t, r, all[2], func(m *v1alpha1.Machine) {
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.AnnotationKeyMachinePriority, v1alpha1.MachinePriorityDelete)
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.AnnotationKeyMarkedForDeletionTime, marked.Format(time.RFC3339))
	})
	change(t, r, set, func(set *v1alpha1.MachineSet) {
		set.Spec.Replicas = 2
		set.Annotations = map[string]string{v1alpha1.AnnotationKeyLastReplicaChangeByScaler: marked.Format(time.RFC3339)}
	})
	r.settled(t, set, 2)
	if diff := cmp.Diff(names(all[:2]), names(r.machines(t))); diff != "" {
		t.Errorf("machines (-want +got):\n%s", diff)
	}
}

func TestAdoptAndRelease(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 2)
	orphan := &v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "orphan", Labels: map[string]string{"pool": "a"}},
		Spec:       set.Spec.Template.Spec,
	}
	r.create(t, orphan)
	r.create(t, set)
	r.settled(t, set, 2)
	if !slices.Contains(names(r.machines(t)), "orphan") {
		t.Fatalf("machines are %v, want the orphan among them", names(r.machines(t)))
	}
	change(t, r, orphan, func(m *v1alpha1.Machine) { m.Labels = map[string]string{"pool": "hospital"} })
	until(t, "the machine is free and replaced", func() bool {
		all := r.machines(t)
		if err := r.Get(t.Context(), client.ObjectKeyFromObject(orphan), orphan); err != nil {
			t.Fatal(err)
		}

		return len(all) == 3 && len(orphan.OwnerReferences) == 0
	})
	change(t, r, orphan, func(m *v1alpha1.Machine) { m.Labels = map[string]string{"pool": "a"} })
	r.settled(t, set, 2)
	until(t, "one of three machines is gone", func() bool { return len(r.machines(t)) == 2 })
}

// TestForeign has machines that look like the set's but have another owner.
func TestForeign(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 1)
	foreign := &v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: r.namespace, Name: "foreign", Labels: map[string]string{"pool": "a"},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "machine.sapcloud.io/v1alpha1", Kind: "MachineSet", Name: "b", UID: "b", Controller: new(true),
			}},
		},
		Spec: set.Spec.Template.Spec,
	}
	r.create(t, foreign)
	r.create(t, set)
	r.settled(t, set, 1)
	r.scale(t, set, 0)
	r.settled(t, set, 0)
	if diff := cmp.Diff([]string{"foreign"}, names(r.machines(t))); diff != "" {
		t.Errorf("machines (-want +got):\n%s", diff)
	}
}

func TestPropagate(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 2)
	set.Spec.Template.Spec.MachineDrainTimeout = &metav1.Duration{Duration: time.Hour}
	r.create(t, set)
	r.settled(t, set, 2)
	before := r.machines(t)
	change(t, r, before[0], func(m *v1alpha1.Machine) { m.Spec.ProviderID = "virtual://1" })
	change(t, r, set, func(set *v1alpha1.MachineSet) {
		spec := &set.Spec.Template.Spec
		spec.NodeTemplateSpec.Labels = map[string]string{"zone": "z1"}
		spec.NodeTemplateSpec.Spec.Taints = []corev1.Taint{{Key: "dedicated", Effect: corev1.TaintEffectNoSchedule}}
		spec.MachineDrainTimeout, spec.MachineHealthTimeout = nil, &metav1.Duration{Duration: time.Minute}
		spec.Class.Name = "large"
	})
	until(t, "the machines follow", func() bool {
		return !slices.ContainsFunc(r.machines(t), func(m *v1alpha1.Machine) bool {
			return m.Spec.MachineHealthTimeout == nil || m.Spec.MachineDrainTimeout != nil ||
				m.Spec.NodeTemplateSpec.Labels["zone"] != "z1" || len(m.Spec.NodeTemplateSpec.Spec.Taints) != 1
		})
	})
	after := r.machines(t)
	if diff := cmp.Diff(names(before), names(after)); diff != "" {
		t.Errorf("machines were replaced (-want +got):\n%s", diff)
	}
	if after[0].Spec.Class.Name != "small" || after[0].Spec.ProviderID != "virtual://1" {
		t.Errorf("spec is %+v, want class and providerID as they were: they are the instance's", after[0].Spec)
	}
}

func TestDelete(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 3)
	r.create(t, set)
	r.settled(t, set, 3)
	if diff := cmp.Diff([]string{v1alpha1.FinalizerName}, r.get(t, set).Finalizers); diff != "" {
		t.Errorf("finalizers (-want +got):\n%s", diff)
	}
	r.delete(t, set)
	until(t, "the set is gone", func() bool { return r.get(t, set) == nil })
	if left := r.machines(t); len(left) != 0 {
		t.Errorf("machines are left: %v", names(left))
	}
}

// TestDeleteUnseen deletes a set whose machines the cache does not show.
func TestDeleteUnseen(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	r.proxy.Hold("machines")
	set := r.set("a", 3)
	r.create(t, set)
	until(t, "the machines run", func() bool { return len(r.machines(t)) == 3 })
	r.delete(t, set)
	until(t, "the machines are gone", func() bool { return len(r.machines(t)) == 0 })
	r.proxy.Release("machines")
	until(t, "the set is gone", func() bool { return r.get(t, set) == nil })
}

// TestDeleteOrphan keeps the machines, as kubectl delete --cascade=orphan asks.
// There is no garbage collector here that would remove its own finalizer.
func TestDeleteOrphan(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 2)
	r.create(t, set)
	r.settled(t, set, 2)
	r.delete(t, set, client.PropagationPolicy(metav1.DeletePropagationOrphan))
	until(t, "the set is let go", func() bool {
		return slices.Equal(r.get(t, set).Finalizers, []string{metav1.FinalizerOrphanDependents})
	})
	if all := r.machines(t); len(all) != 2 || !all[0].DeletionTimestamp.IsZero() {
		t.Errorf("machines are %v, want both as they were", names(all))
	}
}

// TestDeleteSparesTheReleased deletes a set just after a person has taken a machine
// out of it, which the cache does not show yet.
func TestDeleteSparesTheReleased(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 3)
	r.create(t, set)
	r.settled(t, set, 3)
	spared := r.machines(t)[1]
	r.proxy.Hold("machines")
	change(t, r, spared, func(m *v1alpha1.Machine) { m.Labels = map[string]string{"pool": "hospital"} })
	r.delete(t, set)
	until(t, "the others are gone", func() bool { return len(r.machines(t)) == 1 })
	r.proxy.Release("machines")
	until(t, "the set is gone", func() bool { return r.get(t, set) == nil })
	r.wantFree(t, spared)
}

// TestDeleteReleases has a set deleted while no manager ran, with a machine
// that no longer matches.
func TestDeleteReleases(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	set := r.set("a", 2)
	set.Finalizers = []string{v1alpha1.FinalizerName}
	r.create(t, set)
	for name, pool := range map[string]string{"one": "a", "other": "hospital"} {
		r.create(t, &v1alpha1.Machine{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: r.namespace, Name: name, Labels: map[string]string{"pool": pool},
				OwnerReferences: []metav1.OwnerReference{
					*metav1.NewControllerRef(set, v1alpha1.SchemeGroupVersion.WithKind(v1alpha1.KindMachineSet)),
				},
			},
			Spec: set.Spec.Template.Spec,
		})
	}
	r.delete(t, set)
	r.play(t)
	r.startManager(t, managerOptions{})
	until(t, "the set is gone", func() bool { return r.get(t, set) == nil })
	r.wantFree(t, &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "other"}})
}

// wantFree expects that of all machines this one is left, and that it has no owner.
func (r *rig) wantFree(t *testing.T, m *v1alpha1.Machine) {
	t.Helper()
	all := r.machines(t)
	if len(all) != 1 || all[0].Name != m.Name || !all[0].DeletionTimestamp.IsZero() || len(all[0].OwnerReferences) != 0 {
		t.Errorf("machines are %v, want %s alone, not deleted and without an owner: %+v", names(all), m.Name, all)
	}
}

// TestInvalid has a set whose machines would never be found again.
func TestInvalid(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 1)
	set.Spec.Selector.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: "zone", Operator: "Exists"}}
	r.create(t, set)
	r.event(t, set, "InvalidMachineSet", "does not match the labels of spec.template: give the template these labels, or correct the selector")
	if n := len(r.machines(t)); n != 0 {
		t.Errorf("%d machines were made", n)
	}
	change(t, r, set, func(set *v1alpha1.MachineSet) { set.Spec.Selector.MatchExpressions = nil })
	r.settled(t, set, 1)
	change(t, r, set, func(set *v1alpha1.MachineSet) { set.Spec.Template.Labels = map[string]string{"pool": "b"} })
	r.delete(t, set)
	until(t, "the set is gone, invalid as it is", func() bool { return r.get(t, set) == nil })
	if left := r.machines(t); len(left) != 0 {
		t.Errorf("machines are left: %v", names(left))
	}
}

func TestRefused(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	r.proxy.Refuse("POST machines", true)
	set := r.set("a", 20)
	r.create(t, set)
	var got *v1alpha1.MachineSet
	until(t, "the set reports the failure", func() bool {
		got = r.get(t, set)

		return len(got.Status.Conditions) > 0
	})
	c := got.Status.Conditions[0]
	if c.Type != "ReplicaFailure" || c.Status != corev1.ConditionTrue || c.Reason != "FailedCreate" ||
		!strings.Contains(c.Message, "the quota is used up") || c.LastTransitionTime.IsZero() {
		t.Errorf("condition is %+v", c)
	}
	r.event(t, set, "FailedCreate", "the quota is used up")
	if looks, tries := r.proxy.Requests("GET machines"), r.proxy.Requests("POST machines"); tries > looks {
		t.Errorf("%d tries in %d passes, want one each: a refusal ends the pass", tries, looks)
	}
	r.proxy.Refuse("POST machines", false)
	if got = r.settled(t, set, 20); len(got.Status.Conditions) != 0 {
		t.Errorf("conditions are %+v, want none after success", got.Status.Conditions)
	}

	r.proxy.Refuse("DELETE machines", true)
	r.scale(t, set, 19)
	until(t, "the set reports the failed deletion", func() bool {
		got = r.get(t, set)

		return len(got.Status.Conditions) > 0 && got.Status.Conditions[0].Reason == "FailedDelete"
	})
	r.proxy.Refuse("DELETE machines", false)
	r.settled(t, set, 19)
}

// A machine that cannot be deleted is no reason to make none.
func TestRefusedDeleteStopsNoCreation(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 1)
	r.create(t, set)
	r.settled(t, set, 1)
	r.proxy.Refuse("DELETE machines", true)
	changeStatus(t, r, r.machines(t)[0], func(m *v1alpha1.Machine) { m.Status.CurrentStatus.Phase = v1alpha1.MachineFailed })
	until(t, "the set reports the failed deletion", func() bool {
		got := r.get(t, set)

		return len(got.Status.Conditions) > 0 && got.Status.Conditions[0].Reason == "FailedDelete"
	})
	r.scale(t, set, 3)
	until(t, "machines are made beside it", func() bool { return len(r.machines(t)) >= 3 })
	r.proxy.Refuse("DELETE machines", false)
	r.settled(t, set, 3)
}

// TestFreeze has the label that stops the creation of machines.
func TestFreeze(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 2)
	set.Labels = map[string]string{v1alpha1.LabelKeyFreeze: v1alpha1.LabelValueTrue}
	r.create(t, set)
	until(t, "the set was looked at", func() bool { return r.get(t, set).Status.ObservedGeneration > 0 })
	if n := len(r.machines(t)); n != 0 {
		t.Errorf("a frozen set has made %d machines", n)
	}
	change(t, r, set, func(set *v1alpha1.MachineSet) { delete(set.Labels, v1alpha1.LabelKeyFreeze) })
	r.settled(t, set, 2)
}

// TestRequests bounds what sets cost the API server.
func TestRequests(t *testing.T) {
	t.Parallel()
	const replicas = 120 // more than one burst
	r := newRunningRig(t)
	set := r.set("a", replicas)
	r.create(t, set)
	r.settled(t, set, replicas)
	n, what := r.proxy.All()
	t.Logf("up: %.2f requests for each machine: %v", float64(n)/replicas, what)
	if made := r.proxy.Requests("POST machines"); made != replicas {
		t.Errorf("made %d machines for %d replicas", made, replicas)
	}
	if n > 2*replicas {
		t.Errorf("%d requests for %d machines, want at most 2 each", n, replicas)
	}

	// Nothing happens: nothing is written or read.
	r.proxy.Reset()
	for i := range 3 {
		r.poke(t, set, i)
		changeStatus(t, r, r.machines(t)[0], func(m *v1alpha1.Machine) {
			m.Status.Conditions = []corev1.NodeCondition{{Type: "Ready", Status: "True", Message: fmt.Sprint(i)}}
		})
	}
	change(t, r, set, func(set *v1alpha1.MachineSet) { set.Spec.AutoPreserveFailedMachineMax = new(int32(1)) })
	r.settled(t, set, replicas)
	if n, what := r.proxy.All(); n != 1 {
		t.Errorf("%d requests of a set at rest, want one for the new generation: %v", n, what)
	}

	r.proxy.Reset()
	r.scale(t, set, 0)
	r.settled(t, set, 0)
	n, what = r.proxy.All()
	t.Logf("down: %.2f requests for each machine: %v", float64(n)/replicas, what)
	if deleted := r.proxy.Requests("DELETE machines"); n > 2*replicas || deleted > replicas*11/10 {
		t.Errorf("%d requests, %d of them deletes, for %d machines", n, deleted, replicas)
	}
}
