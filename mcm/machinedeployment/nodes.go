package machinedeployment

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// tendNodes keeps new pods off the Nodes that a rollout is going to replace, and
// the cluster-autoscaler off all of the deployment's Nodes while it is under way.
func (p *pass) tendNodes(ctx context.Context) (bool, error) {
	if p.Target == nil || p.latest == nil || p.deployment.Spec.Paused {
		return true, nil
	}
	rolling := p.deployment.Spec.Strategy.Type == v1alpha1.RollingUpdateMachineDeploymentStrategyType
	if rolling {
		for _, set := range p.old {
			if err := p.tend(ctx, set, true, p.Settings.AnnotateNodes); err != nil {
				return false, err
			}
		}
	}

	return true, p.tend(ctx, p.latest, false, rolling && p.oldMachines() && p.Settings.AnnotateNodes)
}

// nodeFaults is how many Nodes that cannot be changed end the round of Nodes: each
// may take as long as a webhook or an API server does not answer.
const nodeFaults = 3

func (p *pass) oldMachines() bool { return total(p.countsOfAll(p.old), counts.most) > 0 }

// tend gives all Nodes of a set the taint and the annotations, or takes them
// away, and notes at the set that its Nodes have the taint.
func (p *pass) tend(ctx context.Context, set *v1alpha1.MachineSet, tainted, annotated bool) error {
	wasTainted := set.Annotations[v1alpha1.AnnotationKeyPreferNoSchedule] == v1alpha1.TaintValuePreferNoSchedule
	done := true
	for _, m := range p.machines[set.UID] {
		if len(p.errs) >= nodeFaults {
			return nil
		}
		name := m.Labels[v1alpha1.LabelKeyNode]
		if name == "" {
			continue
		}
		// A preserved machine's Node has the annotations for a reason of its own.
		wish := nodeWish{
			taints: tainted || wasTainted, tainted: tainted,
			protects: annotated || m.Status.CurrentStatus.PreserveExpiryTime.IsZero(), protected: annotated,
		}
		err := p.changeNode(ctx, name, wish)
		if err == nil {
			continue
		}
		// Neither the others nor the rollout wait for one.
		done = false
		if apierrors.IsConflict(err) { // Nodes change often
			p.lookAgain(conflictRetry)
		} else {
			p.errs = append(p.errs, err)
		}
	}
	if !done || tainted == wasTainted || tainted && len(p.machines[set.UID]) == 0 {
		return nil
	}
	before := set.DeepCopy()
	if tainted {
		metav1.SetMetaDataAnnotation(&set.ObjectMeta, v1alpha1.AnnotationKeyPreferNoSchedule, v1alpha1.TaintValuePreferNoSchedule)
	} else {
		delete(set.Annotations, v1alpha1.AnnotationKeyPreferNoSchedule)
	}

	return p.patchSet(ctx, set, before)
}

// A nodeWish is what a rollout wants of a Node.
type nodeWish struct {
	taints, tainted     bool // whether it cares for the taint, and wants it
	protects, protected bool // the same for the annotations
}

// granted tells whether a Node is as wished.
func (w nodeWish) granted(node *corev1.Node) bool {
	if w.taints && slices.ContainsFunc(node.Spec.Taints, isOurTaint) != w.tainted {
		return false
	}
	_, protected := node.Annotations[v1alpha1.AnnotationKeyScaleDownDisabled]
	ours := node.Annotations[v1alpha1.AnnotationKeyScaleDownDisabledByMCM] == v1alpha1.AnnotationValueTrue

	return !w.protects || w.protected && protected || !w.protected && !ours
}

func (w nodeWish) grant(node *corev1.Node) {
	if w.taints {
		taint(node, w.tainted)
	}
	if w.protects {
		v1alpha1.KeepFromScaleDown(node, w.protected)
	}
}

// changeNode grants a wish, provided that nobody else has changed the Node since
// it was read. A Node that is not there is left alone.
func (p *pass) changeNode(ctx context.Context, name string, wish nodeWish) error {
	cached := &corev1.Node{}
	// Each pass reads all Nodes of a deployment, and most are as they should be.
	if err := p.Target.Get(ctx, client.ObjectKey{Name: name}, cached, client.UnsafeDisableDeepCopy); err != nil {
		return client.IgnoreNotFound(err)
	}
	if wish.granted(cached) {
		return nil
	}
	node := cached.DeepCopy()
	wish.grant(node)
	err := p.Target.Patch(ctx, node, client.MergeFromWithOptions(cached, client.MergeFromWithOptimisticLock{}))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("store node %s: %w", name, err)
	}

	return nil
}

var ourTaint = corev1.Taint{
	Key: v1alpha1.TaintKeyPreferNoSchedule, Value: v1alpha1.TaintValuePreferNoSchedule, Effect: corev1.TaintEffectPreferNoSchedule,
}

func isOurTaint(t corev1.Taint) bool { return ourTaint.MatchTaint(&t) }

func taint(node *corev1.Node, on bool) {
	switch has := slices.ContainsFunc(node.Spec.Taints, isOurTaint); {
	case on && !has:
		node.Spec.Taints = append(node.Spec.Taints, ourTaint)
	case !on && has:
		node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, isOurTaint)
	}
}
