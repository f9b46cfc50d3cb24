package orphans_test

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/bootstrap"
	"github.com/machinebus/machinebus/mcm/orphans"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// node makes a Node that a machine has claimed, or none with "".
func (r *rig) node(name, machine string) *corev1.Node {
	r.t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: r.namespace + "-" + name}}
	if machine != "" {
		node.Labels = map[string]string{v1alpha1.LabelKeyMachineName: machine}
		node.Finalizers = []string{v1alpha1.FinalizerNameNode}
	}
	r.create(node)
	r.t.Cleanup(func() {
		patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
		err := r.Patch(context.WithoutCancel(r.t.Context()), node, patch)
		if client.IgnoreNotFound(err) != nil {
			r.t.Error(err)
		}
	})

	return node
}

// marked returns a Node's mark and whether it has the finalizer.
func (r *rig) marked(node *corev1.Node) (mark string, claimed bool) {
	r.t.Helper()
	r.must(r.Get(r.t.Context(), client.ObjectKeyFromObject(node), node))

	return node.Annotations[v1alpha1.AnnotationKeyNotManaged], len(node.Finalizers) > 0
}

func TestNodes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.Nodes = r.WithWatch
	m := r.machine(r.namespace+"-m", "")
	mine, static := r.node("mine", m.Name), r.node("static", "")
	foreign := r.node("foreign", r.namespace+"-elsewhere")
	want := func(node *corev1.Node, mark string, claimed bool, why string) {
		t.Helper()
		if gotMark, gotClaimed := r.marked(node); gotMark != mark || gotClaimed != claimed {
			t.Errorf("node %s: mark %q, claimed %v, want %q, %v: %s", node.Name, gotMark, gotClaimed, mark, claimed, why)
		}
	}
	r.Pass(t.Context())
	want(static, "", false, "it is young: its machine may claim it yet")
	r.clock = r.clock.Add(r.Settings.NodeGrace + grace)
	r.Pass(t.Context())
	want(mine, "", true, "its machine is there")
	want(static, "1", false, "no machine has claimed it")
	want(foreign, "", true, "another manager may have claimed it for a namespace of its own")

	r.must(r.Delete(t.Context(), m))
	r.Pass(t.Context())
	want(mine, "1", false, "its machine is gone")

	r.machine(m.Name, "")
	r.Pass(t.Context())
	want(mine, "", false, "there is a machine again")
}

// A Machine that went by force leaves its token, which goes with its instance; no other does.
func TestTokenOfAnOrphan(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	tokens := &bootstrap.Tokens{Target: r.WithWatch}
	r.Tokens = tokens
	there := func(uid string) bool {
		t.Helper()
		secrets := &corev1.SecretList{}
		r.must(r.List(t.Context(), secrets, client.InNamespace(metav1.NamespaceSystem), client.MatchingLabels{bootstrap.LabelKeyMachineUID: uid}))

		return len(secrets.Items) > 0
	}
	gone, other := "gone-"+r.namespace, "other-"+r.namespace // tokens of all tests are in one namespace
	for _, uid := range []string{gone, other} {
		m := &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "m", UID: types.UID(uid)}}
		if _, err := tokens.Ensure(t.Context(), m, time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	r.made("kept")
	r.cloud.add(orphanID, "m", types.UID(gone))
	r.passes()
	if there(gone) || !there(other) {
		t.Errorf("after the instance was deleted its machine's token is there: %t, another one's: %t", there(gone), there(other))
	}
}

// The Node of an instance goes, too, when the delete had its effect and its outcome was
// lost: another machine of that name could not join otherwise.
func TestNodeOfALostDelete(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.Nodes = r.WithWatch
	r.made("kept")
	id := orphanID + "/lost/" + r.namespace
	node := r.node("lost", r.namespace+"-lost")
	before := node.DeepCopy()
	node.Spec.ProviderID = id
	r.must(r.Patch(t.Context(), node, client.MergeFrom(before)))
	r.cloud.add(id, "gone", "gone-uid")
	r.cloud.failing(&driverv1.Status{Code: driverv1.Code_CODE_INTERNAL, Message: "the answer was lost"})
	r.passes()
	r.event(orphans.EventOrphanNotDeleted, "the answer was lost")
	r.must(r.Get(t.Context(), client.ObjectKeyFromObject(node), node))
	r.cloud.lose(id)
	r.Pass(t.Context())
	r.event(orphans.EventOrphanDeleted, id)
	if err := r.Get(t.Context(), client.ObjectKeyFromObject(node), node); !apierrors.IsNotFound(err) {
		t.Errorf("the node of the deleted instance: %v", err)
	}
}

// The Node of an instance that is deleted goes with it; no other does.
func TestNodeOfAnOrphan(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.Nodes = r.WithWatch
	r.made("kept")
	id := orphanID + "/" + r.namespace // Nodes of all tests are in one cluster
	its, others := r.node("its", r.namespace+"-gone"), r.node("others", "")
	for node, providerID := range map[*corev1.Node]string{its: id, others: id + "-else"} {
		before := node.DeepCopy()
		node.Spec.ProviderID = providerID
		r.must(r.Patch(t.Context(), node, client.MergeFrom(before)))
	}
	r.cloud.add(id, "gone", "gone-uid")
	r.passes()
	if err := r.Get(t.Context(), client.ObjectKeyFromObject(its), its); !apierrors.IsNotFound(err) {
		t.Errorf("the node of the deleted instance: %v", err)
	}
	r.must(r.Get(t.Context(), client.ObjectKeyFromObject(others), others))
}
