package machineset_test

import (
	"context"
	"errors"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// play plays a machine controller until the test ends: machines get a finalizer
// and are Running; those being deleted are Terminating, and then gone. It leaves
// alone what a test made of a machine's phase.
func (r *rig) play(t *testing.T) {
	t.Helper()
	done := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			list := &v1alpha1.MachineList{}
			err := r.List(ctx, list, client.InNamespace(r.namespace))
			for i := range list.Items {
				err = errors.Join(err, r.playOne(ctx, &list.Items[i]))
			}
			if err != nil && ctx.Err() == nil {
				t.Error("machine controller:", err)
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	}()
}

func (r *rig) playOne(ctx context.Context, m *v1alpha1.Machine) error {
	before := m.DeepCopy()
	status := client.MergeFrom(before)
	var err error
	switch phase := m.Status.CurrentStatus.Phase; {
	case !m.DeletionTimestamp.IsZero() && phase != v1alpha1.MachineTerminating:
		m.Status.CurrentStatus = v1alpha1.CurrentStatus{Phase: v1alpha1.MachineTerminating, LastUpdateTime: metav1.Now()}
		err = r.Status().Patch(ctx, m, status)
	case !m.DeletionTimestamp.IsZero():
		controllerutil.RemoveFinalizer(m, v1alpha1.FinalizerName)
		err = r.Patch(ctx, m, client.MergeFrom(before))
	case controllerutil.AddFinalizer(m, v1alpha1.FinalizerName):
		err = r.Patch(ctx, m, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	case phase == v1alpha1.MachinePhaseNew:
		m.Status.CurrentStatus = v1alpha1.CurrentStatus{Phase: v1alpha1.MachineRunning, LastUpdateTime: metav1.Now()}
		err = r.Status().Patch(ctx, m, status)
	}
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsInvalid(err) {
		return nil // it was deleted meanwhile; next time
	}

	return err
}
