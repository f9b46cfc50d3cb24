package safety

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// notManaged is the value of the annotation on Nodes without a machine.
const notManaged = "1"

// markNodes marks the Nodes that belong to no machine, and lets go of them, as
// the machine controller manager does; and takes the mark away from those that do.
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
		// Where only one namespace is served, another manager may have claimed the
		// Node for a machine that is not seen here.
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
		return nil // the next look sees what it is now
	}
	if err != nil {
		return fmt.Errorf("mark node %s: %w", node.Name, err)
	}
	p.log.Info("node marked", "node", node.Name, "managed", managed)

	return nil
}

// removeToken removes the token with which an instance that is deleted could have joined:
// its Machine went by force, and nothing else knows of it.
func (p *pass) removeToken(ctx context.Context, o *dispatch.Orphan) error {
	if p.Tokens == nil || o.MachineUID == "" {
		return nil
	}
	m := &v1alpha1.Machine{}
	m.Namespace, m.Name, m.UID = o.Namespace, o.MachineName, o.MachineUID

	return p.Tokens.Delete(ctx, m)
}

// removeNode removes the Node of an instance that is deleted: it would keep its name
// from the Node of another instance.
func (p *pass) removeNode(ctx context.Context, providerID string) error {
	if p.Nodes == nil {
		return nil
	}
	nodes := &corev1.NodeList{}
	if err := p.Nodes.List(ctx, nodes); err != nil {
		return fmt.Errorf("list nodes: %w", err)
	}
	for i := range nodes.Items {
		before := &nodes.Items[i]
		if before.Spec.ProviderID != providerID {
			continue
		}
		node := before.DeepCopy()
		if controllerutil.RemoveFinalizer(node, v1alpha1.FinalizerNameNode) {
			err := p.Nodes.Patch(ctx, node, client.MergeFrom(before))
			if client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("release node %s: %w", node.Name, err)
			}
		}
		err := p.Nodes.Delete(ctx, node, client.Preconditions{UID: &before.UID})
		if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) { // by now the name is another Node's
			return fmt.Errorf("delete node %s: %w", node.Name, err)
		}
		p.log.Info("node of a deleted instance deleted", "node", node.Name, "provider_id", providerID)
	}

	return nil
}
