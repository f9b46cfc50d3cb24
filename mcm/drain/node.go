package drain

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	kubectldrain "k8s.io/kubectl/pkg/drain"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// prepareNode sets the Node's condition Terminating and cordons it. It only reads a Node
// that stays.
func (r *run) prepareNode(ctx context.Context) error {
	release, err := r.acquireSlot(ctx)
	if err != nil {
		return err
	}
	defer release()
	if r.req.Stays {
		_, err := r.readNode(ctx)

		return err
	}
	node, err := r.markTerminating(ctx)
	if err != nil {
		return fmt.Errorf("set condition %s of node %s: %w", v1alpha1.NodeTerminating, r.req.Node.Name, err)
	}
	if err := kubectldrain.RunCordonOrUncordon(r.helper(ctx), node, true); err != nil {
		return fmt.Errorf("cordon node %s: %w", node.Name, err)
	}

	return nil
}

// markTerminating sets the Node's condition Terminating and returns the Node. It keeps the
// condition of an earlier drain, which knew the machine's phase before Terminating.
func (r *run) markTerminating(ctx context.Context) (*corev1.Node, error) {
	want := corev1.NodeCondition{
		Type: v1alpha1.NodeTerminating, Status: corev1.ConditionTrue,
		Reason: v1alpha1.ReasonScaleDown, Message: v1alpha1.MessageScaleDown,
	}
	if r.req.Failed {
		want.Reason, want.Message = v1alpha1.ReasonUnhealthy, v1alpha1.MessageUnhealthy
	}
	for _, has := range r.req.Node.Status.Conditions {
		if has.Type == want.Type && has.Status == want.Status {
			return r.readNode(ctx)
		}
	}
	want.LastHeartbeatTime = metav1.NewTime(time.Now())
	want.LastTransitionTime = want.LastHeartbeatTime
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": r.req.Node.UID}, // not a new Node of the same name
		"status":   map[string]any{"conditions": []corev1.NodeCondition{want}},
	})
	if err != nil {
		return nil, err
	}

	// A strategic merge leaves the other conditions, which the kubelet writes.
	node, err := r.client.CoreV1().Nodes().Patch(ctx, r.req.Node.Name, types.StrategicMergePatchType, patch,
		metav1.PatchOptions{}, "status")
	if cause, ok := apierrors.StatusCause(err, metav1.CauseTypeFieldValueInvalid); ok && cause.Field == "metadata.uid" {
		return nil, fmt.Errorf("%w: another node has its name: %w", errNodeGone, err)
	}

	return node, err
}

// readNode reads the Node from the API server, or returns errNodeGone.
func (r *run) readNode(ctx context.Context) (*corev1.Node, error) {
	node, err := r.client.CoreV1().Nodes().Get(ctx, r.req.Node.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && node.UID != r.req.Node.UID {
		return nil, errNodeGone
	}
	if err != nil {
		return nil, fmt.Errorf("read node %s: %w", r.req.Node.Name, err)
	}

	return node, nil
}
