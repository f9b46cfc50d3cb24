package machinedeployment_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestCollision has another owner's set with the name that the new set is to have.
func TestCollision(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	d := r.deployment(2)
	r.create(t, d)
	r.complete(t, d)
	taken := r.sets(t)["small"].Name
	if err := r.Delete(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	r.until(t, "the end", d, func(d *v1alpha1.MachineDeployment) bool { return d == nil })
	if !poll(t, func() bool { return len(r.sets(t)) == 0 }) {
		t.Fatal("the set stays")
	}
	labels := map[string]string{"somebody": "else"}
	r.create(t, &v1alpha1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: taken, Labels: labels},
		Spec: v1alpha1.MachineSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: v1alpha1.MachineTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: "MachineClass", Name: "theirs"}},
			},
		},
	})
	d = r.deployment(2)
	r.create(t, d)
	got := r.complete(t, d)
	if got.Status.CollisionCount == nil || *got.Status.CollisionCount != 1 {
		t.Errorf("collisionCount is %v, want 1", got.Status.CollisionCount)
	}
	if name := r.sets(t)["small"].Name; name == taken {
		t.Errorf("the set has the name %s, which was taken", name)
	}
}

func TestInvalid(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason string
		spec   func(*v1alpha1.MachineDeployment)
		event  string
		text   string
	}{
		"Strategy": {
			"the existing manager has no default for the strategy",
			func(d *v1alpha1.MachineDeployment) { d.Spec.Strategy = v1alpha1.MachineDeploymentStrategy{} }, "InvalidSpec", "spec.strategy.type",
		},
		"NoSelector": {
			"nothing says which sets are its own",
			func(d *v1alpha1.MachineDeployment) { d.Spec.Selector = nil }, "InvalidSpec", "spec.selector is missing: set matchLabels",
		},
		"SelectsOthers": {
			"its machines would not be its own",
			func(d *v1alpha1.MachineDeployment) { d.Spec.Selector.MatchLabels = map[string]string{"a": "b"} },
			"InvalidSpec", "spec.selector does not select the labels of spec.template: give the template",
		},
		"SelectingAll": {
			"it would take everybody's sets",
			func(d *v1alpha1.MachineDeployment) { d.Spec.Selector = &metav1.LabelSelector{} }, "SelectingAll", "non-empty selector",
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRunningRig(t)
			d := r.deployment(1, tc.spec)
			r.create(t, d)
			r.event(t, tc.event, tc.text)
			got := r.until(t, "the condition", d, func(d *v1alpha1.MachineDeployment) bool {
				c := condition(d, v1alpha1.MachineDeploymentProgressing)

				return c.Status == corev1.ConditionFalse && c.Reason == v1alpha1.ReasonInvalidSpec && strings.Contains(c.Message, tc.text)
			})
			if got.Status.ObservedGeneration != got.Generation {
				t.Errorf("generation %d is not seen to be observed", got.Generation)
			}
			if len(r.sets(t)) > 0 {
				t.Errorf("a set was made, though %s", tc.reason)
			}
			sound := r.deployment(1)
			r.change(t, d, func(d *v1alpha1.MachineDeployment) { d.Spec = sound.Spec })
			r.complete(t, d)
		})
	}
}

// orphan deletes a deployment without its sets, and does what the garbage
// collector does, which does not run here.
func (r *rig) orphan(t *testing.T, d *v1alpha1.MachineDeployment) {
	t.Helper()
	if err := r.Delete(t.Context(), d, client.PropagationPolicy(metav1.DeletePropagationOrphan)); err != nil {
		t.Fatal(err)
	}
	for _, set := range r.sets(t) {
		before := set.DeepCopy()
		set.OwnerReferences = nil
		if err := r.Patch(t.Context(), set, client.MergeFrom(before)); err != nil {
			t.Fatal(err)
		}
	}
	left := r.get(t, d)
	if !slices.Contains(left.Finalizers, metav1.FinalizerOrphanDependents) {
		t.Fatalf("the API server asks for no orphans: %v", left.Finalizers)
	}
	r.finalize(t, left, v1alpha1.FinalizerName)
}

// TestAdopt gives a deployment an orphan of its template.
func TestAdopt(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	d := r.deployment(2)
	r.create(t, d)
	r.complete(t, d)
	set := r.sets(t)["small"]
	r.orphan(t, d)
	r.until(t, "the end", d, func(d *v1alpha1.MachineDeployment) bool { return d == nil })
	d = r.deployment(2)
	r.create(t, d)
	r.complete(t, d)
	if adopted := r.sets(t)["small"]; adopted.UID != set.UID || metav1.GetControllerOf(adopted) == nil {
		t.Errorf("the orphan was not adopted: %+v", adopted.ObjectMeta)
	}
}

// TestDisown has a person take a set away by its labels: it has no owner then and
// keeps its machines, and the deployment makes others.
func TestDisown(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	d := r.deployment(2)
	r.create(t, d)
	r.complete(t, d)
	taken := r.sets(t)["small"]
	before := taken.DeepCopy()
	taken.Labels["name"] = "aside"
	if err := r.Patch(t.Context(), taken, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	r.until(t, "another set", d, func(*v1alpha1.MachineDeployment) bool { return len(r.machines(t)) == 4 })
	r.change(t, d, replicas(3))
	r.complete(t, d)
	list := &v1alpha1.MachineSetList{}
	if err := r.List(t.Context(), list, client.InNamespace(r.namespace)); err != nil {
		t.Fatal(err)
	}
	got := map[bool]int32{} // replicas by whether it is the one that was taken
	for i := range list.Items {
		set := &list.Items[i]
		got[set.UID == taken.UID] += set.Spec.Replicas
		if owned := metav1.IsControlledBy(set, r.get(t, d)); owned == (set.UID == taken.UID) {
			t.Errorf("set %s: owners %v; the one that was taken is %s", set.Name, set.OwnerReferences, taken.Name)
		}
	}
	if diff := cmp.Diff(map[bool]int32{true: 2, false: 3}, got); diff != "" {
		t.Errorf("replicas (-want +got):\n%s", diff)
	}
}

// TestOrphan_Late has the controller hear of the sets' freedom later than of the
// deployment's end.
func TestOrphan_Late(t *testing.T) {
	t.Parallel()
	r := newSlowRig(t)
	d := r.deployment(2)
	r.create(t, d)
	r.complete(t, d)
	set := r.sets(t)["small"]
	r.proxy.Hold("machinesets")
	r.orphan(t, d)
	if !poll(t, func() bool { return r.proxy.Requests("DELETE machinesets") > 0 }) {
		t.Fatal("the controller does not look at the deployment")
	}
	r.proxy.Release("machinesets")
	r.until(t, "the end", d, func(d *v1alpha1.MachineDeployment) bool { return d == nil })
	if left := r.sets(t)["small"]; left == nil || left.UID != set.UID || !left.DeletionTimestamp.IsZero() || len(r.machines(t)) != 2 {
		t.Errorf("a set that was to stay is gone, or its machines are: %v, %d machines", left, len(r.machines(t)))
	}
}

// halfway makes a deployment as the existing manager leaves it in the middle of a
// rollout, with its annotations, names and texts.
func halfway(t *testing.T, r *rig) *v1alpha1.MachineDeployment {
	t.Helper()
	d := r.deployment(4, class("large"), func(d *v1alpha1.MachineDeployment) {
		d.Finalizers = []string{v1alpha1.FinalizerName}
		d.Annotations = map[string]string{"deployment.kubernetes.io/revision": "7"}
	})
	r.create(t, d)
	progressing := v1alpha1.MachineDeploymentCondition{
		Type: "Progressing", Status: corev1.ConditionTrue, Reason: "MachineSetUpdated",
		Message: `MachineSet "pool-5f6d8" is progressing.`, LastUpdateTime: metav1.Now(), LastTransitionTime: metav1.Now(),
	}
	d.Status = v1alpha1.MachineDeploymentStatus{
		ObservedGeneration: 1, Replicas: 5, UpdatedReplicas: 2, ReadyReplicas: 3, AvailableReplicas: 3, UnavailableReplicas: 2,
		Conditions: []v1alpha1.MachineDeploymentCondition{progressing},
	}
	if err := r.Status().Update(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	for _, left := range []struct {
		name, class, hash, revision string
		replicas                    int32
		annotations                 map[string]string
		running                     int // of its machines; the others are being made
	}{
		{"pool-7c9f4", "small", "3044867716", "6", 3, map[string]string{"deployment.machine.sapcloud.io/prefer-no-schedule": "True"}, 3},
		{"pool-5f6d8", "large", "1628416384", "7", 2, nil, 0},
	} {
		labels := map[string]string{"name": "pool", "machine-template-hash": left.hash}
		annotations := map[string]string{
			"deployment.kubernetes.io/revision": left.revision, "deployment.kubernetes.io/desired-replicas": "4",
			"deployment.kubernetes.io/max-replicas": "5",
		}
		maps.Copy(annotations, left.annotations)
		template := d.Spec.Template.DeepCopy()
		template.Labels, template.Spec.Class.Name = labels, left.class
		set := &v1alpha1.MachineSet{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: r.namespace, Name: left.name, Labels: labels, Annotations: annotations,
				OwnerReferences: []metav1.OwnerReference{
					*metav1.NewControllerRef(d, v1alpha1.SchemeGroupVersion.WithKind("MachineDeployment")),
				},
			},
			Spec: v1alpha1.MachineSetSpec{Replicas: left.replicas, Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: *template},
		}
		r.create(t, set)
		for i := range int(left.replicas) {
			r.leave(t, set, fmt.Sprintf("%s-%d", left.name, i), i < left.running)
		}
	}

	return d
}

// leave makes a machine of a set as the existing manager leaves it, one that runs
// with its Node, which it keeps new pods off in a rollout.
func (r *rig) leave(t *testing.T, set *v1alpha1.MachineSet, name string, running bool) {
	t.Helper()
	m := &v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: r.namespace, Name: name, Labels: maps.Clone(set.Spec.Template.Labels),
			Annotations: map[string]string{"machinepriority.machine.sapcloud.io": "3"},
			OwnerReferences: []metav1.OwnerReference{
				*metav1.NewControllerRef(set, v1alpha1.SchemeGroupVersion.WithKind("MachineSet")),
			},
		},
		Spec: set.Spec.Template.Spec,
	}
	status := v1alpha1.MachineStatus{
		CurrentStatus: v1alpha1.CurrentStatus{Phase: v1alpha1.MachinePending, LastUpdateTime: metav1.Now()},
		LastOperation: v1alpha1.LastOperation{
			Description: "Creating machine on cloud provider", Type: "Create", State: "Processing", LastUpdateTime: metav1.Now(),
		},
	}
	if running {
		m.Labels["node"] = nodeOf(m)
		status.CurrentStatus.Phase, status.LastOperation.State = v1alpha1.MachineRunning, "Successful"
		status.LastOperation.Description = "Machine " + name + " successfully joined the cluster in 2m3s"
		r.create(t, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: nodeOf(m)},
			Spec: corev1.NodeSpec{Taints: []corev1.Taint{{
				Key: "deployment.machine.sapcloud.io/prefer-no-schedule", Value: "True", Effect: corev1.TaintEffectPreferNoSchedule,
			}}},
		})
	}
	r.create(t, m)
	m.Status = status
	if err := r.Status().Update(t.Context(), m); err != nil {
		t.Fatal(err)
	}
}

// TestTakeOver has a deployment go on that the existing manager has left.
func TestTakeOver(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := halfway(t, r)
	r.player = &player{broken: map[string]bool{}}
	r.player.watch()
	r.start(t)
	got := r.complete(t, d)
	if revision := got.Annotations["deployment.kubernetes.io/revision"]; revision != "7" {
		t.Errorf("revision %s, want 7: the rollout is no new one", revision)
	}
	sets := r.sets(t)
	if want := map[string]int32{"small": 0, "large": 4}; !maps.Equal(want, r.replicas(t)) || sets["large"].Name != "pool-5f6d8" {
		t.Errorf("sets %v, the latest %s; want %v with pool-5f6d8", r.replicas(t), sets["large"].Name, want)
	}
	if old, made := r.player.madeOf("small"), r.player.madeOf("large"); old != 0 || made != 2 {
		t.Errorf("made %d old and %d new machines, want none and the two that were lacking", old, made)
	}
	var there []string
	for _, m := range r.machines(t) {
		there = append(there, m.Name)
	}
	for _, name := range []string{"pool-5f6d8-0", "pool-5f6d8-1"} {
		if !slices.Contains(there, name) {
			t.Errorf("machine %s was being made and is gone, there are %v", name, there)
		}
	}
	if most, least := r.player.seen(); most > 5 || least < 3 {
		t.Errorf("there were up to %d machines and down to %d running, want 5 and 3", most, least)
	}
}

// TestTakeOverDeletion ends deletions that the existing manager has started: one
// set goes already, the other one does not know yet.
func TestTakeOverDeletion(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := halfway(t, r)
	for _, set := range r.sets(t) {
		r.finalize(t, set, v1alpha1.FinalizerName)
	}
	for _, o := range []client.Object{d, r.sets(t)["small"]} {
		if err := r.Delete(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	r.start(t)
	if !poll(t, func() bool { return r.sets(t)["large"] == nil || !r.sets(t)["large"].DeletionTimestamp.IsZero() }) {
		t.Fatal("the other set is not deleted")
	}
	for _, set := range []string{"small", "large"} {
		if r.get(t, d) == nil {
			t.Error("the deployment is gone before its sets")
		}
		if left := r.sets(t)[set]; left != nil {
			r.finalize(t, left)
		}
	}
	r.until(t, "the end", d, func(d *v1alpha1.MachineDeployment) bool { return d == nil })
	if sets := r.sets(t); len(sets) > 0 {
		t.Errorf("sets are left: %v", r.replicas(t))
	}
}
