package machine

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// machineNode is the Node of a machine.
type machineNode struct {
	*object
	target client.Client // nil without a target cluster
	live   client.Reader

	found *corev1.Node // nil for none; to be read only
}

// lookupNode finds the machine's Node, of which the cache's own copy is only read;
// node is nil when there is none, or when the Node of that name is another
// instance's.
func (n *machineNode) lookupNode(ctx context.Context) error {
	return n.readNode(ctx, n.target, client.UnsafeDisableDeepCopy)
}

func (n *machineNode) readNode(ctx context.Context, from client.Reader, opts ...client.GetOption) error {
	n.found = nil
	node := &corev1.Node{}
	err := from.Get(ctx, client.ObjectKey{Name: n.machine.Labels[v1alpha1.LabelKeyNode]}, node, opts...)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read node of machine %s: %w", n.machine.Name, err)
	}
	if id := node.Spec.ProviderID; id != "" && n.machine.Spec.ProviderID != "" && !v1alpha1.SameInstance(id, n.machine.Spec.ProviderID) {
		n.log.V(1).Info("the node of this name is another instance", "node", node.Name, "provider_id", id)

		return nil
	}
	n.found = node

	return nil
}

// nodeHealth reports whether the Node is as it should be, and describes what is
// not.
func (n *machineNode) nodeHealth() (healthy bool, text string) {
	if n.found == nil {
		return false, "the node does not exist"
	}
	watched := n.settings.NodeConditions
	if own := n.machine.Spec.NodeConditions; own != nil {
		watched = strings.FieldsFunc(*own, func(r rune) bool { return r == ',' || unicode.IsSpace(r) })
	}
	ready := false
	var faults []string
	for _, c := range n.found.Status.Conditions {
		switch {
		case c.Type == corev1.NodeReady:
			ready = c.Status == corev1.ConditionTrue
			if !ready {
				faults = append(faults, fmt.Sprintf("%s=%s (%s)", c.Type, c.Status, c.Reason))
			}
		case c.Status != corev1.ConditionFalse && slices.Contains(watched, string(c.Type)):
			faults = append(faults, fmt.Sprintf("%s=%s (%s)", c.Type, c.Status, c.Reason))
		}
	}
	if !ready && len(faults) == 0 {
		faults = append(faults, "no condition Ready")
	}

	return len(faults) == 0, strings.Join(faults, ", ")
}

// lacksComponents reports whether the Node of a machine that has yet to join still
// waits for its critical components.
func (n *machineNode) lacksComponents() bool {
	return n.machine.Status.CurrentStatus.Phase == v1alpha1.MachinePending && n.found != nil &&
		slices.ContainsFunc(n.found.Spec.Taints, func(t corev1.Taint) bool {
			return t.Key == v1alpha1.TaintKeyCriticalComponentsNotReady
		})
}

// reallyUnhealthy asks the API server itself whether the machine's Node is not as it
// should be: what follows costs an instance, and a cache that was cut off may
// take half a minute to hear of anything.
func (n *machineNode) reallyUnhealthy(ctx context.Context) (bool, error) {
	cached := n.found
	defer func() { n.found = cached }()
	if err := n.readNode(ctx, n.live); err != nil {
		return false, err
	}
	healthy, _ := n.nodeHealth()

	return !healthy || n.lacksComponents(), nil
}

// changeNode stores a change of the Node, if no other writer has changed it.
func (n *machineNode) changeNode(ctx context.Context, change func(*corev1.Node)) error {
	node := n.found.DeepCopy()
	change(node)
	if equality.Semantic.DeepEqual(node, n.found) {
		return nil
	}
	err := n.target.Patch(ctx, node, client.MergeFromWithOptions(n.found, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		return fmt.Errorf("store node %s: %w", node.Name, err)
	}
	n.found = node

	return nil
}
