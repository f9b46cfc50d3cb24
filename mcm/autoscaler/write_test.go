package autoscaler_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// stamp is the rig's time, later what a second change has in its place.
const stamp, later = "2026-08-11T07:30:00Z", "2026-08-11T07:30:00.000000001Z"

func TestIncreaseSize(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	before := r.deployment("a", 1, size("0", "5"))
	r.refresh(1, 0)
	if err := r.increase("a", 2); err != nil {
		t.Fatal(err)
	}
	if got := r.target("a"); got != 3 {
		t.Errorf("the target is %d right after the increase, want 3", got)
	}
	after := r.stored("a")
	if after.Spec.Replicas != 3 || after.Generation != before.Generation+1 {
		t.Errorf("stored %d replicas in %d updates, want 3 in one", after.Spec.Replicas, after.Generation-before.Generation)
	}
	r.wantCode(r.increase("a", 3), codes.OutOfRange)
	r.wantCode(r.increase("a", 2147483647), codes.OutOfRange)
	r.wantCode(r.increase("a", 0), codes.InvalidArgument)
	r.wantCode(r.increase("a", -1), codes.InvalidArgument)
	r.wantCode(r.increase("none", 1), codes.NotFound)

	// A write of another program that no snapshot has seen is kept.
	after.Spec.Replicas = 4
	after.Annotations["kept"] = "yes"
	if err := r.Update(t.Context(), after); err != nil {
		t.Fatal(err)
	}
	if err := r.increase("a", 1); err != nil {
		t.Fatal(err)
	}
	if d := r.stored("a"); d.Spec.Replicas != 5 || d.Annotations["kept"] != "yes" {
		t.Errorf("a write that came first was lost: %d replicas, annotations %v", d.Spec.Replicas, d.Annotations)
	}
	if got := r.target("a"); got != 5 {
		t.Errorf("the target is %d, want 5", got)
	}

	// Neither is a deployment scaled that is no group any more.
	d := r.stored("a")
	d.Annotations = nil
	d.Spec.Replicas = 1
	if err := r.Update(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	r.eventually("the deployment is known to be no group", func() bool { return r.increase("a", 1) != nil })
	if d := r.stored("a"); d.Spec.Replicas > 2 {
		t.Errorf("%d replicas", d.Spec.Replicas)
	}
}

func TestDeleteNodes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.deployment("a", 4, size("1", "9"))
	r.deployment("b", 1, size("0", "9"))
	node1, node2 := r.joined("a", "m1"), r.joined("a", "m2")
	r.machine("a", "m3")
	other := r.joined("b", "other")
	r.refresh(2, 4)

	// All of them or none.
	r.wantCode(r.deleteNodes("a", node1, other), codes.InvalidArgument)
	held := &externalgrpc.ExternalGrpcNode{
		Name: node2.GetName(), ProviderID: node2.GetProviderID(),
		Annotations: map[string]string{v1alpha1.AnnotationKeyScaleDownDisabled: "true"},
	}
	r.wantCode(r.deleteNodes("a", node1, held), codes.FailedPrecondition)
	if d := r.stored("a"); d.Spec.Replicas != 4 || d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion] != "" {
		t.Fatalf("something was done: %d replicas, annotations %v", d.Spec.Replicas, d.Annotations)
	}

	before := r.stored("a")
	if err := r.deleteNodes("a", node1, r.fake("m3"), node1); err != nil {
		t.Fatal(err)
	}
	d := r.stored("a")
	if want := "m1~" + stamp + ",m3~" + stamp; d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion] != want {
		t.Errorf("machines to delete: %q, want %q", d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion], want)
	}
	if got := d.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler]; got != stamp {
		t.Errorf("time of the change: %q, want %q", got, stamp)
	}
	if d.Spec.Replicas != 2 || r.target("a") != 2 || d.Generation != before.Generation+1 {
		t.Errorf("%d replicas, target %d, %d updates; want 2, 2 and one", d.Spec.Replicas, r.target("a"), d.Generation-before.Generation)
	}

	// A machine in deletion does not shrink the group once more.
	for _, node := range []*externalgrpc.ExternalGrpcNode{
		node1, r.fake("m3"), r.fake("long-gone"), {Name: "gone", ProviderID: "virtual://gone"},
	} {
		if err := r.deleteNodes("a", node); err != nil {
			t.Errorf("%s is going or gone already, which is a success, got: %v", node.GetName(), err)
		}
	}
	if got := r.stored("a").Spec.Replicas; got != 2 {
		t.Errorf("%d replicas, want 2", got)
	}
	for _, i := range r.instances(r.id("a")) {
		want := externalgrpc.InstanceStatus_instanceDeleting
		if i.GetId() == node2.GetProviderID() {
			want = externalgrpc.InstanceStatus_instanceRunning
		}
		if got := i.GetStatus().GetInstanceState(); got != want {
			t.Errorf("%s is %s, want %s", i.GetId(), got, want)
		}
	}
	if err := r.deleteNodes("a", node2); err != nil {
		t.Fatal(err)
	}
	if got := r.stored("a").Spec.Replicas; got != 1 {
		t.Errorf("%d replicas, want 1", got)
	}
}

func TestDeleteNodes_Minimum(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.deployment("a", 3, size("2", "9"))
	nodes := []*externalgrpc.ExternalGrpcNode{r.joined("a", "m1"), r.joined("a", "m2")}
	r.refresh(1, 2)
	r.wantCode(r.deleteNodes("a", nodes...), codes.FailedPrecondition)
	if got := r.stored("a").Spec.Replicas; got != 3 {
		t.Errorf("%d replicas: all nodes or none", got)
	}
	if err := r.deleteNodes("a", nodes[0]); err != nil {
		t.Error(err)
	}
}

// What never came goes as far as the minimum lets it: the cluster-autoscaler asks for
// all of a group at once, and would have them counted as nodes to come otherwise.
func TestDeleteNodes_MinimumOfWhatNeverCame(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.deployment("a", 5, size("1", "9"))
	var fakes []*externalgrpc.ExternalGrpcNode
	for _, name := range []string{"m1", "m2", "m3", "m4", "m5"} {
		r.machine("a", name)
		fakes = append(fakes, r.fake(name))
	}
	r.refresh(1, 5)
	if err := r.deleteNodes("a", fakes...); err != nil {
		t.Fatal(err)
	}
	d := r.stored("a")
	want := "m1~" + stamp + ",m2~" + stamp + ",m3~" + stamp + ",m4~" + stamp
	if got := d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion]; d.Spec.Replicas != 1 || got != want {
		t.Errorf("%d replicas, marked %q; want 1 and %q", d.Spec.Replicas, got, want)
	}
	r.wantCode(r.deleteNodes("a", fakes...), codes.FailedPrecondition) // otherwise the autoscaler would believe in each loop that it is gone
	r.wantCode(r.deleteNodes("a", fakes[4]), codes.FailedPrecondition)
	if got := r.stored("a").Spec.Replicas; got != 1 {
		t.Errorf("%d replicas, want the minimum", got)
	}
}

func TestDeleteNodes_Foreign(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.deployment("a", 3, size("0", "9"))
	r.deployment("unmarked", 3, nil)
	node, foreign := r.joined("a", "m1"), r.joined("unmarked", "m2")
	r.refresh(1, 1)
	r.wantCode(r.deleteNodes("a", node, foreign), codes.InvalidArgument)
	if got := r.stored("a").Spec.Replicas; got != 3 {
		t.Errorf("%d replicas: all nodes or none", got)
	}
}

// The cluster-autoscaler sends one call for each node, all at once.
func TestDeleteNodes_Concurrently(t *testing.T) {
	t.Parallel()
	for _, marks := range []autoscaler.Marks{autoscaler.MarksWithTime, autoscaler.MarksByName} {
		t.Run(string(marks), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, func(_ *rig, c *autoscaler.Config) { c.Marks = marks })
			const nodes = 10
			r.deployment("a", nodes+2, size("2", "20"))
			var all []*externalgrpc.ExternalGrpcNode
			var want []string
			for i := range nodes {
				name := fmt.Sprintf("m%d", i)
				all = append(all, r.joined("a", name))
				want = append(want, name)
			}
			r.refresh(1, nodes)
			var calls sync.WaitGroup
			for _, node := range all {
				calls.Go(func() {
					if err := r.deleteNodes("a", node); err != nil {
						t.Error(err)
					}
				})
			}
			calls.Wait()
			d := r.stored("a")
			var got []string
			last := now.Add(-time.Nanosecond)
			for entry := range strings.SplitSeq(d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion], ",") {
				name, at, timed := strings.Cut(entry, "~")
				got = append(got, name)
				if timed != (marks == autoscaler.MarksWithTime) {
					t.Errorf("entry %q in mode %s", entry, marks)
				}
				if !timed {
					continue
				}
				mark, err := time.Parse(time.RFC3339, at)
				if err != nil || !mark.After(last) {
					t.Errorf("%q, %v: not after the mark before it, whose set would take it for one of its own", entry, err)
				}
				last = mark
			}
			changed, err := time.Parse(time.RFC3339, d.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler])
			if err != nil || changed.Before(last) {
				t.Errorf("the last change is of %s, %v; before the last mark, of %s", changed, err, last)
			}
			slices.Sort(got)
			if d.Spec.Replicas != 2 || !slices.Equal(got, want) {
				t.Errorf("%d replicas, marked %v; want 2 and %v", d.Spec.Replicas, got, want)
			}
		})
	}
}

func TestDeleteNodes_DuringAnUpdate(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.deployment("a", 3, size("0", "9"))
	d.Status.Replicas, d.Status.UpdatedReplicas = 3, 1
	d.Status.Conditions = []v1alpha1.MachineDeploymentCondition{{Type: v1alpha1.MachineDeploymentProgressing, Status: "True", Reason: "MachineSetUpdated"}}
	if err := r.Status().Update(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	node := r.joined("a", "m1")
	r.machine("a", "m2")
	r.refresh(1, 2)
	r.wantCode(r.deleteNodes("a", node), codes.FailedPrecondition)
	if err := r.deleteNodes("a", r.fake("m2")); err != nil {
		t.Error("a machine that has not joined may go at any time:", err)
	}
	d = r.stored("a")
	d.Status.UpdatedReplicas = 3
	if err := r.Status().Update(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	r.eventually("the update is seen to be over", func() bool { r.refresh(1, 2); return r.deleteNodes("a", node) == nil })
	if got := r.stored("a").Spec.Replicas; got != 1 {
		t.Errorf("%d replicas, want 1", got)
	}
}

// An update has machines beyond the replicas. When one of those does not come, the
// replicas stay: they are those of running machines.
func TestDeleteNodes_BeyondAnUpdate(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.deployment("a", 3, size("0", "9"))
	d.Status.Replicas, d.Status.UpdatedReplicas = 4, 1
	d.Status.Conditions = []v1alpha1.MachineDeploymentCondition{{Type: v1alpha1.MachineDeploymentProgressing, Status: "True", Reason: "MachineSetUpdated"}}
	if err := r.Status().Update(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"m1", "m2"} {
		r.joined("a", name)
	}
	last := r.joined("a", "m3")
	r.machine("a", "surge")
	r.eventually("the update is seen", func() bool {
		seen := &v1alpha1.MachineDeployment{}

		return r.cache.Get(t.Context(), client.ObjectKeyFromObject(d), seen) == nil && seen.Status.Replicas == 4
	})
	r.refresh(1, 4)
	r.wantCode(r.deleteNodes("a", r.fake("surge")), codes.FailedPrecondition)
	if d := r.stored("a"); d.Spec.Replicas != 3 || d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion] != "" {
		t.Errorf("%d replicas, marked %q; want 3 and none", d.Spec.Replicas, d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion])
	}

	// Once the update has removed an old one for it, it is one of the three.
	m := &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "m3"}}
	if err := r.Delete(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	if err := r.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: last.GetName()}}); err != nil {
		t.Fatal(err)
	}
	r.refresh(1, 3)
	if err := r.deleteNodes("a", r.fake("surge")); err != nil {
		t.Error("it is one of the replicas:", err)
	}
}

// hasPhase is once the gateway's cache has a machine's status.
func (r *rig) hasPhase(machine string, phase v1alpha1.MachinePhase) {
	r.t.Helper()
	r.eventually(machine+" is seen to be "+string(phase), func() bool {
		m := &v1alpha1.Machine{}
		if err := r.cache.Get(r.t.Context(), client.ObjectKey{Namespace: r.namespace, Name: machine}, m); err != nil {
			r.t.Fatal(err)
		}

		return m.Status.CurrentStatus.Phase == phase
	})
}

// preserved gives a machine a phase, what is said about its preservation, and until
// when that is.
func preserved(phase v1alpha1.MachinePhase, wish string, until time.Duration) func(*v1alpha1.Machine) {
	return func(m *v1alpha1.Machine) {
		m.Status.CurrentStatus.Phase = phase
		if wish != "" {
			m.Annotations = map[string]string{v1alpha1.AnnotationKeyPreserve: wish}
		}
		if until != 0 {
			m.Status.CurrentStatus.PreserveExpiryTime = new(metav1.NewTime(now.Add(until)))
		}
	}
}

func TestDeleteNodes_Preserved(t *testing.T) {
	t.Parallel()
	const running, broken = v1alpha1.MachineRunning, v1alpha1.MachineFailed
	for name, tc := range map[string]struct {
		reason string
		most   int32
		change func(*v1alpha1.Machine)
		want   codes.Code
	}{
		"kept":      {"a person inspects it", 0, preserved(broken, "now", time.Hour), codes.FailedPrecondition},
		"to keep":   {"its time is still to be set", 0, preserved(broken, "when-failed", 0), codes.FailedPrecondition},
		"runs":      {"it is kept in whatever phase", 0, preserved(running, "now", 0), codes.FailedPrecondition},
		"healthy":   {"it is kept only once it fails", 0, preserved(running, "when-failed", 0), codes.OK},
		"over":      {"its time is over", 0, preserved(running, "now", -time.Second), codes.OK},
		"never":     {"its set must not choose it", 5, preserved(broken, "false", 0), codes.OK},
		"candidate": {"its set may be about to choose it", 5, preserved(broken, "", 0), codes.FailedPrecondition},
		"none":      {"its set keeps none", 0, preserved(broken, "", 0), codes.OK},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			d := r.deployment("a", 3, size("0", "9"))
			d.Spec.AutoPreserveFailedMachineMax = new(tc.most)
			if err := r.Update(t.Context(), d); err != nil {
				t.Fatal(err)
			}
			node := r.joined("a", "m1", tc.change)
			r.refresh(1, 1)
			m := &v1alpha1.Machine{}
			tc.change(m)
			r.hasPhase("m1", m.Status.CurrentStatus.Phase)
			if err := r.deleteNodes("a", node); status.Code(err) != tc.want {
				t.Errorf("%v, want %s: %s", err, tc.want, tc.reason)
			}
		})
	}
}

// Machines that never came go although one that is preserved was to go with them:
// the cluster-autoscaler asks for all that are late in one call.
func TestDeleteNodes_PreservedAmongOthers(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.deployment("a", 4, size("0", "9"))
	r.machine("a", "kept", preserved(v1alpha1.MachineFailed, "", time.Hour))
	r.machine("a", "late1")
	r.machine("a", "late2")
	joined := r.joined("a", "joined", preserved(v1alpha1.MachineRunning, "now", time.Hour))
	r.refresh(1, 4)
	r.hasPhase("kept", v1alpha1.MachineFailed)
	r.hasPhase("joined", v1alpha1.MachineRunning)

	r.wantCode(r.deleteNodes("a", r.fake("late1"), joined), codes.FailedPrecondition) // a node is drained by then, and must not be given up for nothing
	r.wantCode(r.deleteNodes("a", r.fake("kept")), codes.FailedPrecondition)
	if d := r.stored("a"); d.Spec.Replicas != 4 || d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion] != "" {
		t.Fatalf("something was done: %d replicas, annotations %v", d.Spec.Replicas, d.Annotations)
	}
	if err := r.deleteNodes("a", r.fake("late1"), r.fake("kept"), r.fake("late2")); err != nil {
		t.Fatal("those that are late:", err)
	}
	d := r.stored("a")
	if got, want := d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion], "late1~"+stamp+",late2~"+stamp; d.Spec.Replicas != 2 || got != want {
		t.Errorf("%d replicas, marked %q; want 2 and %q", d.Spec.Replicas, got, want)
	}
	r.wantCode(r.deleteNodes("a", r.fake("late1"), r.fake("kept"), r.fake("late2")), codes.FailedPrecondition)
	if got := r.stored("a").Spec.Replicas; got != 2 {
		t.Errorf("%d replicas, want 2", got)
	}
}

// A machine that is preserved after the snapshot was taken is not marked: its set
// would keep it, and delete one that works.
func TestDeleteNodes_PreservedSinceTheSnapshot(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.deployment("a", 3, size("0", "9"))
	node := r.joined("a", "m1")
	r.refresh(1, 1)
	m := &v1alpha1.Machine{}
	if err := r.Get(t.Context(), client.ObjectKey{Namespace: r.namespace, Name: "m1"}, m); err != nil {
		t.Fatal(err)
	}
	preserved(v1alpha1.MachineFailed, "", time.Hour)(m)
	if err := r.Status().Update(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	r.hasPhase("m1", v1alpha1.MachineFailed)
	r.wantCode(r.deleteNodes("a", node), codes.FailedPrecondition)
}

// What the cluster-autoscaler takes for a machine that never came may be running by
// now: its list of instances is up to two minutes old.
func TestDeleteNodes_JoinedMeanwhile(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.deployment("a", 3, size("0", "9"))
	before, after := r.machine("a", "m1"), r.machine("a", "m2")
	r.refresh(1, 2)
	join := func(m *v1alpha1.Machine, providerID string) {
		t.Helper()
		r.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: m.Namespace + "-" + m.Name}, Spec: corev1.NodeSpec{ProviderID: providerID}})
		m.Labels = map[string]string{v1alpha1.LabelKeyNode: m.Namespace + "-" + m.Name}
		if err := r.Update(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	join(before, "virtual://"+r.namespace+"/m1")
	// The snapshot does not know yet; nor will the autoscaler for a while.
	r.eventually("the caches have machine and Node", func() bool {
		m := &v1alpha1.Machine{}
		if err := r.cache.Get(t.Context(), client.ObjectKeyFromObject(before), m); err != nil {
			t.Fatal(err)
		}
		name := m.Labels[v1alpha1.LabelKeyNode]

		return name != "" && r.cache.Get(t.Context(), client.ObjectKey{Name: name}, &corev1.Node{}) == nil
	})
	r.wantCode(r.deleteNodes("a", r.fake("m1")), codes.FailedPrecondition)
	join(after, "") // and no cloud controller ever says which instance it is
	r.refresh(1, 1)
	r.wantCode(r.deleteNodes("a", r.fake("m2")), codes.FailedPrecondition)
	if d := r.stored("a"); d.Spec.Replicas != 3 {
		t.Errorf("%d replicas, want 3: both run", d.Spec.Replicas)
	}
	if err := r.deleteNodes("a", &externalgrpc.ExternalGrpcNode{Name: r.namespace + "-m2"}); err != nil {
		t.Error("it may go by its name:", err)
	}
}

// A Node of that name may be the one of a machine before.
func TestNodeOfAnotherInstance(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.deployment("a", 3, size("0", "9"))
	dead := r.joined("a", "m1")
	r.machine("a", "m2", func(m *v1alpha1.Machine) {
		m.Labels = map[string]string{v1alpha1.LabelKeyNode: dead.GetName()}
		m.Spec.ProviderID = "virtual://" + r.namespace + "/m2"
	})
	r.refresh(1, 2)
	var ids []string
	for _, i := range r.instances(r.id("a")) {
		ids = append(ids, i.GetId())
	}
	slices.Sort(ids)
	if want := []string{r.fake("m2").GetName(), dead.GetProviderID()}; !slices.Equal(ids, want) {
		t.Errorf("instances %v, want %v: one is to come", ids, want)
	}
	if err := r.deleteNodes("a", r.fake("m2")); err != nil {
		t.Error("it has not joined:", err)
	}
}

// A machine that is preserved counts for its set: to give up one more would end one
// that works.
func TestDecreaseTargetSize_Preserved(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.deployment("a", 4, size("0", "9"))
	r.joined("a", "m1")
	r.joined("a", "m2")
	r.machine("a", "m3", preserved(v1alpha1.MachineFailed, "", time.Hour), func(m *v1alpha1.Machine) {
		m.Status.LastOperation = v1alpha1.LastOperation{
			Type: v1alpha1.MachineOperationCreate, State: v1alpha1.MachineStateFailed, ErrorCode: v1alpha1.ErrorCodeInternal,
		}
	})
	r.refresh(1, 3)
	r.hasPhase("m3", v1alpha1.MachineFailed)
	if err := r.decrease("a", -1); err != nil {
		t.Error("one is not made yet:", err)
	}
	r.wantCode(r.decrease("a", -1), codes.FailedPrecondition)
	if d := r.stored("a"); d.Spec.Replicas != 3 || d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion] != "" {
		t.Errorf("%d replicas, marked %q; want 3 and none", d.Spec.Replicas, d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion])
	}
	r.refresh(1, 3)
	for _, i := range r.instances(r.id("a")) {
		if e := i.GetStatus().GetErrorInfo(); e != nil {
			t.Errorf("%s has error %v: the autoscaler would not count it, and try to correct the group's size for ever", i.GetId(), e)
		}
	}
}

func TestDecreaseTargetSize(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	// Of five replicas two have joined, two have a machine, and one has none yet.
	r.deployment("a", 5, size("3", "9"))
	r.joined("a", "m1")
	r.joined("a", "m2")
	r.machine("a", "m3", func(m *v1alpha1.Machine) {
		m.Status.LastOperation = v1alpha1.LastOperation{Type: v1alpha1.MachineOperationCreate, State: v1alpha1.MachineStateFailed}
	})
	r.machine("a", "m4")
	r.refresh(1, 4)
	r.eventually("the failure is seen", func() bool {
		m := &v1alpha1.Machine{}
		if err := r.cache.Get(t.Context(), client.ObjectKey{Namespace: r.namespace, Name: "m3"}, m); err != nil {
			t.Fatal(err)
		}

		return m.Status.LastOperation.State != ""
	})
	r.wantCode(r.decrease("a", 1), codes.InvalidArgument)
	r.wantCode(r.decrease("a", 0), codes.InvalidArgument)
	r.wantCode(r.decrease("a", -4), codes.FailedPrecondition)
	r.wantCode(r.decrease("a", -2147483648), codes.FailedPrecondition)
	want := func(replicas int32, marked string) {
		t.Helper()
		d := r.stored("a")
		if got := d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion]; d.Spec.Replicas != replicas || got != marked {
			t.Errorf("%d replicas and marked %q, want %d and %q", d.Spec.Replicas, got, replicas, marked)
		}
	}
	want(5, "")
	for _, step := range []struct {
		replicas int32
		marked   string
	}{
		{4, ""},                             // the one that was not made
		{3, "m3~" + stamp},                  // the one that has failed
		{2, "m3~" + stamp + ",m4~" + later}, // the last; the minimum is no reason to refuse
	} {
		if err := r.decrease("a", -1); err != nil {
			t.Fatal(err)
		}
		want(step.replicas, step.marked)
	}
	r.wantCode(r.decrease("a", -1), codes.FailedPrecondition)
}
