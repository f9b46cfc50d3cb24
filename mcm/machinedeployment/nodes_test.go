package machinedeployment_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// nodes returns the Nodes of the machines of a class.
func (r *rig) nodes(t *testing.T, class string) []*corev1.Node {
	t.Helper()
	var nodes []*corev1.Node
	for _, m := range r.machines(t) {
		if m.Spec.Class.Name != class || m.Labels[v1alpha1.LabelKeyNode] == "" {
			continue
		}
		node := &corev1.Node{}
		if err := r.Get(t.Context(), client.ObjectKey{Name: m.Labels[v1alpha1.LabelKeyNode]}, node); err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, node)
	}

	return nodes
}

// TestNodes follows taint and annotations through a rollout that is taken back.
func TestNodes(t *testing.T) {
	t.Parallel()
	const (
		disabled = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
		byMCM    = "cluster-autoscaler.kubernetes.io/scale-down-disabled-by-mcm"
	)
	r := newRig(t)
	r.player = &player{broken: map[string]bool{"large": true}}
	r.start(t)
	d := r.deployment(3)
	r.create(t, d)
	r.complete(t, d)
	// One is kept by somebody else.
	theirs := r.nodes(t, "small")[0]
	before := theirs.DeepCopy()
	theirs.Annotations = map[string]string{disabled: "true"}
	if err := r.Patch(t.Context(), theirs, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	r.change(t, d, class("large"))
	mine := map[string]string{disabled: "true", byMCM: "true"}
	tainted := func(node *corev1.Node) bool {
		return slices.Contains(node.Spec.Taints, corev1.Taint{
			Key: "deployment.machine.sapcloud.io/prefer-no-schedule", Value: "True", Effect: corev1.TaintEffectPreferNoSchedule,
		})
	}
	all := func(class string, ok func(*corev1.Node) bool) bool {
		nodes := r.nodes(t, class)

		return len(nodes) > 0 && !slices.ContainsFunc(nodes, func(n *corev1.Node) bool { return n.Name != theirs.Name && !ok(n) })
	}
	if !poll(t, func() bool {
		return all("small", func(n *corev1.Node) bool { return tainted(n) && maps.Equal(mine, n.Annotations) })
	}) {
		t.Fatalf("old Nodes are not tainted and annotated: %+v", r.nodes(t, "small"))
	}
	if !poll(t, func() bool {
		return r.sets(t)["small"].Annotations["deployment.machine.sapcloud.io/prefer-no-schedule"] == "True"
	}) {
		t.Errorf("the old set is not marked: %v", r.sets(t)["small"].Annotations)
	}
	r.change(t, d, func(d *v1alpha1.MachineDeployment) { d.Spec.RollbackTo = &v1alpha1.RollbackConfig{} })
	r.complete(t, d)
	if !poll(t, func() bool {
		return all("small", func(n *corev1.Node) bool { return !tainted(n) && len(n.Annotations) == 0 })
	}) {
		t.Errorf("taint and annotations stay: %+v", r.nodes(t, "small"))
	}
	if _, ok := r.sets(t)["small"].Annotations["deployment.machine.sapcloud.io/prefer-no-schedule"]; ok {
		t.Error("the set is still marked as tainted")
	}
	for _, node := range r.nodes(t, "small") {
		if node.Name == theirs.Name {
			if diff := cmp.Diff(map[string]string{disabled: "true"}, node.Annotations); diff != "" {
				t.Errorf("somebody else's annotation: -want, +got:\n%s", diff)
			}
		}
	}
}

// A refusing client is the way to a cluster that lets nobody change Nodes.
type refusing struct{ client.Client }

func (refusing) Patch(_ context.Context, o client.Object, _ client.Patch, _ ...client.PatchOption) error {
	return apierrors.NewForbidden(corev1.Resource("nodes"), o.GetName(), errors.New("the policy says no"))
}

// TestNodes_Refused rolls out though no Node can be changed, and says so.
func TestNodes_Refused(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.target = refusing{r.Client}
	r.player = &player{broken: map[string]bool{}, held: map[string]int{"large": 0}}
	r.start(t)
	d := r.deployment(4)
	r.create(t, d)
	r.complete(t, d)
	r.change(t, d, class("large"))
	r.until(t, "the reason", d, func(d *v1alpha1.MachineDeployment) bool {
		c := condition(d, v1alpha1.MachineDeploymentProgressing)

		return c.Status == corev1.ConditionTrue && strings.Contains(c.Message, "The last attempt met an error: store node ") &&
			strings.Contains(c.Message, "the policy says no")
	})
	r.player.release("large", 9)
	r.nudge(t)
	r.complete(t, d)
}
