package machine

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// joinToken is the bootstrap token with which a machine's Node joins.
type joinToken struct {
	*object
	node   *machineNode
	tokens Tokens // nil for none
}

// spendToken deletes the token of a machine that has joined, in time or not, and with
// or without its critical components: it is not needed any more. A failure does not
// hold the machine up once it is journaled for the next leader; unspent is that failure.
func (t *joinToken) spendToken(ctx context.Context) (unspent, err error) {
	if t.tokens == nil || t.node.found == nil || !isReady(t.node.found.Status.Conditions) {
		return nil, nil
	}
	phase := t.machine.Status.CurrentStatus.Phase
	if phase != v1alpha1.MachinePending && phase != v1alpha1.MachineFailed && !t.journal.Token {
		return nil, nil
	}
	unspent = t.deleteToken(ctx)
	if t.journal.Token == (unspent != nil) {
		return unspent, nil
	}
	t.journal.Token = unspent != nil

	return unspent, t.patch(ctx)
}

// deleteToken deletes the machine's token. Where mcm may not, the token is left to
// expire.
func (t *joinToken) deleteToken(ctx context.Context) error {
	err := t.tokens.Delete(ctx, t.machine)
	if !apierrors.IsForbidden(err) {
		return err
	}
	t.log.Info("bootstrap token is left to expire", "err", err.Error())
	t.warnf("TokenLeft", "The bootstrap token of this machine, if it has one, stays usable until it expires, as mcm may not delete it: %s; "+
		"allow mcm to get and delete Secrets in kube-system of the target cluster", fault(err))

	return nil
}

// withdrawToken deletes the token of a machine that goes without having joined.
// Nothing can ask for another one any more: no operation of it is under way. One that
// is being made at this moment is deleted by its maker.
func (t *joinToken) withdrawToken(ctx context.Context) error {
	spent := isReady(t.machine.Status.Conditions)
	if t.tokens == nil || spent && !t.journal.Token {
		return nil
	}

	return t.deleteToken(ctx)
}

// isReady reports whether a Node with these conditions is Ready.
func isReady(conditions []corev1.NodeCondition) bool {
	return slices.ContainsFunc(conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}
