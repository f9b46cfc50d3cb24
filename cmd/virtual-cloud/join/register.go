package join

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// errNameTaken means that the Node with the instance's name is another instance's.
var errNameTaken = errors.New("the Node belongs to another instance")

// nodeIdentity identifies the instance's Node object.
type nodeIdentity struct {
	uid        types.UID
	reportedAt time.Time // when its status was last written
}

// register creates the instance's Node, or takes over one of an earlier run.
func (j *Joiner) register(ctx context.Context, k *kubelet, ready bool) error {
	node, err := j.client.CoreV1().Nodes().Create(ctx, newNode(k.instance, ready), metav1.CreateOptions{})
	tookOver := apierrors.IsAlreadyExists(err)
	switch {
	case tookOver:
		existing, err := j.client.CoreV1().Nodes().Get(ctx, k.instance.NodeName, metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("node %s: %w", k.instance.NodeName, err)
		}
		if err := j.takeOver(ctx, k, existing, ready); err != nil {
			return err
		}
		node = existing
	case err != nil:
		return fmt.Errorf("register node %s: %w", k.instance.NodeName, err)
	}
	k.registered, k.warned = true, false
	k.node = nodeIdentity{uid: node.UID, reportedAt: time.Now()}
	j.log.Info("node registered", "node", node.Name, "instance", k.instance.ID, "took_over", tookOver)

	return nil
}

// takeOver makes an existing Node the instance's. A provider id cannot be changed once it
// is set. A kubelet would continue with the wrong one and hide that two instances share a
// name; here the new instance waits until the Node is deleted.
func (j *Joiner) takeOver(ctx context.Context, k *kubelet, existing *corev1.Node, ready bool) error {
	if id := existing.Spec.ProviderID; id != "" && id != k.instance.ProviderID {
		if !k.warned {
			k.warned = true
			j.log.Warn("an instance cannot join: its node name is taken by another instance's Node; "+
				"it will join when that Node is deleted",
				"node", existing.Name, "instance_provider_id", k.instance.ProviderID, "node_provider_id", id)
		}

		return fmt.Errorf("node %s: %w", existing.Name, errNameTaken)
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"labels": labels(k.instance)},
		"spec":     map[string]any{"providerID": k.instance.ProviderID},
	})
	if err != nil {
		return fmt.Errorf("node %s: %w", existing.Name, err)
	}
	if _, err := j.client.CoreV1().Nodes().Patch(ctx, existing.Name, types.StrategicMergePatchType, patch,
		metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("take over node %s: %w", existing.Name, err)
	}

	return j.writeStatus(ctx, k, existing, ready)
}
