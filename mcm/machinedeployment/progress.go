package machinedeployment

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// progress writes the condition Progressing.
type progress struct {
	*ownedSets

	turned  bool   // whether the rollout under way has turned to another set
	created string // the name of the set that this pass has made
	fault   string // why no set could be made
}

// reportProgress says in the condition Progressing how the rollout goes, compared
// with the status that is stored. A rollout that stands still, and a deployment
// that cannot be scaled, name the machine that is to blame.
func (p *progress) reportProgress() {
	switch current := conditionOf(&p.deployment.Status, v1alpha1.MachineDeploymentProgressing); {
	case p.showsPause(current):
		return
	case p.created != "":
		p.reportStart()
	case p.fault != "":
		p.reportFault()
	case p.latest == nil && !p.hasOldMachines():
		return // it is about to be made
	case p.isComplete():
		p.reportCompletion(current)
	default:
		p.reportUnderWay(current)
	}
	p.awaitDeadline()
}

// showsPause reports whether the condition is to say that the deployment is paused, and
// nothing else.
func (p *progress) showsPause(current *v1alpha1.MachineDeploymentCondition) bool {
	return p.deployment.Spec.Paused && (current == nil || current.Reason != v1alpha1.ReasonProgressDeadlineExceeded)
}

// reportStart says that a rollout to the latest set has started.
func (p *progress) reportStart() {
	if p.created != "" {
		p.setProgressing(corev1.ConditionTrue, v1alpha1.ReasonNewMachineSetCreated, fmt.Sprintf("Created new machine set %q", p.created))
	} else {
		p.setProgressing(corev1.ConditionTrue, v1alpha1.ReasonFoundNewMachineSet, fmt.Sprintf("Found new machine set %q", p.latest.Name))
	}
}

// reportError adds the error that the pass met to what the condition Progressing
// says, in place of an earlier one. It says nothing about the progress.
func (p *progress) reportError(err error) {
	current := conditionOf(&p.deployment.Status, v1alpha1.MachineDeploymentProgressing)
	if current == nil || p.fault != "" { // which says it
		return
	}
	current.Message, _, _ = strings.Cut(current.Message, v1alpha1.MessageLastError)
	if err != nil {
		current.Message += v1alpha1.MessageLastError + v1alpha1.ShortText(strings.ReplaceAll(err.Error(), "\n", "; "))
	}
}

// reportFault says why the set could not be made, and since when: the same again is no
// news.
func (p *progress) reportFault() {
	current := conditionOf(&p.deployment.Status, v1alpha1.MachineDeploymentProgressing)
	if current == nil || current.Reason != v1alpha1.ReasonMachineSetCreateError || current.Message != p.fault {
		p.setProgressing(corev1.ConditionFalse, v1alpha1.ReasonMachineSetCreateError, p.fault)
	}
}

func (p *progress) reportCompletion(current *v1alpha1.MachineDeploymentCondition) {
	message := p.messageSubject() + " has successfully progressed."
	switch {
	case current == nil || current.Reason != v1alpha1.ReasonNewMachineSetAvailable || current.Status != corev1.ConditionTrue:
		p.setProgressing(corev1.ConditionTrue, v1alpha1.ReasonNewMachineSetAvailable, message)
	default:
		current.Message = message
	}
}

// reportUnderWay is for a deployment that is not where it is to be.
func (p *progress) reportUnderWay(current *v1alpha1.MachineDeploymentCondition) {
	status := &p.deployment.Status
	begins := p.startsRollout(current)
	var message string
	switch {
	case rolledOut(current) && p.onlyScaled():
		message = p.messageSubject() + " has successfully progressed."
	case begins && p.latest == nil:
		message = p.messageSubject() + " is progressing."
		p.setProgressing(corev1.ConditionTrue, v1alpha1.ReasonMachineSetUpdated, message)
	case begins:
		p.reportStart()
		message = conditionOf(status, v1alpha1.MachineDeploymentProgressing).Message
	case p.hasAdvanced() || current.Reason == v1alpha1.ReasonMachineSetCreateError || current.Reason == v1alpha1.ReasonInvalidSpec:
		message = p.messageSubject() + " is progressing."
		p.setProgressing(corev1.ConditionTrue, v1alpha1.ReasonMachineSetUpdated, message)
	case p.isOverdue(current):
		message = p.messageSubject() + " has timed out progressing."
		if current.Reason != v1alpha1.ReasonProgressDeadlineExceeded {
			p.setProgressing(corev1.ConditionFalse, v1alpha1.ReasonProgressDeadlineExceeded, message)
		}
	default:
		message = p.messageAtStandstill(current)
	}
	current = conditionOf(status, v1alpha1.MachineDeploymentProgressing)
	if why := p.describeHoldups(); why != "" {
		message += " " + why
	}
	current.Message = message
}

// startsRollout reports whether the condition has said nothing yet about the rollout.
func (p *progress) startsRollout(current *v1alpha1.MachineDeploymentCondition) bool {
	return current == nil || rolledOut(current) || p.turned
}

// rolledOut reports whether the condition says that the last rollout is complete.
func rolledOut(current *v1alpha1.MachineDeploymentCondition) bool {
	return current != nil && current.Reason == v1alpha1.ReasonNewMachineSetAvailable
}

// onlyScaled reports whether all machines are of the latest set: that is no rollout.
func (p *progress) onlyScaled() bool {
	status := &p.deployment.Status

	return p.latest != nil && status.Replicas == status.UpdatedReplicas && !p.hasOldMachines()
}

// hasAdvanced reports whether the machines have come nearer to what they are to be.
func (p *progress) hasAdvanced() bool {
	before, now := &p.stored.Status, &p.deployment.Status

	return now.UpdatedReplicas > before.UpdatedReplicas ||
		now.Replicas-now.UpdatedReplicas < before.Replicas-before.UpdatedReplicas ||
		now.ReadyReplicas > before.ReadyReplicas || now.AvailableReplicas > before.AvailableReplicas
}

// messageAtStandstill is what the condition says without the machine that was to blame.
func (p *progress) messageAtStandstill(current *v1alpha1.MachineDeploymentCondition) string {
	switch {
	case p.latest == nil:
	case current.Reason == v1alpha1.ReasonNewMachineSetCreated:
		return fmt.Sprintf("Created new machine set %q", p.latest.Name)
	case current.Reason == v1alpha1.ReasonFoundNewMachineSet:
		return fmt.Sprintf("Found new machine set %q", p.latest.Name)
	case current.Reason == v1alpha1.ReasonDeploymentResumed:
		return "Deployment is resumed"
	}

	return p.messageSubject() + " is progressing."
}

// messageSubject is the subject of a message: the latest set, or the removal of old
// machines before it is made.
func (p *progress) messageSubject() string {
	if p.latest == nil {
		return "Removal of the earlier machine sets' machines"
	}

	return fmt.Sprintf("MachineSet %q", p.latest.Name)
}

// isOverdue reports whether there was no progress for too long.
func (p *progress) isOverdue(current *v1alpha1.MachineDeploymentCondition) bool {
	return current.Reason == v1alpha1.ReasonProgressDeadlineExceeded ||
		p.deployment.Spec.ProgressDeadlineSeconds != nil && p.untilDeadline(current) <= 0
}

// untilDeadline is the time until the progress deadline.
func (p *progress) untilDeadline(current *v1alpha1.MachineDeploymentCondition) time.Duration {
	deadline := time.Duration(*p.deployment.Spec.ProgressDeadlineSeconds) * time.Second

	return current.LastUpdateTime.Add(deadline).Sub(p.now)
}

// awaitDeadline has a deployment looked at when a rollout without progress would
// be overdue.
func (p *progress) awaitDeadline() {
	current := conditionOf(&p.deployment.Status, v1alpha1.MachineDeploymentProgressing)
	if current == nil || p.deployment.Spec.ProgressDeadlineSeconds == nil || current.Reason == v1alpha1.ReasonNewMachineSetAvailable ||
		p.isOverdue(current) {
		return
	}
	p.LookAgain(p.untilDeadline(current))
}

// reportPause says in the condition that the deployment was paused or resumed. It does
// not replace the message that a rollout made no progress.
func (p *progress) reportPause(context.Context) (steps.Next, error) {
	current := conditionOf(&p.deployment.Status, v1alpha1.MachineDeploymentProgressing)
	if current != nil && current.Reason == v1alpha1.ReasonProgressDeadlineExceeded {
		return steps.Proceed, nil
	}
	pausedBefore := current != nil && current.Reason == v1alpha1.ReasonDeploymentPaused
	switch {
	case p.deployment.Spec.Paused && !pausedBefore:
		p.setProgressing(corev1.ConditionUnknown, v1alpha1.ReasonDeploymentPaused, "Deployment is paused")
	case !p.deployment.Spec.Paused && pausedBefore:
		p.setProgressing(corev1.ConditionUnknown, v1alpha1.ReasonDeploymentResumed, "Deployment is resumed")
	}

	return steps.Proceed, nil
}
