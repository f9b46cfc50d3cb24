package machine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// followNode makes the machine's phase follow its Node: Running while that is
// healthy, Unknown while it is not, Failed when it was so for too long or never
// came.
func (p *pass) followNode(ctx context.Context) (next, error) {
	if p.Target == nil || p.machine.Labels[v1alpha1.LabelKeyNode] == "" {
		return wait, nil
	}
	if err := p.lookupNode(ctx); err != nil {
		return wait, err
	}
	if p.node != nil && !p.node.DeletionTimestamp.IsZero() && p.node.Labels[v1alpha1.LabelKeyMachineName] == p.machine.Name {
		return p.followNodeOut(ctx)
	}
	if err := p.claimNode(ctx); err != nil {
		return wait, err
	}
	if err := p.applyVirtualCapacity(ctx); err != nil {
		return wait, err
	}
	healthy, text := p.nodeHealth()
	unspent, err := p.spendToken(ctx)
	if err != nil {
		return wait, err
	}
	p.copyConditions()
	n, err := p.followHealth(ctx, healthy, text)
	if err != nil {
		return wait, err
	}

	return n, errors.Join(p.patchStatus(ctx), unspent)
}

// spendToken deletes the token of a machine that has joined, in time or not, and with
// or without its critical components: nobody needs it now. That this fails is no reason
// to hold the machine up, once it is journaled for whoever leads then; unspent is why.
func (p *pass) spendToken(ctx context.Context) (unspent, err error) {
	if p.Tokens == nil || p.node == nil || !isReady(p.node.Status.Conditions) {
		return nil, nil
	}
	phase := p.machine.Status.CurrentStatus.Phase
	if phase != v1alpha1.MachinePending && phase != v1alpha1.MachineFailed && !p.journal.Token {
		return nil, nil
	}
	unspent = p.deleteToken(ctx)
	if p.journal.Token == (unspent != nil) {
		return unspent, nil
	}
	p.journal.Token = unspent != nil

	return unspent, p.patch(ctx)
}

// deleteToken deletes the machine's token. Where mcm may not, the token is left to
// expire.
func (p *pass) deleteToken(ctx context.Context) error {
	err := p.Tokens.Delete(ctx, p.machine)
	if !apierrors.IsForbidden(err) {
		return err
	}
	p.log.Info("bootstrap token is left to expire", "err", err.Error())
	p.warnf("TokenLeft", "If there is a bootstrap token, it stays valid until it expires: %s", fault(err))

	return nil
}

// isReady tells whether a Node with these conditions is Ready.
func isReady(conditions []corev1.NodeCondition) bool {
	return slices.ContainsFunc(conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// followHealth sets the phase that the Node's health leads to.
func (p *pass) followHealth(ctx context.Context, healthy bool, text string) (next, error) {
	switch phase := p.machine.Status.CurrentStatus.Phase; {
	case phase == v1alpha1.MachineInPlaceUpdating, phase == v1alpha1.MachineInPlaceUpdateFailed:
		return wait, nil // the update decides
	case phase == v1alpha1.MachinePending && (!healthy || p.lacksComponents()):
		return p.awaitJoin(ctx)
	case healthy && phase != v1alpha1.MachineRunning:
		return p.join(ctx), nil
	case phase == v1alpha1.MachineRunning && !healthy:
		return p.suspect(text), nil
	case phase == v1alpha1.MachineUnknown:
		return p.awaitRecovery(ctx)
	default:
		return wait, nil
	}
}

// lookupNode finds the machine's Node, of which the cache's own copy is only read;
// node is nil when there is none, or when the Node of that name is another
// instance's.
func (p *pass) lookupNode(ctx context.Context) error {
	return p.readNode(ctx, p.Target, client.UnsafeDisableDeepCopy)
}

func (p *pass) readNode(ctx context.Context, from client.Reader, opts ...client.GetOption) error {
	p.node = nil
	node := &corev1.Node{}
	err := from.Get(ctx, client.ObjectKey{Name: p.machine.Labels[v1alpha1.LabelKeyNode]}, node, opts...)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read node of machine %s: %w", p.machine.Name, err)
	}
	if id := node.Spec.ProviderID; id != "" && p.machine.Spec.ProviderID != "" && !v1alpha1.SameInstance(id, p.machine.Spec.ProviderID) {
		p.log.V(1).Info("the node of this name is another instance", "node", node.Name, "provider_id", id)

		return nil
	}
	p.node = node

	return nil
}

// claimNode writes on the Node whose it is and what its template says, and keeps
// it from being deleted behind the machine's back.
func (p *pass) claimNode(ctx context.Context) error {
	if p.node == nil || !p.node.DeletionTimestamp.IsZero() {
		return nil
	}
	node := p.node.DeepCopy()
	p.applyTemplate(node)
	metav1.SetMetaDataLabel(&node.ObjectMeta, v1alpha1.LabelKeyMachineName, p.machine.Name)
	controllerutil.AddFinalizer(node, v1alpha1.FinalizerNameNode)
	if equality.Semantic.DeepEqual(node.ObjectMeta, p.node.ObjectMeta) && equality.Semantic.DeepEqual(node.Spec, p.node.Spec) {
		return nil
	}
	err := p.Target.Patch(ctx, node, client.MergeFromWithOptions(p.node, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		return fmt.Errorf("claim node %s: %w", node.Name, err)
	}
	p.node = node

	return nil
}

// followNodeOut deletes the machine whose Node somebody deletes: the Node's
// finalizer waits for that.
func (p *pass) followNodeOut(ctx context.Context) (next, error) {
	p.warnf("NodeDeleted", "Node %s is being deleted; its machine follows", p.node.Name)
	err := p.Control.Delete(ctx, p.machine, client.Preconditions{UID: uidOf(p.machine)})
	if err != nil {
		return wait, fmt.Errorf("delete machine %s/%s: %w", p.machine.Namespace, p.machine.Name, err)
	}

	return wait, nil
}

// nodeHealth tells whether the Node is as it should be, and describes what is
// not.
func (p *pass) nodeHealth() (healthy bool, text string) {
	if p.node == nil {
		return false, "the node does not exist"
	}
	watched := p.Settings.NodeConditions
	if own := p.machine.Spec.NodeConditions; own != nil {
		watched = strings.FieldsFunc(*own, func(r rune) bool { return r == ',' || unicode.IsSpace(r) })
	}
	ready := false
	var faults []string
	for _, c := range p.node.Status.Conditions {
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

// copyConditions copies the Node's conditions when more than a heartbeat
// changed.
func (p *pass) copyConditions() {
	if p.node == nil || sameConditions(p.machine.Status.Conditions, p.node.Status.Conditions) {
		return
	}
	p.machine.Status.Conditions = slices.Clone(p.node.Status.Conditions)
}

func sameConditions(a, b []corev1.NodeCondition) bool {
	return slices.EqualFunc(a, b, func(x, y corev1.NodeCondition) bool {
		return x.Type == y.Type && x.Status == y.Status && x.Reason == y.Reason && x.Message == y.Message
	})
}

// lacksComponents tells whether the Node of a machine that has yet to join still
// waits for its critical components.
func (p *pass) lacksComponents() bool {
	return p.machine.Status.CurrentStatus.Phase == v1alpha1.MachinePending && p.node != nil &&
		slices.ContainsFunc(p.node.Spec.Taints, func(t corev1.Taint) bool {
			return t.Key == v1alpha1.TaintKeyCriticalComponentsNotReady
		})
}

// join makes a machine with a healthy Node Running.
func (p *pass) join(ctx context.Context) next {
	name, last := p.machine.Name, p.machine.Status.LastOperation
	p.setPhase(v1alpha1.MachineRunning)
	if last.Type == v1alpha1.MachineOperationCreate && last.State != v1alpha1.MachineStateSuccessful {
		text := fmt.Sprintf(v1alpha1.TextFormatJoined, name, p.age().Round(time.Second))
		p.setLastOperation(v1alpha1.MachineOperationCreate, v1alpha1.MachineStateSuccessful, "", text)
		p.notef("Joined", "%s as node %s", text, p.node.Name)
		p.notes = append(p.notes, func() { p.timings.observe(p.kind(ctx), stageJoin, p.age()) })
	} else {
		text := fmt.Sprintf(v1alpha1.TextFormatRejoined, name)
		p.setLastOperation(v1alpha1.MachineOperationHealthCheck, v1alpha1.MachineStateSuccessful, "", text)
		p.notef("Rejoined", "%s", text)
	}

	return wait
}

func (p *pass) awaitJoin(ctx context.Context) (next, error) {
	limit := p.creationTimeout()
	if left := limit - p.age(); left > 0 {
		return again(left), nil
	}
	if bad, err := p.reallyUnhealthy(ctx); !bad || err != nil {
		return again(p.Settings.Retry.Short), err
	}
	text := fmt.Sprintf(v1alpha1.TextFormatFailedToJoin, p.machine.Name, limit.Minutes())
	p.setPhase(v1alpha1.MachineFailed)
	p.setLastOperation(p.machine.Status.LastOperation.Type, v1alpha1.MachineStateFailed, "", text)
	p.cautionf("FailedToJoin", "%s", text)
	p.notes = append(p.notes, func() { p.timings.failedToJoin(p.kind(ctx)) })

	return wait, nil
}

func (p *pass) suspect(text string) next {
	if p.node == nil && len(p.machine.Status.Conditions) == 0 {
		return wait // never seen: nothing got worse
	}
	description := fmt.Sprintf(v1alpha1.TextFormatUnhealthy, p.machine.Name, text)
	p.setPhase(v1alpha1.MachineUnknown)
	p.setLastOperation(v1alpha1.MachineOperationHealthCheck, v1alpha1.MachineStateProcessing, "", description)
	p.cautionf("Unhealthy", "Node %s: %s", p.machine.Labels[v1alpha1.LabelKeyNode], text)

	return again(p.healthTimeout())
}

func (p *pass) awaitRecovery(ctx context.Context) (next, error) {
	if off := p.machine.Spec.DisableHealthTimeout; off != nil && *off {
		return wait, nil
	}
	limit := p.healthTimeout()
	since := p.now.Sub(p.machine.Status.CurrentStatus.LastUpdateTime.Time)
	if left := limit - since; left > 0 {
		return again(left), nil
	}
	if may, err := p.mayFail(ctx, limit); !may || err != nil {
		return again(p.Settings.Retry.Short), err
	}
	if bad, err := p.reallyUnhealthy(ctx); !bad || err != nil {
		p.replacements.release(p.machine.UID)

		return again(p.Settings.Retry.Short), err
	}
	text := fmt.Sprintf("Machine %s %s %s", p.machine.Name, v1alpha1.TextHealthFailing, limit)
	p.setPhase(v1alpha1.MachineFailed)
	p.setLastOperation(p.machine.Status.LastOperation.Type, v1alpha1.MachineStateFailed, "", text)
	p.cautionf("HealthTimeout", "%s", text)

	return wait, nil
}

func (p *pass) healthTimeout() time.Duration {
	if d := p.machine.Spec.MachineHealthTimeout; d != nil {
		return d.Duration
	}

	return p.Settings.HealthTimeout
}
