package machinedeployment

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// followPause says in the condition that the deployment was paused or resumed.
// That a rollout made no progress stays said.
func (p *pass) followPause(context.Context) (bool, error) {
	current := conditionOf(&p.deployment.Status, v1alpha1.MachineDeploymentProgressing)
	if current != nil && current.Reason == v1alpha1.ReasonProgressDeadlineExceeded {
		return true, nil
	}
	pausedBefore := current != nil && current.Reason == v1alpha1.ReasonDeploymentPaused
	switch {
	case p.deployment.Spec.Paused && !pausedBefore:
		p.progress(corev1.ConditionUnknown, v1alpha1.ReasonDeploymentPaused, "Deployment is paused")
	case !p.deployment.Spec.Paused && pausedBefore:
		p.progress(corev1.ConditionUnknown, v1alpha1.ReasonDeploymentResumed, "Deployment is resumed")
	}

	return true, nil
}
