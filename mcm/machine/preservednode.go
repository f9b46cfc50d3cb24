package machine

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/drain"
)

var preservedTaint = corev1.Taint{Key: v1alpha1.TaintKeyPreserved, Effect: corev1.TaintEffectNoSchedule}

// preserveNode keeps the cluster-autoscaler off the Node of a preserved machine,
// and pods off it while the machine is Failed, and shows that in a condition.
func (p *preservation) preserveNode(ctx context.Context, until time.Time) error {
	if p.node.found == nil || !p.node.found.DeletionTimestamp.IsZero() {
		return nil
	}
	failed := p.machine.Status.CurrentStatus.Phase == v1alpha1.MachineFailed
	err := p.node.changeNode(ctx, func(node *corev1.Node) {
		v1alpha1.KeepFromScaleDown(node, true)
		taintPreserved(node, failed)
	})
	if err != nil {
		return err
	}
	before := ""
	if c := p.node.preservedCondition(); c != nil && c.Status == corev1.ConditionTrue {
		before = c.Message
	}
	message := ""
	if failed {
		message = p.drainPreserved(before)
	} else if p.drainer != nil {
		p.drainer.Forget(p.machine.UID) // the pods that are left may stay
	}
	message = strings.TrimSpace(message + " " + fmt.Sprintf(v1alpha1.MessageFormatPreservedUntil, until.UTC()))
	reason := v1alpha1.ReasonPreservedByUser
	if p.wish == v1alpha1.PreserveAuto {
		reason = v1alpha1.ReasonPreservedByMCM
	}

	if err := p.node.setPreserved(ctx, corev1.ConditionTrue, reason, message); err != nil {
		return err
	}
	if drained := v1alpha1.MessagePreservedDrained; strings.HasPrefix(message, drained) && !strings.HasPrefix(before, drained) {
		p.sayf("Drained", "Node %s is drained, and kept", p.node.found.Name)
	}

	return nil
}

// drainPreserved has the pods of a Failed machine's Node evicted, and returns the start
// of the condition's message. Before is the message so far.
func (p *preservation) drainPreserved(before string) string {
	if strings.HasPrefix(before, v1alpha1.MessagePreservedDrained) {
		return v1alpha1.MessagePreservedDrained
	}
	if p.drainer == nil {
		return ""
	}
	// The time to drain begins when the machine is both, preserved and Failed.
	since := p.now
	if c := p.node.preservedCondition(); before != "" {
		since = c.LastTransitionTime.Time
	}
	if t := p.machine.Status.CurrentStatus.LastUpdateTime.Time; t.After(since) {
		since = t
	}
	req, after := p.settings.DrainPolicy.StayRequest(p.machine, p.node.found, since, p.now)
	state := p.drainer.Start(req)
	if state.Phase == drain.Done && state.Err != nil {
		left := state.Ended.Add(p.settings.Retry.Short).Sub(p.now)
		if left > 0 {
			p.warnPreservedDrain("FailedDrain", fmt.Sprintf("Node %s of a preserved machine could not be drained, next try in %s: %v",
				p.node.found.Name, p.settings.Retry.Short, state.Err))
			p.LookAgain(left)

			return v1alpha1.MessagePreservedNotDrained
		}
		p.drainer.Forget(req.UID)
		state = p.drainer.Start(req)
	}
	if state.Phase == drain.Done {
		return v1alpha1.MessagePreservedDrained
	}
	if state.Blocked {
		p.warnPreservedDrain("DrainHeldUp", state.Reason)
	}
	if after > 0 {
		p.LookAgain(after)
	}
	if strings.HasPrefix(before, v1alpha1.MessagePreservedNotDrained) {
		return v1alpha1.MessagePreservedNotDrained // until there is more to say
	}

	return ""
}

// warnPreservedDrain says once what a drain of a preserved machine waits for. The
// machine's last operation keeps telling why it Failed.
func (p *preservation) warnPreservedDrain(reason, text string) {
	if p.isNews(aboutPreserveWait, text) {
		p.warnf(reason, "%s", text)
	}
}

// releaseNode takes back what preserveNode did, if it did. To forget is to remove
// the wish from the Node, too; released is false until that was seen to be gone: its
// event starts the next pass, and the machine would be preserved again before.
func (p *preservation) releaseNode(ctx context.Context, forget bool) (released bool, err error) {
	if p.node.found == nil || !p.node.found.DeletionTimestamp.IsZero() {
		return true, nil
	}
	_, wished := p.node.found.Annotations[v1alpha1.AnnotationKeyPreserve]
	forget = forget && wished
	c := p.node.preservedCondition()
	shown := c != nil && c.Status == corev1.ConditionTrue
	timed := p.machine.Status.CurrentStatus.PreserveExpiryTime != nil
	if !shown && !timed && !slices.ContainsFunc(p.node.found.Spec.Taints, isPreservedTaint) && !forget {
		return true, nil // as most are
	}
	err = p.node.changeNode(ctx, func(node *corev1.Node) {
		if shown || timed { // or the annotations are a rollout's
			v1alpha1.KeepFromScaleDown(node, false)
		}
		taintPreserved(node, false)
		if forget {
			delete(node.Annotations, v1alpha1.AnnotationKeyPreserve)
		}
	})
	if err == nil && shown {
		err = p.node.setPreserved(ctx, corev1.ConditionFalse, v1alpha1.ReasonPreservationStopped, "")
	}

	return !forget, err
}

func isPreservedTaint(t corev1.Taint) bool { return preservedTaint.MatchTaint(&t) }

func taintPreserved(node *corev1.Node, on bool) {
	switch has := slices.ContainsFunc(node.Spec.Taints, isPreservedTaint); {
	case on && !has:
		node.Spec.Taints = append(node.Spec.Taints, preservedTaint)
	case !on && has:
		node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, isPreservedTaint)
	}
}

// preservedCondition is the Node's condition, nil when it has none.
func (n *machineNode) preservedCondition() *corev1.NodeCondition {
	i := slices.IndexFunc(n.found.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == v1alpha1.NodePreserved })
	if i < 0 {
		return nil
	}

	return &n.found.Status.Conditions[i]
}

// setPreserved sets the Node's condition if it says something new.
func (n *machineNode) setPreserved(ctx context.Context, status corev1.ConditionStatus, reason, message string) error {
	want := corev1.NodeCondition{
		Type: v1alpha1.NodePreserved, Status: status, Reason: reason, Message: message,
		LastHeartbeatTime: metav1.NewTime(n.now), LastTransitionTime: metav1.NewTime(n.now),
	}
	node := n.found.DeepCopy()
	if has := n.preservedCondition(); has == nil {
		node.Status.Conditions = append(node.Status.Conditions, want)
	} else {
		if has.Status == status && has.Reason == reason && has.Message == message {
			return nil
		}
		if has.Status == status {
			want.LastTransitionTime = has.LastTransitionTime
		}
		i := slices.IndexFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == want.Type })
		node.Status.Conditions[i] = want
	}
	// A strategic merge leaves the other conditions, which the kubelet writes.
	patch := client.StrategicMergeFrom(n.found, client.MergeFromWithOptimisticLock{})
	if err := n.target.Status().Patch(ctx, node, patch); err != nil {
		return fmt.Errorf("set condition %s of node %s: %w", v1alpha1.NodePreserved, node.Name, err)
	}
	n.found = node

	return nil
}
