package join

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// reportPeriod is how often a kubelet writes a status that has not changed.
const reportPeriod = 5 * time.Minute

// report updates the Node's status if it has changed, or every reportPeriod. It detects
// that the Node was deleted.
func (j *Joiner) report(ctx context.Context, k *kubelet, ready bool) error {
	node, err := j.current(ctx, k)
	if err != nil || node == nil {
		return err
	}
	if node.Spec.ProviderID != k.instance.ProviderID {
		k.registered = false

		return fmt.Errorf("node %s: %w", node.Name, errNameTaken) // the retry registers and logs
	}
	k.node.uid = node.UID
	if readiness(node) == readyCondition(ready).Status && time.Since(k.node.reportedAt) < reportPeriod {
		return nil
	}

	return j.writeStatus(ctx, k, node, ready)
}

// current returns the Node from the cache, which may lag, or nil if it is gone.
func (j *Joiner) current(ctx context.Context, k *kubelet) (*corev1.Node, error) {
	if node, err := j.nodes.Get(k.instance.NodeName); err == nil {
		return node, nil
	}
	node, err := j.client.CoreV1().Nodes().Get(ctx, k.instance.NodeName, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		// A kubelet registers only when it starts.
		k.departed = true
		j.log.Info("node deleted while its instance runs; it is not created again",
			"node", k.instance.NodeName, "instance", k.instance.ID)

		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("node %s: %w", k.instance.NodeName, err)
	}

	return node, nil
}

// writeStatus writes the kubelet's status, and keeps conditions of others.
func (j *Joiner) writeStatus(ctx context.Context, k *kubelet, node *corev1.Node, ready bool) error {
	status := nodeStatus(k.instance, ready)
	for n := range status.Conditions {
		c := &status.Conditions[n]
		for _, former := range node.Status.Conditions {
			if former.Type == c.Type && former.Status == c.Status {
				c.LastTransitionTime = former.LastTransitionTime
			}
		}
	}
	patch, err := json.Marshal(map[string]any{"status": status})
	if err != nil {
		return fmt.Errorf("status of node %s: %w", node.Name, err)
	}
	if _, err := j.client.CoreV1().Nodes().Patch(ctx, node.Name, types.StrategicMergePatchType, patch,
		metav1.PatchOptions{}, "status"); err != nil {
		return fmt.Errorf("status of node %s: %w", node.Name, err)
	}
	k.node.reportedAt = time.Now()

	return nil
}

// readiness returns the status of the Ready condition, "" without one.
func readiness(node *corev1.Node) corev1.ConditionStatus {
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status
		}
	}

	return ""
}
