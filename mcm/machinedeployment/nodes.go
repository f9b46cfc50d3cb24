package machinedeployment

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
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

func (p *pass) oldMachines() bool { return total(p.countsOfAll(p.old), counts.most) > 0 }

// tend gives all Nodes of a set the taint and the annotations, or takes them
// away, and notes at the set that its Nodes have the taint.
func (p *pass) tend(ctx context.Context, set *v1alpha1.MachineSet, tainted, annotated bool) error {
	wasTainted := set.Annotations[v1alpha1.AnnotationKeyPreferNoSchedule] == v1alpha1.TaintValuePreferNoSchedule
	done := true
	for _, m := range p.machines[set.UID] {
		name := m.Labels[v1alpha1.LabelKeyNode]
		if name == "" {
			continue
		}
		err := p.changeNode(ctx, name, func(node *corev1.Node) {
			if tainted || wasTainted {
				taint(node, tainted)
			}
			// A preserved machine's Node has the annotations for a reason of its own.
			if annotated || m.Status.CurrentStatus.PreserveExpiryTime.IsZero() {
				protect(node, annotated)
			}
		})
		if apierrors.IsConflict(err) {
			// Nodes change often. Neither the others nor the rollout wait for one.
			p.lookAgain(conflictRetry)
			done = false
		} else if err != nil {
			return err
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

// changeNode stores what change does to a Node, provided that nobody else has
// changed it since it was read. A Node that is not there is left alone.
func (p *pass) changeNode(ctx context.Context, name string, change func(*corev1.Node)) error {
	node := &corev1.Node{}
	if err := p.Target.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return client.IgnoreNotFound(err)
	}
	before := node.DeepCopy()
	change(node)
	if equality.Semantic.DeepEqual(before, node) {
		return nil
	}
	err := p.Target.Patch(ctx, node, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("store node %s: %w", name, err)
	}

	return nil
}

func taint(node *corev1.Node, on bool) {
	want := corev1.Taint{
		Key: v1alpha1.TaintKeyPreferNoSchedule, Value: v1alpha1.TaintValuePreferNoSchedule, Effect: corev1.TaintEffectPreferNoSchedule,
	}
	is := func(t corev1.Taint) bool { return want.MatchTaint(&t) }
	has := slices.ContainsFunc(node.Spec.Taints, is)
	switch {
	case on && !has:
		node.Spec.Taints = append(node.Spec.Taints, want)
	case !on && has:
		node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, is)
	}
}

// protect sets the annotation that keeps the cluster-autoscaler from removing the
// Node, or removes it. One that somebody else has set is theirs.
func protect(node *corev1.Node, on bool) {
	const yes = "true"
	_, has := node.Annotations[v1alpha1.AnnotationKeyScaleDownDisabled]
	ours := node.Annotations[v1alpha1.AnnotationKeyScaleDownDisabledByMCM] == yes
	switch {
	case on && !has:
		metav1.SetMetaDataAnnotation(&node.ObjectMeta, v1alpha1.AnnotationKeyScaleDownDisabled, yes)
		metav1.SetMetaDataAnnotation(&node.ObjectMeta, v1alpha1.AnnotationKeyScaleDownDisabledByMCM, yes)
	case !on && ours:
		delete(node.Annotations, v1alpha1.AnnotationKeyScaleDownDisabled)
		delete(node.Annotations, v1alpha1.AnnotationKeyScaleDownDisabledByMCM)
	}
}
