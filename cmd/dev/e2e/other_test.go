package e2e

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// An otherController plays a machine controller that is not ours. It makes no
// instances, but says so of machines, in the words of the machine controller
// manager.
type otherController struct {
	*env

	// fail is the name of a machine whose Node is never seen again.
	fail string
}

// runUntil lets the controller work until check returns no error.
func (c *otherController) runUntil(what string, check func(context.Context) error) {
	c.Helper()
	c.eventually(what, func(ctx context.Context) error {
		var list v1alpha1.MachineList
		if err := c.kube.List(ctx, &list, client.InNamespace(c.name)); err != nil {
			return err
		}
		var errs []error
		for i := range list.Items {
			errs = append(errs, c.step(ctx, &list.Items[i]))
		}
		return errors.Join(append(errs, check(ctx))...)
	})
}

// step takes one machine one step further.
func (c *otherController) step(ctx context.Context, m *v1alpha1.Machine) error {
	before := m.DeepCopy()
	c.advance(m)
	lock := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	status := m.Status.DeepCopy()
	err := c.kube.Patch(ctx, m, lock)
	if err == nil && len(m.Finalizers) > 0 {
		stored := m.DeepCopy()
		m.Status = *status
		err = c.kube.Status().Patch(ctx, m, client.MergeFrom(stored))
	}
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // next time
	}
	return err
}

func (c *otherController) advance(m *v1alpha1.Machine) {
	set := func(phase v1alpha1.MachinePhase, kind v1alpha1.MachineOperationType, state v1alpha1.MachineState, text string) {
		m.Status.CurrentStatus = v1alpha1.CurrentStatus{
			Phase: phase, LastUpdateTime: metav1.Now(), TimeoutActive: phase == v1alpha1.MachinePending,
		}
		m.Status.LastOperation = v1alpha1.LastOperation{Type: kind, State: state, Description: text, LastUpdateTime: metav1.Now()}
	}
	last := m.Status.LastOperation.Description
	switch phase := m.Status.CurrentStatus.Phase; {
	case !m.DeletionTimestamp.IsZero() && phase != v1alpha1.MachineTerminating:
		set(v1alpha1.MachineTerminating, "Delete", "Processing", v1alpha1.DeletionTextGetVMStatus)
	case !m.DeletionTimestamp.IsZero() && last == v1alpha1.DeletionTextGetVMStatus:
		set(phase, "Delete", "Processing", v1alpha1.TextVMDeleted)
	case !m.DeletionTimestamp.IsZero():
		controllerutil.RemoveFinalizer(m, v1alpha1.FinalizerName)
	case controllerutil.AddFinalizer(m, v1alpha1.FinalizerName):
	case m.Spec.ProviderID == "":
		m.Spec.ProviderID = "elsewhere:///" + m.Name
		metav1.SetMetaDataLabel(&m.ObjectMeta, v1alpha1.LabelKeyNode, m.Name)
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.AnnotationKeyMachinePriority, v1alpha1.MachinePriorityDefault)
		set(v1alpha1.MachinePending, "Create", "Processing", v1alpha1.TextCreating)
	case phase == v1alpha1.MachinePending:
		set(v1alpha1.MachineRunning, "Create", "Successful", fmt.Sprintf(v1alpha1.TextFormatJoined, m.Name, "1m0s"))
	case phase == v1alpha1.MachineRunning && m.Name == c.fail:
		set(v1alpha1.MachineUnknown, "HealthCheck", "Processing", fmt.Sprintf(v1alpha1.TextFormatUnhealthy, m.Name, "[]"))
	case phase == v1alpha1.MachineUnknown:
		set(v1alpha1.MachineFailed, "HealthCheck", "Failed", fmt.Sprintf("Machine %s %s 10m0s", m.Name, v1alpha1.TextHealthFailing))
	}
}
