package orphans

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// notManaged is the value of the annotation on Nodes without a machine.
const notManaged = "1"

// markNodes annotates Nodes that belong to no machine and removes our finalizer from them,
// as the machine controller manager does. It removes the annotation from other Nodes.
func (p *pass) markNodes(ctx context.Context) error {
	if p.Nodes == nil {
		return nil
	}
	nodes := &corev1.NodeList{}
	if err := p.Nodes.List(ctx, nodes); err != nil {
		return fmt.Errorf("list nodes: %w", err)
	}
	names, byNode := p.known.nodes()
	ours := map[string]bool{}
	for i := range nodes.Items {
		node := &nodes.Items[i]
		machine := node.Labels[v1alpha1.LabelKeyMachineName]
		if names[machine] || p.nodes[machine] {
			ours[machine] = true
		}
		_, managed := p.known.byProviderID[node.Spec.ProviderID]
		managed = managed || names[machine] || byNode[node.Name]
		// If this manager serves one namespace only, the machine may be in another one.
		foreign := machine != "" && !ours[machine] && p.Settings.Namespace != ""
		young := p.now.Sub(node.CreationTimestamp.Time) < p.Settings.NodeGrace
		if foreign || young && !managed {
			continue
		}
		if err := p.mark(ctx, node, managed); err != nil {
			return err
		}
	}
	p.nodes = ours

	return nil
}

func (p *pass) mark(ctx context.Context, before *corev1.Node, managed bool) error {
	_, marked := before.Annotations[v1alpha1.AnnotationKeyNotManaged]
	if marked != managed {
		return nil
	}
	node := before.DeepCopy()
	if managed {
		delete(node.Annotations, v1alpha1.AnnotationKeyNotManaged)
	} else {
		metav1.SetMetaDataAnnotation(&node.ObjectMeta, v1alpha1.AnnotationKeyNotManaged, notManaged)
		controllerutil.RemoveFinalizer(node, v1alpha1.FinalizerNameNode)
	}
	err := p.Nodes.Patch(ctx, node, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // the next look reads the changed Node
	}
	if err != nil {
		return fmt.Errorf("mark node %s: %w", node.Name, err)
	}
	p.log.Info("updated the mark of a node without a machine", "node", node.Name, "managed", managed)

	return nil
}
