package machinedeployment

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// An object is one deployment as a pass reads, changes and stores it.
type object struct {
	steps.Schedule
	control client.Client
	events  record.EventRecorder

	deployment *v1alpha1.MachineDeployment // working copy
	stored     *v1alpha1.MachineDeployment // as the API server has it, as far as known
	now        time.Time
	log        logr.Logger
}

// patch stores what changed in the deployment outside of status, if no other writer has
// changed it since it was read.
func (o *object) patch(ctx context.Context) error {
	if equality.Semantic.DeepEqual(o.deployment.ObjectMeta, o.stored.ObjectMeta) &&
		equality.Semantic.DeepEqual(o.deployment.Spec, o.stored.Spec) {
		return nil
	}
	status := o.deployment.Status
	err := o.control.Patch(ctx, o.deployment, client.MergeFromWithOptions(o.stored, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		return fmt.Errorf("store deployment %s: %w", client.ObjectKeyFromObject(o.stored), err)
	}
	o.stored = o.deployment.DeepCopy()
	o.deployment.Status = status // the answer holds the stored one

	return nil
}

func (o *object) sayf(reason, format string, args ...any) {
	o.events.Eventf(o.stored, corev1.EventTypeNormal, reason, format, args...)
}

func (o *object) warnf(reason, format string, args ...any) {
	o.events.Eventf(o.stored, corev1.EventTypeWarning, reason, format, args...)
}

// storeStatus stores the status, if it has changed.
func (o *object) storeStatus(ctx context.Context) error {
	if equality.Semantic.DeepEqual(o.deployment.Status, o.stored.Status) {
		return nil
	}
	// The lock keeps a pass over an old copy from undoing what a later one has said.
	err := o.control.Status().Patch(ctx, o.deployment, client.MergeFromWithOptions(o.stored, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		return fmt.Errorf("store status of deployment %s: %w", client.ObjectKeyFromObject(o.stored), err)
	}
	o.stored = o.deployment.DeepCopy()

	return nil
}

// conditionOf returns a condition to read and write; nil when there is none.
func conditionOf(s *v1alpha1.MachineDeploymentStatus, kind v1alpha1.MachineDeploymentConditionType) *v1alpha1.MachineDeploymentCondition {
	for i := range s.Conditions {
		if s.Conditions[i].Type == kind {
			return &s.Conditions[i]
		}
	}

	return nil
}

// setCondition sets a condition. LastUpdateTime is that of the last call, since the
// progress deadline runs from it.
func (o *object) setCondition(
	kind v1alpha1.MachineDeploymentConditionType, status corev1.ConditionStatus, reason, message string,
) {
	now := metav1.NewTime(o.now.Truncate(time.Second))
	c := conditionOf(&o.deployment.Status, kind)
	if c == nil {
		o.deployment.Status.Conditions = append(o.deployment.Status.Conditions, v1alpha1.MachineDeploymentCondition{Type: kind})
		c = &o.deployment.Status.Conditions[len(o.deployment.Status.Conditions)-1]
	}
	if c.Status != status {
		c.LastTransitionTime = now
	}
	c.Status, c.Reason, c.Message, c.LastUpdateTime = status, reason, message, now
}

func (o *object) setProgressing(status corev1.ConditionStatus, reason, message string) {
	o.setCondition(v1alpha1.MachineDeploymentProgressing, status, reason, message)
}
