package autoscaler_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

const (
	stamp = "2026-08-11T07:30:00Z"
	// nextStamp is that of the next update in the same second.
	nextStamp = "2026-08-11T07:30:01Z"
)

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

	// Somebody else's write that no snapshot has seen is built upon, not undone.
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

	// Whoever goes already is no reason to shrink the group once more.
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

// The cluster-autoscaler sends one call for each node, all at once. Each has a time
// of its own: a set that has heard of some of them takes no others for chosen.
func TestDeleteNodes_Concurrently(t *testing.T) {
	t.Parallel()
	for _, marks := range []autoscaler.Marks{autoscaler.MarksWithTime, autoscaler.MarksByName} {
		t.Run(string(marks), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, func(_ *rig, c *autoscaler.Config) { c.Marks = marks })
			const nodes = 10
			r.deployment("a", nodes+2, size("2", "20"))
			var all []*externalgrpc.ExternalGrpcNode
			var want, wantTimes []string
			for i := range nodes {
				name := fmt.Sprintf("m%d", i)
				all = append(all, r.joined("a", name))
				want = append(want, name)
				if marks == autoscaler.MarksWithTime {
					wantTimes = append(wantTimes, fmt.Sprintf("2026-08-11T07:30:%02dZ", i))
				}
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
			var got, times []string
			for entry := range strings.SplitSeq(d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion], ",") {
				name, at, timed := strings.Cut(entry, "~")
				got = append(got, name)
				if timed {
					times = append(times, at)
				}
			}
			slices.Sort(got)
			slices.Sort(times)
			if d.Spec.Replicas != 2 || !slices.Equal(got, want) || !slices.Equal(times, wantTimes) {
				t.Errorf("%d replicas, marked %v at %v; want 2 and %v at %v", d.Spec.Replicas, got, times, want, wantTimes)
			}
			if last := d.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler]; last != "2026-08-11T07:30:09Z" {
				t.Errorf("time of the last change: %s", last)
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

func TestDeleteNodes_Preserved(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.deployment("a", 3, size("0", "9"))
	node := r.joined("a", "m1", func(m *v1alpha1.Machine) { m.Status.CurrentStatus.PreserveExpiryTime = new(metav1.NewTime(now)) })
	r.refresh(1, 1)
	r.eventually("the machine is seen to be preserved", func() bool {
		m := &v1alpha1.Machine{}
		if err := r.cache.Get(t.Context(), client.ObjectKey{Namespace: r.namespace, Name: "m1"}, m); err != nil {
			t.Fatal(err)
		}
		r.refresh(1, 1)

		return m.Status.CurrentStatus.PreserveExpiryTime != nil
	})
	r.wantCode(r.deleteNodes("a", node), codes.FailedPrecondition)
}

func TestDecreaseTargetSize(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	// Five are wished for: two have joined, two are to come, one is not made yet.
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
		{4, ""},                                 // the one that was not made
		{3, "m3~" + stamp},                      // the one that has failed
		{2, "m3~" + stamp + ",m4~" + nextStamp}, // the last; the minimum is no reason to refuse
	} {
		if err := r.decrease("a", -1); err != nil {
			t.Fatal(err)
		}
		want(step.replicas, step.marked)
	}
	r.wantCode(r.decrease("a", -1), codes.FailedPrecondition)
}
