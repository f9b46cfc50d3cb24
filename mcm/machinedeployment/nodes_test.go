package machinedeployment_test

import (
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
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
	// One is kept by another writer.
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
				t.Errorf("another writer's annotation: -want, +got:\n%s", diff)
			}
		}
	}
}

// A refusing client is a client of a cluster that refuses changes of all Nodes.
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

// A choosy client is a client of a cluster that refuses changes of some Nodes.
type choosy struct {
	client.Client

	bad    atomic.Pointer[[]string]
	slow   time.Duration // to refuse one
	passed atomic.Int64  // of it, altogether
}

func (c *choosy) now() time.Time { return time.Now().Add(time.Duration(c.passed.Load())) }

func (c *choosy) Patch(ctx context.Context, o client.Object, patch client.Patch, opts ...client.PatchOption) error {
	if bad := c.bad.Load(); bad != nil && slices.Contains(*bad, o.GetName()) {
		c.passed.Add(int64(c.slow))

		return apierrors.NewForbidden(corev1.Resource("nodes"), o.GetName(), errors.New("the policy says no"))
	}

	return c.Client.Patch(ctx, o, patch, opts...)
}

// TestNodes_SomeRefused has more Nodes that cannot be changed than a pass tries: all
// others are changed, those of the latest set, too. What the condition says of them
// stays the same, and they do not take the place of the rollout's own times.
func TestNodes_SomeRefused(t *testing.T) {
	t.Parallel()
	for name, slow := range map[string]time.Duration{"at once": 0, "by a webhook that does not answer": 10 * time.Second} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			someRefused(t, slow)
		})
	}
}

func someRefused(t *testing.T, slow time.Duration) {
	t.Helper()
	r := newRig(t)
	r.player = &player{broken: map[string]bool{}, held: map[string]int{"large": 0}}
	target := &choosy{Client: r.Client, slow: slow}
	r.target, r.now = target, target.now
	r.start(t)
	d := r.deployment(8, func(d *v1alpha1.MachineDeployment) { d.Spec.ProgressDeadlineSeconds = new(int32(math.MaxInt32)) })
	r.create(t, d)
	r.complete(t, d)
	var names []string
	for _, node := range r.nodes(t, "small") {
		names = append(names, node.Name)
	}
	slices.Sort(names)
	bad := names[:6] // two of them go before the rollout comes to rest
	target.bad.Store(&bad)
	r.player.release("large", 1)
	r.change(t, d, class("large"))
	r.until(t, "rest", d, func(d *v1alpha1.MachineDeployment) bool {
		return maps.Equal(map[string]int32{"small": 6, "large": 3}, r.replicas(t)) && len(r.machines(t)) == 9 && d.Status.AvailableReplicas == 7
	})
	annotated := func(n *corev1.Node) bool {
		return n.Annotations["cluster-autoscaler.kubernetes.io/scale-down-disabled"] == "true"
	}
	if !poll(t, func() bool {
		large, small := r.nodes(t, "large"), r.nodes(t, "small")
		small = slices.DeleteFunc(small, func(n *corev1.Node) bool { return slices.Contains(bad, n.Name) })

		return len(large) > 0 && !slices.ContainsFunc(append(large, small...), func(n *corev1.Node) bool { return !annotated(n) })
	}) {
		t.Fatalf("some Nodes are not annotated: %+v", r.nodes(t, "small"))
	}
	lastError := func(d *v1alpha1.MachineDeployment) string {
		_, text, _ := strings.Cut(condition(d, v1alpha1.MachineDeploymentProgressing).Message, v1alpha1.MessageLastError)

		return text
	}
	r.until(t, "a word on the Nodes", d, func(d *v1alpha1.MachineDeployment) bool { return strings.HasSuffix(lastError(d), ", and other nodes") })
	texts := map[string]bool{}
	for range 20 {
		result, err := r.reconciler.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(d)})
		if err != nil || result.RequeueAfter <= 0 || result.RequeueAfter > time.Minute {
			t.Errorf("the next look is in %s, after error %v", result.RequeueAfter, err)
		}
		texts[lastError(r.get(t, d))] = true
	}
	for text := range texts {
		if len(texts) > 1 || !strings.HasPrefix(text, "store node "+bad[2]) {
			t.Errorf("the condition says %q, want it to name %s", text, bad[2])
		}
	}
}
