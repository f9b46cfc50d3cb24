package machine

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/drain"
)

var preservedTaint = corev1.Taint{Key: v1alpha1.TaintKeyPreserved, Effect: corev1.TaintEffectNoSchedule}

// preserveNode keeps the cluster-autoscaler off the Node of a preserved machine,
// and pods off it while the machine is Failed, and tells all that in a condition.
func (p *pass) preserveNode(ctx context.Context, until time.Time) error {
	if p.node == nil || !p.node.DeletionTimestamp.IsZero() {
		return nil
	}
	failed := p.machine.Status.CurrentStatus.Phase == v1alpha1.MachineFailed
	err := p.changeNode(ctx, func(node *corev1.Node) {
		v1alpha1.KeepFromScaleDown(node, true)
		taintPreserved(node, failed)
	})
	if err != nil {
		return err
	}
	told := ""
	if c := p.preservedCondition(); c != nil && c.Status == corev1.ConditionTrue {
		told = c.Message
	}
	message := ""
	if failed {
		message = p.drainPreserved(told)
	} else if p.Drainer != nil {
		p.Drainer.Forget(p.machine.UID) // the pods that are left may stay
	}
	message = strings.TrimSpace(message + " " + fmt.Sprintf(v1alpha1.MessageFormatPreservedUntil, until.UTC()))
	reason := v1alpha1.ReasonPreservedByUser
	if p.wish == v1alpha1.PreserveAuto {
		reason = v1alpha1.ReasonPreservedByMCM
	}

	if err := p.setPreserved(ctx, corev1.ConditionTrue, reason, message); err != nil {
		return err
	}
	if drained := v1alpha1.MessagePreservedDrained; strings.HasPrefix(message, drained) && !strings.HasPrefix(told, drained) {
		p.sayf("Drained", "Node %s is drained, and kept", p.node.Name)
	}

	return nil
}

// drainPreserved has the pods of a Failed machine's Node evicted, and returns what
// the condition is to begin with. Told is the condition's message of before.
func (p *pass) drainPreserved(told string) string {
	if strings.HasPrefix(told, v1alpha1.MessagePreservedDrained) {
		return v1alpha1.MessagePreservedDrained
	}
	if p.Drainer == nil {
		return ""
	}
	// The time to drain begins when the machine is both, preserved and Failed.
	since := p.now
	if c := p.preservedCondition(); told != "" {
		since = c.LastTransitionTime.Time
	}
	if t := p.machine.Status.CurrentStatus.LastUpdateTime.Time; t.After(since) {
		since = t
	}
	req, after := p.Settings.DrainPolicy.StayRequest(p.machine, p.node, since, p.now)
	state := p.Drainer.Start(req)
	if state.Phase == drain.Done && state.Err != nil {
		left := state.Ended.Add(p.Settings.Retry.Short).Sub(p.now)
		if left > 0 {
			p.tellPreserveWait("FailedDrain", fmt.Sprintf("Node %s of a preserved machine could not be drained, next try in %s: %v",
				p.node.Name, p.Settings.Retry.Short, state.Err))
			p.lookAgain(left)

			return v1alpha1.MessagePreservedNotDrained
		}
		p.Drainer.Forget(req.UID)
		state = p.Drainer.Start(req)
	}
	if state.Phase == drain.Done {
		return v1alpha1.MessagePreservedDrained
	}
	if state.Held {
		p.tellPreserveWait("DrainHeldUp", state.Reason)
	}
	if after > 0 {
		p.lookAgain(after)
	}
	if strings.HasPrefix(told, v1alpha1.MessagePreservedNotDrained) {
		return v1alpha1.MessagePreservedNotDrained // until there is more to say
	}

	return ""
}

// tellPreserveWait says once what a drain of a preserved machine waits for. The
// machine's last operation keeps telling why it Failed.
func (p *pass) tellPreserveWait(reason, text string) {
	if p.news(aboutPreserveWait, text) {
		p.warnf(reason, "%s", text)
	}
}

// releaseNode takes back what preserveNode did, if it did. To forget is to remove
// the wish from the Node, too; released is false until that was seen to be gone: its
// event starts the next pass, and the machine would be preserved anew before.
func (p *pass) releaseNode(ctx context.Context, forget bool) (released bool, err error) {
	if p.node == nil || !p.node.DeletionTimestamp.IsZero() {
		return true, nil
	}
	_, wished := p.node.Annotations[v1alpha1.AnnotationKeyPreserve]
	forget = forget && wished
	c := p.preservedCondition()
	told := c != nil && c.Status == corev1.ConditionTrue
	timed := p.machine.Status.CurrentStatus.PreserveExpiryTime != nil
	if !told && !timed && !slices.ContainsFunc(p.node.Spec.Taints, isPreservedTaint) && !forget {
		return true, nil // as most are
	}
	err = p.changeNode(ctx, func(node *corev1.Node) {
		if told || timed { // or the annotations are a rollout's
			v1alpha1.KeepFromScaleDown(node, false)
		}
		taintPreserved(node, false)
		if forget {
			delete(node.Annotations, v1alpha1.AnnotationKeyPreserve)
		}
	})
	if err == nil && told {
		err = p.setPreserved(ctx, corev1.ConditionFalse, v1alpha1.ReasonPreservationStopped, "")
	}

	return !forget, err
}

// changeNode stores a change of the Node, provided that nobody else has changed it.
func (p *pass) changeNode(ctx context.Context, change func(*corev1.Node)) error {
	node := p.node.DeepCopy()
	change(node)
	if equality.Semantic.DeepEqual(node, p.node) {
		return nil
	}
	err := p.Target.Patch(ctx, node, client.MergeFromWithOptions(p.node, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		return fmt.Errorf("store node %s: %w", node.Name, err)
	}
	p.node = node

	return nil
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
func (p *pass) preservedCondition() *corev1.NodeCondition {
	i := slices.IndexFunc(p.node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == v1alpha1.NodePreserved })
	if i < 0 {
		return nil
	}

	return &p.node.Status.Conditions[i]
}

// setPreserved sets the Node's condition if it says something new.
func (p *pass) setPreserved(ctx context.Context, status corev1.ConditionStatus, reason, message string) error {
	want := corev1.NodeCondition{
		Type: v1alpha1.NodePreserved, Status: status, Reason: reason, Message: message,
		LastHeartbeatTime: metav1.NewTime(p.now), LastTransitionTime: metav1.NewTime(p.now),
	}
	node := p.node.DeepCopy()
	if has := p.preservedCondition(); has == nil {
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
	patch := client.StrategicMergeFrom(p.node, client.MergeFromWithOptimisticLock{})
	if err := p.Target.Status().Patch(ctx, node, patch); err != nil {
		return fmt.Errorf("set condition %s of node %s: %w", v1alpha1.NodePreserved, node.Name, err)
	}
	p.node = node

	return nil
}
