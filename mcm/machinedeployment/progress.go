package machinedeployment

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// conditionOf returns a condition to read and write; nil when there is none.
func conditionOf(s *v1alpha1.MachineDeploymentStatus, kind v1alpha1.MachineDeploymentConditionType) *v1alpha1.MachineDeploymentCondition {
	for i := range s.Conditions {
		if s.Conditions[i].Type == kind {
			return &s.Conditions[i]
		}
	}

	return nil
}

// condition sets a condition. LastUpdateTime is that of the last call, since the
// progress deadline runs from it.
func (p *pass) condition(
	kind v1alpha1.MachineDeploymentConditionType, status corev1.ConditionStatus, reason, message string,
) {
	now := metav1.NewTime(p.now.Truncate(time.Second))
	c := conditionOf(&p.deployment.Status, kind)
	if c == nil {
		p.deployment.Status.Conditions = append(p.deployment.Status.Conditions, v1alpha1.MachineDeploymentCondition{Type: kind})
		c = &p.deployment.Status.Conditions[len(p.deployment.Status.Conditions)-1]
	}
	if c.Status != status {
		c.LastTransitionTime = now
	}
	c.Status, c.Reason, c.Message, c.LastUpdateTime = status, reason, message, now
}

func (p *pass) progress(status corev1.ConditionStatus, reason, message string) {
	p.condition(v1alpha1.MachineDeploymentProgressing, status, reason, message)
}

// followProgress says in the condition Progressing how the rollout goes, compared
// with the status that is stored. A rollout that stands still, and a deployment
// that cannot be scaled, name the machine that is to blame.
func (p *pass) followProgress() {
	switch current := conditionOf(&p.deployment.Status, v1alpha1.MachineDeploymentProgressing); {
	case p.tellsPause(current):
		return
	case p.created != "":
		p.tellBegin()
	case p.fault != "":
		p.faulty()
	case p.latest == nil && !p.oldMachines():
		return // it is about to be made
	case p.complete():
		p.completed(current)
	default:
		p.underWay(current)
	}
	p.awaitDeadline()
}

// tellsPause tells whether the condition is to say that the deployment is paused, and
// nothing else.
func (p *pass) tellsPause(current *v1alpha1.MachineDeploymentCondition) bool {
	return p.deployment.Spec.Paused && (current == nil || current.Reason != v1alpha1.ReasonProgressDeadlineExceeded)
}

// tellBegin says that a rollout to the latest set has begun.
func (p *pass) tellBegin() {
	if p.created != "" {
		p.progress(corev1.ConditionTrue, v1alpha1.ReasonNewMachineSetCreated, fmt.Sprintf("Created new machine set %q", p.created))
	} else {
		p.progress(corev1.ConditionTrue, v1alpha1.ReasonFoundNewMachineSet, fmt.Sprintf("Found new machine set %q", p.latest.Name))
	}
}

// tellError adds the error that the pass met to what the condition Progressing
// says, in place of an earlier one. It is no word on the progress.
func (p *pass) tellError(err error) {
	current := conditionOf(&p.deployment.Status, v1alpha1.MachineDeploymentProgressing)
	if current == nil || p.fault != "" { // which says it
		return
	}
	current.Message, _, _ = strings.Cut(current.Message, v1alpha1.MessageLastError)
	if err != nil {
		current.Message += v1alpha1.MessageLastError + v1alpha1.ShortText(strings.ReplaceAll(err.Error(), "\n", "; "))
	}
}

// faulty says why the set could not be made, and since when: the same again is no
// news.
func (p *pass) faulty() {
	current := conditionOf(&p.deployment.Status, v1alpha1.MachineDeploymentProgressing)
	if current == nil || current.Reason != v1alpha1.ReasonMachineSetCreateError || current.Message != p.fault {
		p.progress(corev1.ConditionFalse, v1alpha1.ReasonMachineSetCreateError, p.fault)
	}
}

func (p *pass) completed(current *v1alpha1.MachineDeploymentCondition) {
	message := p.subject() + " has successfully progressed."
	switch {
	case current == nil || current.Reason != v1alpha1.ReasonNewMachineSetAvailable || current.Status != corev1.ConditionTrue:
		p.progress(corev1.ConditionTrue, v1alpha1.ReasonNewMachineSetAvailable, message)
	default:
		current.Message = message
	}
}

// underWay is for a deployment that is not where it is to be.
func (p *pass) underWay(current *v1alpha1.MachineDeploymentCondition) {
	status := &p.deployment.Status
	begins := p.begins(current)
	var message string
	switch {
	case rolledOut(current) && p.onlyScaled():
		message = p.subject() + " has successfully progressed."
	case begins && p.latest == nil:
		message = p.subject() + " is progressing."
		p.progress(corev1.ConditionTrue, v1alpha1.ReasonMachineSetUpdated, message)
	case begins:
		p.tellBegin()
		message = conditionOf(status, v1alpha1.MachineDeploymentProgressing).Message
	case p.advanced() || current.Reason == v1alpha1.ReasonMachineSetCreateError || current.Reason == v1alpha1.ReasonInvalidSpec:
		message = p.subject() + " is progressing."
		p.progress(corev1.ConditionTrue, v1alpha1.ReasonMachineSetUpdated, message)
	case p.overdue(current):
		message = p.subject() + " has timed out progressing."
		if current.Reason != v1alpha1.ReasonProgressDeadlineExceeded {
			p.progress(corev1.ConditionFalse, v1alpha1.ReasonProgressDeadlineExceeded, message)
		}
	default:
		message = p.standing(current)
	}
	current = conditionOf(status, v1alpha1.MachineDeploymentProgressing)
	if why := p.holdups(); why != "" {
		message += " " + why
	}
	current.Message = message
}

// begins tells whether this is the first that the condition says of a rollout.
func (p *pass) begins(current *v1alpha1.MachineDeploymentCondition) bool {
	return current == nil || rolledOut(current) || p.turned
}

// rolledOut tells whether the last rollout was told to be complete.
func rolledOut(current *v1alpha1.MachineDeploymentCondition) bool {
	return current != nil && current.Reason == v1alpha1.ReasonNewMachineSetAvailable
}

// onlyScaled tells whether all machines are of the latest set: that is no rollout.
func (p *pass) onlyScaled() bool {
	status := &p.deployment.Status

	return p.latest != nil && status.Replicas == status.UpdatedReplicas && !p.oldMachines()
}

// advanced tells whether the machines have come nearer to what they are to be.
func (p *pass) advanced() bool {
	before, now := &p.stored.Status, &p.deployment.Status

	return now.UpdatedReplicas > before.UpdatedReplicas ||
		now.Replicas-now.UpdatedReplicas < before.Replicas-before.UpdatedReplicas ||
		now.ReadyReplicas > before.ReadyReplicas || now.AvailableReplicas > before.AvailableReplicas
}

// standing is what the condition says without the machine that was to blame.
func (p *pass) standing(current *v1alpha1.MachineDeploymentCondition) string {
	switch {
	case p.latest == nil:
	case current.Reason == v1alpha1.ReasonNewMachineSetCreated:
		return fmt.Sprintf("Created new machine set %q", p.latest.Name)
	case current.Reason == v1alpha1.ReasonFoundNewMachineSet:
		return fmt.Sprintf("Found new machine set %q", p.latest.Name)
	case current.Reason == v1alpha1.ReasonDeploymentResumed:
		return "Deployment is resumed"
	}

	return p.subject() + " is progressing."
}

// subject is who a message is about: the latest set, or what goes before it.
func (p *pass) subject() string {
	if p.latest == nil {
		return "Removal of the earlier machine sets' machines"
	}

	return fmt.Sprintf("MachineSet %q", p.latest.Name)
}

// overdue tells whether there was no progress for too long.
func (p *pass) overdue(current *v1alpha1.MachineDeploymentCondition) bool {
	return current.Reason == v1alpha1.ReasonProgressDeadlineExceeded ||
		p.deployment.Spec.ProgressDeadlineSeconds != nil && p.left(current) <= 0
}

// left is the time until the progress deadline.
func (p *pass) left(current *v1alpha1.MachineDeploymentCondition) time.Duration {
	deadline := time.Duration(*p.deployment.Spec.ProgressDeadlineSeconds) * time.Second

	return current.LastUpdateTime.Add(deadline).Sub(p.now)
}

// awaitDeadline has a deployment looked at when a rollout without progress would
// be overdue.
func (p *pass) awaitDeadline() {
	current := conditionOf(&p.deployment.Status, v1alpha1.MachineDeploymentProgressing)
	if current == nil || p.deployment.Spec.ProgressDeadlineSeconds == nil || current.Reason == v1alpha1.ReasonNewMachineSetAvailable ||
		p.overdue(current) {
		return
	}
	p.lookAgain(p.left(current))
}
