package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestPreserve lets two machines of a set fail that preserves one. It stays until
// its time is over, which the test cuts short, and is replaced then; the other one
// is replaced at once.
func TestPreserve(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	e.startDrivers(1, manager.NATSURL, tap)
	e.createClass()
	set := e.newSet(2)
	set.Spec.AutoPreserveFailedMachineMax = new(int32(1))
	set.Spec.Template.Spec.MachineHealthTimeout = &metav1.Duration{Duration: time.Second}
	set.Spec.Template.Spec.MachinePreserveTimeout = &metav1.Duration{Duration: time.Hour}
	e.must(e.kube.Create(e.ctx(), set))
	e.waitSet(set, 2)
	names, err := e.machineNames(e.ctx())
	e.must(err)
	kept, replaced := names[0], names[1]

	e.breakNode(kept)
	e.eventually("the first one is preserved, and its node drained", func(ctx context.Context) error { return e.preserved(ctx, kept) })
	e.breakNode(replaced)
	e.eventually("the second one is replaced", func(ctx context.Context) error {
		names, err := e.machineNames(ctx)
		if err == nil && (slices.Contains(names, replaced) || len(names) != 2) {
			err = fmt.Errorf("machines are %q", names)
		}
		return errors.Join(err, e.preservedCounts(ctx, set, 1, 1))
	})
	e.must(e.preserved(e.ctx(), kept))
	e.waitEvent(kept, corev1.EventTypeNormal, "Kept until")

	m, err := e.machine(e.ctx(), kept)
	e.must(err)
	before := m.DeepCopy()
	m.Status.CurrentStatus.PreserveExpiryTime = &metav1.Time{Time: time.Now().Add(2 * time.Second)}
	e.must(e.kube.Status().Patch(e.ctx(), m, client.MergeFrom(before)))
	e.waitGone(kept)
	e.waitSet(set, 2)
	e.eventually("none is preserved", func(ctx context.Context) error { return e.preservedCounts(ctx, set, 0, 2) })
	e.wantMachinesOnly()
}

// breakNode gives a machine's Node a condition that makes it unhealthy.
func (e *env) breakNode(machine string) {
	e.Helper()
	m, err := e.machine(e.ctx(), machine)
	e.must(err)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: m.Labels[v1alpha1.LabelKeyNode]}}
	const patch = `{"status":{"conditions":[{"type":"KernelDeadlock","status":"True","reason":"Test"}]}}`
	e.must(e.kube.Status().Patch(e.ctx(), node, client.RawPatch("application/strategic-merge-patch+json", []byte(patch))))
}

// preserved returns an error unless a machine is Failed and preserved by its set,
// and its Node shows that.
func (e *env) preserved(ctx context.Context, machine string) error {
	m, err := e.machine(ctx, machine)
	if err != nil {
		return err
	}
	current := m.Status.CurrentStatus
	if current.Phase != v1alpha1.MachineFailed || current.PreserveExpiryTime == nil ||
		m.Annotations[v1alpha1.AnnotationKeyPreserve] != v1alpha1.PreserveAuto {
		return fmt.Errorf("machine has status %+v and annotations %v", current, m.Annotations)
	}
	node := &corev1.Node{}
	if err := e.kube.Get(ctx, client.ObjectKey{Name: m.Labels[v1alpha1.LabelKeyNode]}, node); err != nil {
		return err
	}
	shown := slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == v1alpha1.NodePreserved && c.Status == corev1.ConditionTrue && c.Reason == v1alpha1.ReasonPreservedByMCM &&
			strings.HasPrefix(c.Message, v1alpha1.MessagePreservedDrained)
	})
	if !shown || node.Annotations[v1alpha1.AnnotationKeyScaleDownDisabled] != "true" || node.Spec.Unschedulable {
		return fmt.Errorf("its node has conditions %+v, annotations %v, unschedulable %t",
			node.Status.Conditions, node.Annotations, node.Spec.Unschedulable)
	}
	return nil
}

// preservedCounts returns an error unless a set reports so many machines preserved
// by its choice, and ready.
func (e *env) preservedCounts(ctx context.Context, set *v1alpha1.MachineSet, preserved, ready int32) error {
	got := &v1alpha1.MachineSet{}
	if err := e.kube.Get(ctx, client.ObjectKeyFromObject(set), got); err != nil {
		return err
	}
	s := got.Status
	if n := s.AutoPreserveFailedMachineCount; n == nil || *n != preserved || s.PreservedFailedReplicas != preserved || s.ReadyReplicas != ready {
		return fmt.Errorf("status is %+v", s)
	}
	return nil
}
