package machine_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// brittle makes a running machine that is Failed as soon as its Node is unhealthy.
func (r *rig) brittle(t *testing.T, name string, change ...func(*v1alpha1.Machine)) *v1alpha1.Machine {
	t.Helper()
	m := r.machine(name)
	m.Spec.MachineHealthTimeout = &metav1.Duration{Duration: 1}
	for _, c := range change {
		c(m)
	}

	return r.running(t, m)
}

// turn makes a Node healthy or not, and changes nothing else of it, as a kubelet
// does.
func (r *rig) turn(t *testing.T, name string, status corev1.ConditionStatus) {
	t.Helper()
	patch := fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":%q,"reason":"Test"}]}}`, status)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if err := r.Status().Patch(t.Context(), node, client.RawPatch("application/strategic-merge-patch+json", []byte(patch))); err != nil {
		t.Fatal(err)
	}
}

// wish annotates a Machine or a Node; an empty value removes the annotation.
func (r *rig) wish(t *testing.T, o client.Object, value string) {
	t.Helper()
	r.change(t, o, func() {
		annotations := o.GetAnnotations()
		if annotations == nil {
			annotations = map[string]string{}
		}
		annotations[v1alpha1.AnnotationKeyPreserve] = value
		if value == "" {
			delete(annotations, v1alpha1.AnnotationKeyPreserve)
		}
		o.SetAnnotations(annotations)
	})
}

// firstFailed watches a machine that is not Failed, and returns a function that
// returns the first version that is.
func (r *rig) firstFailed(t *testing.T, m *v1alpha1.Machine) func() *v1alpha1.Machine {
	t.Helper()
	c, err := client.NewWithWatch(apiServer, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	w, err := c.Watch(ctx, &v1alpha1.MachineList{}, client.InNamespace(m.Namespace), client.MatchingFields{"metadata.name": m.Name},
		&client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: r.get(t, m).ResourceVersion}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Stop)

	return func() *v1alpha1.Machine {
		t.Helper()
		for e := range w.ResultChan() {
			if got, ok := e.Object.(*v1alpha1.Machine); ok && got.Status.CurrentStatus.Phase == v1alpha1.MachineFailed {
				return got
			}
		}
		t.Fatal("the machine is not Failed")

		return nil
	}
}

// A kept is what can be seen of a machine's preservation.
type kept struct {
	Until                 bool // it has a time
	Wish, Applied, OnNode string
	Protected             bool // from the cluster-autoscaler
	Tainted               bool
	Condition             string // status, reason and message, without the time
}

func (r *rig) kept(t *testing.T, m *v1alpha1.Machine) kept {
	t.Helper()
	m, node := r.get(t, m), r.node(t, m.Name)
	until := m.Status.CurrentStatus.PreserveExpiryTime
	k := kept{
		Until: until != nil, Wish: m.Annotations[v1alpha1.AnnotationKeyPreserve],
		Applied: m.Annotations[v1alpha1.AnnotationKeyLastAppliedNodePreserveValue],
		OnNode:  node.Annotations[v1alpha1.AnnotationKeyPreserve],
		Protected: node.Annotations[v1alpha1.AnnotationKeyScaleDownDisabled] == "true" &&
			node.Annotations[v1alpha1.AnnotationKeyScaleDownDisabledByMCM] == "true",
		Tainted: slices.Contains(node.Spec.Taints, corev1.Taint{Key: v1alpha1.TaintKeyPreserved, Effect: corev1.TaintEffectNoSchedule}),
	}
	for _, c := range node.Status.Conditions {
		if c.Type == v1alpha1.NodePreserved {
			k.Condition = fmt.Sprintf("%s/%s/%s", c.Status, c.Reason, c.Message)
			if until != nil {
				k.Condition = strings.ReplaceAll(k.Condition, until.UTC().String(), "then")
			}
		}
	}

	return k
}

func (r *rig) untilKept(t *testing.T, what string, m *v1alpha1.Machine, want kept) {
	t.Helper()
	var got kept
	if !poll(t, func() bool { got = r.kept(t, m); return got == want }) {
		t.Fatalf("%s (-want +got):\n%s\nevents of the machine:\n%s", what, cmp.Diff(want, got), strings.Join(r.events(t, m), "\n"))
	}
}

const (
	byUser  = "True/Preserved by user./"
	byMCM   = "True/Preserved by MCM./"
	drained = "Preserved node drained successfully. "
	then    = "Machine preserved until then."
	stopped = "False/Preservation stopped./"
)

// TestPreserve follows a machine through failure, drain and recovery.
func TestPreserve(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason                 string
		value                  string
		onNode                 bool
		running, failed, after kept
	}{
		"when-failed": {
			reason: "it is kept while it is Failed, each time again", value: "when-failed",
			running: kept{Wish: "when-failed"},
			failed:  kept{Wish: "when-failed", Until: true, Protected: true, Tainted: true, Condition: byUser + then},
			after:   kept{Wish: "when-failed", Condition: stopped},
		},
		"when-failed on the Node": {
			reason: "the machine's set cannot read Nodes, so it is noted on the machine", value: "when-failed", onNode: true,
			running: kept{OnNode: "when-failed", Applied: "when-failed"},
			failed:  kept{OnNode: "when-failed", Applied: "when-failed", Until: true, Protected: true, Tainted: true, Condition: byUser + then},
			after:   kept{OnNode: "when-failed", Applied: "when-failed", Condition: stopped},
		},
		"now": {
			reason: "it is kept whatever happens to it", value: "now",
			running: kept{Wish: "now", Until: true, Protected: true, Condition: byUser + then},
			failed:  kept{Wish: "now", Until: true, Protected: true, Tainted: true, Condition: byUser + then},
			after:   kept{Wish: "now", Until: true, Protected: true, Condition: byUser + then},
		},
		"now on the Node": {
			reason: "the same", value: "now", onNode: true,
			running: kept{OnNode: "now", Applied: "now", Until: true, Protected: true, Condition: byUser + then},
			failed:  kept{OnNode: "now", Applied: "now", Until: true, Protected: true, Tainted: true, Condition: byUser + then},
			after:   kept{OnNode: "now", Applied: "now", Until: true, Protected: true, Condition: byUser + then},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRunningRig(t)
			m := r.brittle(t, "a")
			var on client.Object = m
			if tc.onNode {
				on = r.node(t, m.Name)
			}
			r.wish(t, on, tc.value)
			r.untilKept(t, "running; "+tc.reason, m, tc.running)
			pod := r.pod(t, m)
			failed := r.firstFailed(t, m)
			r.turn(t, m.Name, corev1.ConditionFalse)
			if failed().Status.CurrentStatus.PreserveExpiryTime == nil {
				t.Error("it was Failed without a time: its set would have replaced it")
			}
			r.untilKept(t, "Failed; "+tc.reason, m, tc.failed)
			r.evicted(t, pod)
			if r.node(t, m.Name).Spec.Unschedulable {
				t.Error("the node is cordoned, and no controller would uncordon it")
			}
			r.end(t, pod)
			tc.failed.Condition = byUser + drained + then
			r.untilKept(t, "drained; "+tc.reason, m, tc.failed)
			r.event(t, m, "Preserved", tc.value)
			r.event(t, m, "Drained", "and kept")
			r.turn(t, m.Name, corev1.ConditionTrue)
			r.phase(t, m, v1alpha1.MachineRunning)
			r.untilKept(t, "recovered; "+tc.reason, m, tc.after)
			failed = r.firstFailed(t, m)
			r.turn(t, m.Name, corev1.ConditionFalse)
			if failed().Status.CurrentStatus.PreserveExpiryTime == nil {
				t.Error("it is Failed again, and not preserved")
			}
			tc.failed.Condition = byUser + drained + then
			r.untilKept(t, "Failed again; "+tc.reason, m, tc.failed)
		})
	}
}

// TestAutoPreserved plays the machine set that chooses a Failed machine.
func TestAutoPreserved(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.brittle(t, "a")
	r.turn(t, m.Name, corev1.ConditionFalse)
	m = r.phase(t, m, v1alpha1.MachineFailed)
	if m.Status.CurrentStatus.PreserveExpiryTime != nil {
		t.Fatal("it has no wish to be preserved")
	}
	r.wish(t, m, v1alpha1.PreserveAuto)
	r.untilKept(t, "chosen", m, kept{
		Wish: "auto-preserved", Until: true, Protected: true, Tainted: true, Condition: byMCM + drained + then,
	})
	r.turn(t, m.Name, corev1.ConditionTrue)
	r.untilKept(t, "the set chooses again when it fails again", m, kept{Condition: stopped})
}

// TestPreservationEnds has it stopped, or its time run out.
func TestPreservationEnds(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason        string
		onNode, owned bool
		value         string // after; "expire" to wait
		want          kept
	}{
		"false":             {reason: "it must not be chosen by its set either", value: "false", want: kept{Wish: "false", Condition: stopped}},
		"removed":           {reason: "its wish was removed", value: "", want: kept{Condition: stopped}},
		"false on the Node": {reason: "the same", onNode: true, value: "false", want: kept{OnNode: "false", Applied: "false", Condition: stopped}},
		"removed from the Node": {
			reason: "that the Node says nothing any more wins", onNode: true, value: "", want: kept{Condition: stopped},
		},
		"time over": {
			reason: "a later failure is not to be preserved unasked", value: "expire", want: kept{Condition: stopped},
		},
		"time over, on the Node": {
			reason: "the same", onNode: true, value: "expire", want: kept{Condition: stopped},
		},
		"time over, in a set": {
			reason: "by the time that is over its set knows not to choose it again", owned: true, value: "expire",
			want: kept{Until: true, Condition: stopped},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			if tc.value == "expire" {
				r.settings.PreserveTimeout = 4 * time.Second
			}
			r.startDriver(t)
			r.startManager(t)
			m := r.brittle(t, "a", func(m *v1alpha1.Machine) {
				if tc.owned {
					m.OwnerReferences = []metav1.OwnerReference{{
						APIVersion: "machine.sapcloud.io/v1alpha1", Kind: "MachineSet", Name: "set", UID: "uid", Controller: new(true),
					}}
				}
			})
			var on client.Object = m
			if tc.onNode {
				on = r.node(t, m.Name)
			}
			r.wish(t, on, "now")
			r.turn(t, m.Name, corev1.ConditionFalse)
			began := kept{Wish: "now", Until: true, Protected: true, Tainted: true, Condition: byUser + drained + then}
			if tc.onNode {
				began.Wish, began.OnNode, began.Applied = "", "now", "now"
			}
			r.untilKept(t, "preserved", m, began)
			if tc.value != "expire" {
				r.wish(t, on, tc.value)
			}
			r.untilKept(t, tc.reason, m, tc.want)
			if !tc.owned {
				r.event(t, m, "PreservationEnded", "Not kept any longer")
			}
		})
	}
}

// The machine's own time to be preserved wins, and a person may change it while it
// runs.
func TestPreserveTimeout(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.brittle(t, "a", func(m *v1alpha1.Machine) { m.Spec.MachinePreserveTimeout = &metav1.Duration{Duration: time.Hour} })
	r.wish(t, m, "now")
	m = r.until(t, "preserved", m, func(m *v1alpha1.Machine) bool { return m.Status.CurrentStatus.PreserveExpiryTime != nil })
	if left := time.Until(m.Status.CurrentStatus.PreserveExpiryTime.Time); left > time.Hour || left < time.Hour-patience {
		t.Errorf("it is preserved for %s more, want an hour", left)
	}
	other := r.machine("b")
	other.Annotations = map[string]string{v1alpha1.AnnotationKeyPreserve: "now"}
	r.create(t, other)
	got := r.until(t, "preserved", other, func(m *v1alpha1.Machine) bool { return m.Status.CurrentStatus.PreserveExpiryTime != nil })
	if left := time.Until(got.Status.CurrentStatus.PreserveExpiryTime.Time); left > 96*time.Hour || left < 96*time.Hour-patience {
		t.Errorf("one without a Node is preserved for %s more, want the setting's 96h", left)
	}
	before := m.DeepCopy()
	m.Status.CurrentStatus.PreserveExpiryTime = &metav1.Time{Time: time.Now()}
	if err := r.Status().Patch(t.Context(), m, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	r.untilKept(t, "the time was cut short", m, kept{Condition: stopped})
}

// TestNodeWins has Machine and Node say different things.
func TestNodeWins(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.brittle(t, "a")
	node := r.node(t, m.Name)
	r.wish(t, m, "now")
	r.untilKept(t, "the machine alone", m, kept{Wish: "now", Until: true, Protected: true, Condition: byUser + then})
	r.wish(t, node, "false")
	r.untilKept(t, "the node wins", m, kept{OnNode: "false", Applied: "false", Condition: stopped})
	r.wish(t, m, "now")
	r.untilKept(t, "the machine's own is removed", m, kept{OnNode: "false", Applied: "false", Condition: stopped})
	r.wish(t, node, "")
	r.untilKept(t, "the node says nothing any more", m, kept{Condition: stopped})
	r.wish(t, m, "now")
	r.untilKept(t, "the machine alone again", m, kept{Wish: "now", Until: true, Protected: true, Condition: byUser + then})
	r.wish(t, m, "forever")
	r.event(t, m, "InvalidField", `is "forever", which is ignored: want now, when-failed or false`)
	r.untilKept(t, "an unknown value changes nothing", m, kept{Wish: "forever", Until: true, Protected: true, Condition: byUser + then})
}

// TestWishOfALostNode has a person end the Node's preservation after the Node was deleted.
func TestWishOfALostNode(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.brittle(t, "a")
	node := r.node(t, m.Name)
	r.wish(t, node, "now")
	r.untilKept(t, "the node's", m, kept{OnNode: "now", Applied: "now", Until: true, Protected: true, Condition: byUser + then})
	r.stop() // it would hold on to the Node
	r.forceDelete(t, node)
	r.startManager(t)
	m = r.phase(t, m, v1alpha1.MachineFailed)
	if m.Status.CurrentStatus.PreserveExpiryTime == nil || m.Annotations[v1alpha1.AnnotationKeyLastAppliedNodePreserveValue] != "now" {
		t.Errorf("what the node has asked for went with it: %v", m.Annotations)
	}
	r.wish(t, m, "false")
	m = r.until(t, "not preserved", m, func(m *v1alpha1.Machine) bool { return m.Status.CurrentStatus.PreserveExpiryTime == nil })
	if got := m.Annotations[v1alpha1.AnnotationKeyPreserve]; got != "false" {
		t.Errorf("the machine says %q", got)
	}
}

// What a user has said to the autoscaler stays.
func TestPreserveSparesOthersAnnotations(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.brittle(t, "a")
	node := r.node(t, m.Name)
	r.change(t, node, func() {
		metav1.SetMetaDataAnnotation(&node.ObjectMeta, v1alpha1.AnnotationKeyScaleDownDisabled, "true")
	})
	r.wish(t, m, "now")
	r.untilKept(t, "preserved", m, kept{Wish: "now", Until: true, Condition: byUser + then})
	r.wish(t, m, "")
	r.untilKept(t, "stopped", m, kept{Condition: stopped})
	if r.node(t, m.Name).Annotations[v1alpha1.AnnotationKeyScaleDownDisabled] != "true" {
		t.Error("the user's annotation is gone")
	}
}

// A drain that fails is tried again and may be forced; then the machine is deleted,
// for which its Node is drained once more.
func TestDrainOfAPreservedMachine(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.brittle(t, "a")
	pod := r.pod(t, m)
	r.budget(t, policyv1.PodDisruptionBudgetStatus{ExpectedPods: 1, CurrentHealthy: 1, DesiredHealthy: 1})
	r.wish(t, m, "when-failed")
	r.turn(t, m.Name, corev1.ConditionFalse)
	want := kept{
		Wish: "when-failed", Until: true, Protected: true, Tainted: true,
		Condition: byUser + "Preserved node could not be drained. " + then,
	}
	r.untilKept(t, "refused", m, want)
	r.event(t, m, "FailedDrain", "strict is misconfigured")
	r.change(t, m, func() { metav1.SetMetaDataLabel(&m.ObjectMeta, v1alpha1.LabelKeyForceDrain, "True") })
	want.Condition = byUser + drained + then
	r.untilKept(t, "forced", m, want)
	if err := r.Get(t.Context(), client.ObjectKeyFromObject(pod), pod); client.IgnoreNotFound(err) != nil || err == nil {
		t.Errorf("the pod is still there (%v)", err)
	}
	late := r.pod(t, m)
	r.change(t, m, func() { delete(m.Labels, v1alpha1.LabelKeyForceDrain) })
	r.delete(t, m)
	r.until(t, "draining for its deletion", m, func(m *v1alpha1.Machine) bool {
		return m != nil && strings.Contains(m.Status.LastOperation.Description, "Initiate node drain")
	})
	if !poll(t, func() bool { return r.node(t, m.Name).Spec.Unschedulable }) {
		t.Error("the node is not cordoned although it goes")
	}
	r.end(t, late)
	r.gone(t, m)
}

// TestPreserveAcrossManagers restarts the manager in the middle.
func TestPreserveAcrossManagers(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.startDriver(t)
	r.startManager(t)
	m := r.brittle(t, "a")
	r.wish(t, m, "when-failed")
	r.untilKept(t, "not yet", m, kept{Wish: "when-failed"})
	r.turn(t, m.Name, corev1.ConditionFalse)
	m = r.until(t, "preserved", m, func(m *v1alpha1.Machine) bool { return m.Status.CurrentStatus.PreserveExpiryTime != nil })
	r.stop()
	r.startManager(t)
	r.untilKept(t, "the next manager goes on", m, kept{
		Wish: "when-failed", Until: true, Protected: true, Tainted: true, Condition: byUser + drained + then,
	})
	if again := r.get(t, m); !again.Status.CurrentStatus.PreserveExpiryTime.Equal(m.Status.CurrentStatus.PreserveExpiryTime) {
		t.Errorf("it was preserved until %s and is until %s", m.Status.CurrentStatus.PreserveExpiryTime, again.Status.CurrentStatus.PreserveExpiryTime)
	}
	r.stop()
	r.wish(t, m, "false")
	r.startManager(t)
	r.untilKept(t, "stopped while no manager ran", m, kept{Wish: "false", Condition: stopped})
}
