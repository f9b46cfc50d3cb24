package machinedeployment_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/kubetest"
)

// class changes the class of a deployment's template.
func class(name string) func(*v1alpha1.MachineDeployment) {
	return func(d *v1alpha1.MachineDeployment) { d.Spec.Template.Spec.Class.Name = name }
}

func replicas(n int32) func(*v1alpha1.MachineDeployment) {
	return func(d *v1alpha1.MachineDeployment) { d.Spec.Replicas = n }
}

func TestScale(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	d := r.deployment(0)
	r.create(t, d)
	for _, n := range []int32{0, 1, 6, 2} {
		r.change(t, d, replicas(n))
		got := r.complete(t, d)
		type brief struct{ Type, Status, Reason, Message string }
		var conditions []brief
		for _, c := range got.Status.Conditions {
			conditions = append(conditions, brief{string(c.Type), string(c.Status), c.Reason, c.Message})
		}
		set := r.sets(t)["small"]
		want := []brief{
			{"Available", "True", "MinimumReplicasAvailable", "Deployment has minimum availability."},
			{"Progressing", "True", "NewMachineSetAvailable", fmt.Sprintf("MachineSet %q has successfully progressed.", set.Name)},
		}
		if diff := cmp.Diff(want, conditions); diff != "" {
			t.Errorf("conditions with %d replicas: -want, +got:\n%s", n, diff)
		}
		if diff := cmp.Diff(map[string]int32{"small": n}, r.replicas(t)); diff != "" {
			t.Errorf("sets: -want, +got:\n%s", diff)
		}
	}
	r.event(t, "ScalingMachineSet", "Scaled up machine set "+r.sets(t)["small"].Name+" to 6")
	r.event(t, "ScalingMachineSet", "Scaled down machine set "+r.sets(t)["small"].Name+" to 2")
}

// TestNewSet says what a set has from its deployment, by the names that users and
// other programs rely on.
func TestNewSet(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	d := r.deployment(2, func(d *v1alpha1.MachineDeployment) {
		d.Annotations = map[string]string{
			"example.org/team": "blue", "deployment.machine.sapcloud.io/prefer-no-schedule": "True",
			"machine.sapcloud.io/last-deployment-replica-change-by-scaler-time": "2026-08-11T07:00:00Z",
		}
		d.Spec.MinReadySeconds = 7
		d.Spec.AutoPreserveFailedMachineMax = new(int32(2))
	})
	r.create(t, d)
	got := r.complete(t, d)
	set := r.sets(t)["small"]
	sum := set.Labels["machine-template-hash"]
	if sum == "" || strings.Trim(sum, "0123456789") != "" {
		t.Errorf("the hash label is %q, want a decimal number", sum)
	}
	if !strings.HasPrefix(set.Name, "pool-") || len(set.Name) != len("pool-12345") {
		t.Errorf("the set is called %q, want pool- and five characters", set.Name)
	}
	type facts struct {
		Labels, Selector, Template, Annotations map[string]string
		MinReady                                int32
		Preserve                                *int32
		Owner, Revision                         string
	}
	labels := map[string]string{"name": "pool", "machine-template-hash": sum}
	want := facts{
		Labels: labels, Selector: labels, Template: labels, MinReady: 7, Preserve: new(int32(2)), Owner: "MachineDeployment/pool", Revision: "1",
		Annotations: map[string]string{
			"example.org/team": "blue", "deployment.kubernetes.io/revision": "1",
			"deployment.kubernetes.io/desired-replicas": "2", "deployment.kubernetes.io/max-replicas": "3",
			"machine.sapcloud.io/last-deployment-replica-change-by-scaler-time": "2026-08-11T07:00:00Z",
		},
	}
	owner := metav1.GetControllerOf(set)
	found := facts{
		Labels: set.Labels, Selector: set.Spec.Selector.MatchLabels, Template: set.Spec.Template.Labels, Annotations: set.Annotations,
		MinReady: set.Spec.MinReadySeconds, Preserve: set.Spec.AutoPreserveFailedMachineMax,
		Owner: owner.Kind + "/" + owner.Name, Revision: got.Annotations["deployment.kubernetes.io/revision"],
	}
	if diff := cmp.Diff(want, found); diff != "" {
		t.Errorf("set and deployment: -want, +got:\n%s", diff)
	}
	if !slices.Equal(got.Finalizers, []string{v1alpha1.FinalizerName}) {
		t.Errorf("finalizers of the deployment: %v", got.Finalizers)
	}
}

// finalize gives an object these finalizers, and no other.
func (r *rig) finalize(t *testing.T, o client.Object, finalizers ...string) {
	t.Helper()
	before, ok := o.DeepCopyObject().(client.Object)
	if !ok {
		t.Fatalf("%T is no object", o)
	}
	o.SetFinalizers(finalizers)
	if err := r.Patch(t.Context(), o, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
}

func TestRollingUpdate(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason             string
		surge, unavailable string
		replicas           int32
		most, least        int
	}{
		"Both":        {"one more and one less", "1", "1", 4, 5, 3},
		"Surge":       {"never one less", "25%", "0", 4, 5, 4},
		"Unavailable": {"never one more", "0", "2", 4, 4, 2},
		"Neither":     {"then one less", "0", "0", 3, 3, 2},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRunningRig(t)
			d := r.deployment(tc.replicas, func(d *v1alpha1.MachineDeployment) {
				d.Spec.Strategy.RollingUpdate.MaxSurge = new(intstr.Parse(tc.surge))
				d.Spec.Strategy.RollingUpdate.MaxUnavailable = new(intstr.Parse(tc.unavailable))
			})
			r.create(t, d)
			r.complete(t, d)
			r.player.watch()
			r.change(t, d, class("large"))
			got := r.complete(t, d)
			if most, least := r.player.seen(); most > tc.most || least < tc.least {
				t.Errorf("%s: there were up to %d machines and down to %d running, want %d and %d",
					tc.reason, most, least, tc.most, tc.least)
			}
			if diff := cmp.Diff(map[string]int32{"small": 0, "large": tc.replicas}, r.replicas(t)); diff != "" {
				t.Errorf("sets: -want, +got:\n%s", diff)
			}
			if revision := got.Annotations["deployment.kubernetes.io/revision"]; revision != "2" {
				t.Errorf("the deployment is at revision %q, want 2", revision)
			}
		})
	}
}

func TestRecreate(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	d := r.deployment(3, func(d *v1alpha1.MachineDeployment) {
		d.Spec.Strategy = v1alpha1.MachineDeploymentStrategy{Type: v1alpha1.RecreateMachineDeploymentStrategyType}
	})
	r.create(t, d)
	r.complete(t, d)
	r.player.watch()
	// One old machine does not go.
	stubborn := r.machines(t)[0]
	r.finalize(t, &stubborn, "test.invalid/kept")
	r.change(t, d, class("large"))
	r.until(t, "the wait for the last old machine", d, func(*v1alpha1.MachineDeployment) bool {
		left := r.machines(t)

		return len(left) == 1 && !left[0].DeletionTimestamp.IsZero()
	})
	stubborn = r.machines(t)[0]
	stubborn.Status.LastOperation = v1alpha1.LastOperation{Type: "Delete", State: "Failed", Description: "a pod cannot be evicted"}
	if err := r.Status().Update(t.Context(), &stubborn); err != nil {
		t.Fatal(err)
	}
	got := r.until(t, "the reason", d, func(d *v1alpha1.MachineDeployment) bool {
		return strings.Contains(condition(d, v1alpha1.MachineDeploymentProgressing).Message, stubborn.Name)
	})
	if c := condition(got, v1alpha1.MachineDeploymentProgressing); c.Reason != "MachineSetUpdated" || !strings.Contains(c.Message, "cannot be evicted") {
		t.Errorf("the rollout does not say that it waits for a machine to go: %+v", c)
	}
	if r.sets(t)["large"] != nil {
		t.Error("the new set was made before the last old machine was gone")
	}
	stubborn = r.machines(t)[0]
	r.finalize(t, &stubborn)
	r.complete(t, d)
	if most, least := r.player.seen(); most > 3 || least > 0 {
		t.Errorf("there were up to %d machines and down to %d running, want 3 and 0", most, least)
	}
	r.change(t, d, replicas(5))
	r.complete(t, d)
}

// TestInPlaceChanges covers what reaches machines without a rollout.
func TestInPlaceChanges(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	d := r.deployment(2)
	r.create(t, d)
	r.complete(t, d)
	names := func() string {
		var all []string
		for _, m := range r.machines(t) {
			all = append(all, m.Name)
		}
		slices.Sort(all)

		return strings.Join(all, " ")
	}
	before := names()
	r.change(t, d, func(d *v1alpha1.MachineDeployment) {
		d.Annotations = map[string]string{"example.org/team": "green"}
		d.Spec.MinReadySeconds = 9
		d.Spec.Template.Spec.NodeTemplateSpec.Labels = map[string]string{"pool": "a"}
		d.Spec.Template.Spec.MachineHealthTimeout = &metav1.Duration{Duration: time.Hour}
	})
	if !poll(t, func() bool {
		set := r.sets(t)["small"]

		return set.Annotations["example.org/team"] == "green" && set.Spec.MinReadySeconds == 9 &&
			set.Spec.Template.Spec.NodeTemplateSpec.Labels["pool"] == "a" &&
			set.Spec.Template.Spec.MachineHealthTimeout.Duration == time.Hour
	}) {
		t.Fatalf("the changes do not reach the set: %+v", r.sets(t)["small"])
	}
	r.complete(t, d)
	if after := names(); after != before || len(r.sets(t)) != 1 {
		t.Errorf("machines %s were replaced by %s, in %d sets", before, after, len(r.sets(t)))
	}
	// What a machine is made from does roll.
	r.change(t, d, func(d *v1alpha1.MachineDeployment) { d.Spec.Template.Annotations = map[string]string{"a": "b"} })
	r.until(t, "a second set", d, func(*v1alpha1.MachineDeployment) bool {
		list := &v1alpha1.MachineSetList{}
		if err := r.List(t.Context(), list, client.InNamespace(r.namespace)); err != nil {
			t.Fatal(err)
		}

		return len(list.Items) == 2
	})
}

func TestStuckRollout(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.player = &player{broken: map[string]bool{"large": true}}
	r.start(t)
	d := r.deployment(3, func(d *v1alpha1.MachineDeployment) { d.Spec.ProgressDeadlineSeconds = new(int32(2)) })
	r.create(t, d)
	r.complete(t, d)
	r.change(t, d, class("large"))
	got := r.until(t, "the deadline", d, func(d *v1alpha1.MachineDeployment) bool {
		c := condition(d, v1alpha1.MachineDeploymentProgressing)

		return c.Status == corev1.ConditionFalse && c.Reason == "ProgressDeadlineExceeded" && strings.Contains(c.Message, "Machine ")
	})
	message := condition(got, v1alpha1.MachineDeploymentProgressing).Message
	for _, part := range []string{"has timed out progressing", r.sets(t)["large"].Name + "-", "CrashLoopBackOff", "ResourceExhausted", "no large left"} {
		if !strings.Contains(message, part) {
			t.Errorf("the condition does not contain %q: %s", part, message)
		}
	}
	if available := condition(got, v1alpha1.MachineDeploymentAvailable); available.Status != corev1.ConditionTrue {
		t.Errorf("a stuck rollout takes availability: %+v", available)
	}
	if len(got.Status.FailedMachines) == 0 {
		t.Error("the status lists no failed machine")
	}
	r.heal(t, "large")
	r.complete(t, d)
}

// TestStuckRollout_Undo goes back when it is too late for the rollout. Machines do
// nothing, so that nothing else is progress: what is gone back to has its own time.
func TestStuckRollout_Undo(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.player = &player{broken: map[string]bool{"large": true}}
	r.start(t)
	d := r.deployment(3, func(d *v1alpha1.MachineDeployment) {
		d.Spec.ProgressDeadlineSeconds = new(int32(1))
		d.Spec.Strategy.RollingUpdate.MaxSurge = new(intstr.FromString("100%"))
	})
	r.create(t, d)
	r.complete(t, d)
	r.change(t, d, class("large"))
	r.until(t, "the deadline", d, func(d *v1alpha1.MachineDeployment) bool {
		return condition(d, v1alpha1.MachineDeploymentProgressing).Reason == "ProgressDeadlineExceeded"
	})
	r.player.sleep()
	r.change(t, d, func(d *v1alpha1.MachineDeployment) {
		d.Spec.Template.Spec.Class.Name = "small"
		d.Spec.ProgressDeadlineSeconds = new(int32(600))
	})
	got := r.until(t, "a look at the change", d, func(d *v1alpha1.MachineDeployment) bool { return d.Status.ObservedGeneration == d.Generation })
	c := condition(got, v1alpha1.MachineDeploymentProgressing)
	// The look that notes it may have scaled the set by the time that it is seen.
	if c.Status != corev1.ConditionTrue || c.Reason != "FoundNewMachineSet" && c.Reason != "MachineSetUpdated" {
		t.Errorf("the rollback is reported to be late: %+v", c)
	}
}

// TestStuckRollout_UndoInterrupted goes back while the API server refuses status: what
// is gone back to has its own time all the same.
func TestStuckRollout_UndoInterrupted(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.player = &player{broken: map[string]bool{"large": true}}
	r.proxy = kubetest.NewProxy(t, apiServer)
	r.start(t)
	d := r.deployment(3, func(d *v1alpha1.MachineDeployment) {
		d.Spec.ProgressDeadlineSeconds = new(int32(1))
		d.Spec.Strategy.RollingUpdate.MaxSurge = new(intstr.FromString("100%"))
	})
	r.create(t, d)
	r.complete(t, d)
	r.change(t, d, class("large"))
	r.until(t, "the deadline", d, func(d *v1alpha1.MachineDeployment) bool {
		return condition(d, v1alpha1.MachineDeploymentProgressing).Reason == "ProgressDeadlineExceeded"
	})
	r.player.sleep()
	const status = "PATCH machinedeployments/status"
	r.proxy.Refuse(status, true)
	tries := r.proxy.Requests(status)
	r.change(t, d, func(d *v1alpha1.MachineDeployment) {
		d.Spec.Template.Spec.Class.Name = "small"
		d.Spec.ProgressDeadlineSeconds = new(int32(600))
	})
	if !poll(t, func() bool { return r.proxy.Requests(status) >= tries+2 }) {
		t.Fatal("no status is stored")
	}
	r.proxy.Refuse(status, false)
	got := r.until(t, "a look at the change", d, func(d *v1alpha1.MachineDeployment) bool { return d.Status.ObservedGeneration == d.Generation })
	if c := condition(got, v1alpha1.MachineDeploymentProgressing); c.Status != corev1.ConditionTrue {
		t.Errorf("the rollback is reported to be late: %+v", c)
	}
}

// TestRefused has the API server refuse what a rollout needs, and says so.
func TestRefused(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason   string
		change   func(*v1alpha1.MachineDeployment)
		observed bool // whether the sets have it
	}{
		"Rollout": {"the new set is made, and the rollout under way", class("large"), true},
		"Paused":  {"no set has the replicas", func(d *v1alpha1.MachineDeployment) { d.Spec.Paused, d.Spec.Replicas = true, 5 }, false},
		"InPlace": {"no set has the change", func(d *v1alpha1.MachineDeployment) { d.Spec.MinReadySeconds = 9 }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newSlowRig(t)
			d := r.deployment(3)
			r.create(t, d)
			r.complete(t, d)
			r.proxy.Refuse("PATCH machinesets", true)
			r.change(t, d, tc.change)
			refused := func(n int) func(d *v1alpha1.MachineDeployment) bool {
				return func(d *v1alpha1.MachineDeployment) bool {
					return strings.Count(condition(d, v1alpha1.MachineDeploymentProgressing).Message, "met an error: store machine set ") == n
				}
			}
			got := r.until(t, "the reason", d, refused(1))
			if observed := got.Status.ObservedGeneration == got.Generation; observed != tc.observed {
				t.Errorf("the change counts as observed: %v, want %v: %s", observed, tc.observed, tc.reason)
			}
			tries := r.proxy.Requests("PATCH machinesets")
			if !poll(t, func() bool { return r.proxy.Requests("PATCH machinesets") > tries }) {
				t.Fatal("it is not tried again")
			}
			r.until(t, "the reason once", d, refused(1))
			r.proxy.Refuse("PATCH machinesets", false)
			r.until(t, "an end of the complaint", d, refused(0))
			r.change(t, d, func(d *v1alpha1.MachineDeployment) { d.Spec.Paused = false })
			r.complete(t, d)
		})
	}
}

// TestStuckScaling has a deployment that is not rolled out say what it waits for.
func TestStuckScaling(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	d := r.deployment(1)
	r.create(t, d)
	r.complete(t, d)
	r.player.breakClass("small", true)
	r.change(t, d, replicas(4))
	got := r.until(t, "the reason", d, func(d *v1alpha1.MachineDeployment) bool {
		return strings.Contains(condition(d, v1alpha1.MachineDeploymentProgressing).Message, "no small left")
	})
	c := condition(got, v1alpha1.MachineDeploymentProgressing)
	if c.Status != corev1.ConditionTrue || c.Reason != "NewMachineSetAvailable" {
		t.Errorf("scaling counts as a rollout: %+v", c)
	}
	r.heal(t, "small")
	got = r.complete(t, d)
	r.until(t, "an end of the complaint", got, func(d *v1alpha1.MachineDeployment) bool {
		return strings.HasSuffix(condition(d, v1alpha1.MachineDeploymentProgressing).Message, "successfully progressed.")
	})
}

func TestPause(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.player = &player{broken: map[string]bool{"large": true}}
	r.start(t)
	d := r.deployment(4)
	r.create(t, d)
	r.complete(t, d)
	r.change(t, d, class("large"))
	// One more and one less: that is how far it gets.
	wantSets := func(want map[string]int32) {
		t.Helper()
		r.until(t, fmt.Sprintf("sets %v", want), d, func(d *v1alpha1.MachineDeployment) bool {
			return maps.Equal(want, r.replicas(t)) && d.Status.ObservedGeneration == d.Generation
		})
	}
	wantSets(map[string]int32{"small": 3, "large": 2})
	paused := func(on bool) func(*v1alpha1.MachineDeployment) {
		return func(d *v1alpha1.MachineDeployment) { d.Spec.Paused = on }
	}
	r.change(t, d, paused(true))
	r.until(t, "the pause", d, func(d *v1alpha1.MachineDeployment) bool {
		c := condition(d, v1alpha1.MachineDeploymentProgressing)

		return c.Status == corev1.ConditionUnknown && c.Reason == "DeploymentPaused"
	})
	r.heal(t, "large")
	r.change(t, d, replicas(8))
	wantSets(map[string]int32{"small": 3, "large": 6})
	// What does not work would go first.
	r.until(t, "nine machines that work", d, func(d *v1alpha1.MachineDeployment) bool { return d.Status.AvailableReplicas == 9 })
	r.change(t, d, replicas(2)) // 3 of 9 are allowed
	wantSets(map[string]int32{"small": 1, "large": 2})
	r.change(t, d, paused(false))
	r.complete(t, d)
	wantSets(map[string]int32{"small": 0, "large": 2})
}

func TestRollback(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	d := r.deployment(2)
	r.create(t, d)
	r.complete(t, d)
	for _, name := range []string{"medium", "large"} {
		r.change(t, d, class(name))
		r.complete(t, d)
	}
	to := func(revision int64) func(*v1alpha1.MachineDeployment) {
		return func(d *v1alpha1.MachineDeployment) { d.Spec.RollbackTo = &v1alpha1.RollbackConfig{Revision: revision} }
	}
	wantClass := func(name, revision string) {
		t.Helper()
		r.until(t, "class "+name, d, func(d *v1alpha1.MachineDeployment) bool {
			return d.Spec.RollbackTo == nil && d.Spec.Template.Spec.Class.Name == name &&
				d.Annotations["deployment.kubernetes.io/revision"] == revision
		})
		got := r.complete(t, d)
		if _, ok := got.Spec.Template.Labels["machine-template-hash"]; ok {
			t.Error("the template has the hash of a set")
		}
	}
	r.change(t, d, to(0))
	wantClass("medium", "4")
	r.event(t, "DeploymentRollback", "to revision 2")
	if history := r.sets(t)["medium"].Annotations["deployment.kubernetes.io/revision-history"]; history != "2" {
		t.Errorf("the history of the set is %q, want 2", history)
	}
	r.change(t, d, to(1))
	wantClass("small", "5")
	r.change(t, d, to(99))
	r.event(t, "DeploymentRollbackRevisionNotFound", "99")
	wantClass("small", "5")
	r.change(t, d, to(5))
	r.event(t, "DeploymentRollbackTemplateUnchanged", "same template")
	wantClass("small", "5")
}

func TestHistory(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	d := r.deployment(1, func(d *v1alpha1.MachineDeployment) { d.Spec.RevisionHistoryLimit = new(int32(1)) })
	r.create(t, d)
	r.complete(t, d)
	for _, name := range []string{"medium", "large"} {
		r.change(t, d, class(name))
		r.complete(t, d)
	}
	want := map[string]int32{"medium": 0, "large": 1}
	r.until(t, "one old set", d, func(*v1alpha1.MachineDeployment) bool { return maps.Equal(want, r.replicas(t)) })
}

// TestHistory_Rollback keeps what the deployment had last, however old its set is.
func TestHistory_Rollback(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	d := r.deployment(1, func(d *v1alpha1.MachineDeployment) { d.Spec.RevisionHistoryLimit = new(int32(1)) })
	r.create(t, d)
	r.complete(t, d)
	for _, name := range []string{"medium", "small", "large"} { // revisions 2, 3 and 4
		r.change(t, d, class(name))
		r.complete(t, d)
	}
	want := map[string]int32{"small": 0, "large": 1}
	r.until(t, "the set of revision 3 alone", d, func(*v1alpha1.MachineDeployment) bool { return len(r.replicas(t)) == 2 })
	if diff := cmp.Diff(want, r.replicas(t)); diff != "" {
		t.Fatalf("sets: -want, +got:\n%s", diff)
	}
	r.change(t, d, func(d *v1alpha1.MachineDeployment) { d.Spec.RollbackTo = &v1alpha1.RollbackConfig{} })
	r.event(t, "DeploymentRollback", "to revision 3")
}

func TestDelete(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	d := r.deployment(2)
	r.create(t, d)
	r.complete(t, d)
	r.finalize(t, r.sets(t)["small"], "test.invalid/kept")
	if err := r.Delete(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	if !poll(t, func() bool { return !r.sets(t)["small"].DeletionTimestamp.IsZero() }) {
		t.Fatal("the set is not deleted")
	}
	if r.get(t, d) == nil {
		t.Error("the deployment is gone before its set")
	}
	r.finalize(t, r.sets(t)["small"])
	r.until(t, "the end", d, func(d *v1alpha1.MachineDeployment) bool { return d == nil })
}
