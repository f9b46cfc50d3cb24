package machinedeployment

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// nodeTending changes the Nodes of a deployment for the time of a rollout.
type nodeTending struct {
	*ownedSets
	target   client.Client // nil without a target cluster
	annotate bool          // whether the cluster-autoscaler is kept off Nodes
	faults   *nodeFaults
	clock    func() time.Time

	errs []error // of Nodes, without which the pass goes on
	// How many of them this pass has tried, for the first time and again.
	tries, retries int
}

// tendNodes keeps new pods off the Nodes that a rollout is going to replace, and
// the cluster-autoscaler off all of the deployment's Nodes while it is under way.
func (n *nodeTending) tendNodes(ctx context.Context) (steps.Next, error) {
	if n.target == nil || n.latest == nil || n.deployment.Spec.Paused {
		return steps.Proceed, nil
	}
	rolling := n.deployment.Spec.Strategy.Type == v1alpha1.RollingUpdateMachineDeploymentStrategyType
	if rolling {
		for _, set := range n.old {
			if err := n.tendSet(ctx, set, true, n.annotate); err != nil {
				return steps.Wait, err
			}
		}
	}

	if err := n.tendSet(ctx, n.latest, false, rolling && n.hasOldMachines() && n.annotate); err != nil {
		return steps.Wait, err
	}
	if err := n.summarizeErrors(); err != nil {
		n.log.V(1).Info("nodes cannot be changed", "err", err.Error(), "nodes", len(n.errs))
		// Not an error of the pass: its retries would take the place of all other times.
		n.LookAgain(nodeRetry)
	}

	return steps.Proceed, nil
}

// summarizeErrors sums up what the pass met at Nodes. How many these are by now is no part
// of it: that changes with every few that are tried.
func (n *nodeTending) summarizeErrors() error {
	switch len(n.errs) {
	case 0:
		return nil
	case 1:
		return n.errs[0]
	default:
		return fmt.Errorf("%w, and other nodes", n.errs[0])
	}
}

func (o *ownedSets) hasOldMachines() bool { return total(o.countsOfAll(o.old), counts.most) > 0 }

// tendSet gives all Nodes of a set the taint and the annotations, or takes them
// away, and notes at the set that its Nodes have the taint.
func (n *nodeTending) tendSet(ctx context.Context, set *v1alpha1.MachineSet, tainted, annotated bool) error {
	wasTainted := set.Annotations[v1alpha1.AnnotationKeyPreferNoSchedule] == v1alpha1.TaintValuePreferNoSchedule
	done := true // neither the others nor the rollout wait for a Node
	for _, m := range byNode(n.machines[set.UID]) {
		// A preserved machine's Node has the annotations for a reason of its own.
		wish := nodeWish{
			taints: tainted || wasTainted, tainted: tainted,
			protects: annotated || m.Status.CurrentStatus.PreserveExpiryTime.IsZero(), protected: annotated,
		}
		err := n.changeNode(ctx, m.Labels[v1alpha1.LabelKeyNode], wish)
		switch {
		case err == nil:
			continue
		case apierrors.IsConflict(err) || errors.Is(err, errLater): // Nodes change often
			n.LookAgain(steps.ConflictRetry)
		default:
			n.errs = append(n.errs, err)
		}
		done = false
	}
	if !done || tainted == wasTainted || tainted && len(n.machines[set.UID]) == 0 {
		return nil
	}
	before := set.DeepCopy()
	if tainted {
		metav1.SetMetaDataAnnotation(&set.ObjectMeta, v1alpha1.AnnotationKeyPreferNoSchedule, v1alpha1.TaintValuePreferNoSchedule)
	} else {
		delete(set.Annotations, v1alpha1.AnnotationKeyPreferNoSchedule)
	}

	return n.patchSet(ctx, set, before)
}

// byNode returns the machines that have a Node, in the order of its name: what is
// said of those that cannot be changed is the same in each pass.
func byNode(machines []*v1alpha1.Machine) []*v1alpha1.Machine {
	found := make([]*v1alpha1.Machine, 0, len(machines))
	for _, m := range machines {
		if m.Labels[v1alpha1.LabelKeyNode] != "" {
			found = append(found, m)
		}
	}
	slices.SortFunc(found, func(a, b *v1alpha1.Machine) int {
		return strings.Compare(a.Labels[v1alpha1.LabelKeyNode], b.Labels[v1alpha1.LabelKeyNode])
	})

	return found
}

// A nodeWish is what a rollout wants of a Node.
type nodeWish struct {
	taints, tainted     bool // whether it cares for the taint, and wants it
	protects, protected bool // the same for the annotations
}

// granted reports whether a Node is as wished.
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

// changeNode grants a wish, if no other writer has changed the Node since it was read. A Node that is not there is left alone.
func (n *nodeTending) changeNode(ctx context.Context, name string, wish nodeWish) error {
	cached := &corev1.Node{}
	// Each pass reads all Nodes of a deployment, and most are as they should be.
	if err := n.target.Get(ctx, client.ObjectKey{Name: name}, cached, client.UnsafeDisableDeepCopy); err != nil {
		return client.IgnoreNotFound(err)
	}
	if wish.granted(cached) {
		return nil
	}
	// Those that are known to fail take no try from those that are not.
	known, err := n.faults.of(name, n.now)
	tries := &n.tries
	if known {
		tries = &n.retries
	}
	switch {
	case err != nil:
		return err
	case *tries >= nodeTries:
		return errLater
	}
	node := cached.DeepCopy()
	wish.grant(node)
	err = n.target.Patch(ctx, node, client.MergeFromWithOptions(cached, client.MergeFromWithOptimisticLock{}))
	if err = client.IgnoreNotFound(err); err == nil {
		n.faults.forget(name)

		return nil
	}
	if apierrors.IsConflict(err) {
		return err
	}
	*tries++
	err = fmt.Errorf("store node %s: %w", name, err)
	n.faults.note(name, err, n.clock()) // the pass may have started long ago

	return err
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
