package machine

import (
	"cmp"
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/steps"
)

// findNode finds the name of the Node of a machine that is to go and does not
// know it, so that the Node is drained: a create may have been cut off halfway.
func (d *deletion) findNode(ctx context.Context) (steps.Next, error) {
	m := d.machine
	if d.target == nil || m.Labels[v1alpha1.LabelKeyNode] != "" || d.untouched || d.deletionBegan() {
		return steps.Proceed, nil
	}
	nodes := &corev1.NodeList{}
	if err := d.target.List(ctx, nodes, client.MatchingLabels{v1alpha1.LabelKeyMachineName: m.Name}); err != nil {
		return steps.Wait, fmt.Errorf("look for the node of machine %s: %w", m.Name, err)
	}
	for i := range nodes.Items {
		// A machine in another namespace may have the name, too, which the manager of
		// this one need not see.
		id, own := nodes.Items[i].Spec.ProviderID, m.Spec.ProviderID
		if id != "" && own != "" && v1alpha1.SameInstance(id, own) {
			metav1.SetMetaDataLabel(&m.ObjectMeta, v1alpha1.LabelKeyNode, nodes.Items[i].Name)

			return steps.Proceed, d.patch(ctx)
		}
	}
	if err := d.class.classForDelete(ctx); err != nil {
		return d.reportCannotDelete(ctx, err)
	}
	if d.inquiry.failureCountsFor() > 0 && d.settings.DrainPolicy.Left(m, d.now) <= 0 {
		d.warnAfterWritef("NodeUnknown", "The deletion goes on without draining the node, so its pods are not evicted: the driver did not say which node the instance has")

		return steps.Proceed, nil
	}

	return d.askForNode(ctx)
}

// askForNode asks the driver for the name of the Node.
func (d *deletion) askForNode(ctx context.Context) (steps.Next, error) {
	state, n, err := d.inquiry.askForInstance(ctx)
	if n.Stop || err != nil {
		return n, err
	}
	switch code, m := dispatch.CodeOf(state.Err), d.machine; {
	case code == dispatch.OK && state.Instance != nil && state.Instance.NodeName != "":
		m.Spec.ProviderID = cmp.Or(m.Spec.ProviderID, state.Instance.ProviderID)
		metav1.SetMetaDataLabel(&m.ObjectMeta, v1alpha1.LabelKeyNode, state.Instance.NodeName)

		return steps.Proceed, d.patch(ctx)
	case code == dispatch.OK, code == dispatch.NotFound, code == dispatch.Unimplemented, code == dispatch.Uninitialized:
		return steps.Proceed, nil // what belongs to it may be there all the same, and is deleted
	case d.class.mayRetryWithLastGood(code):
		return steps.Proceed, nil // the deletion knows what to do about the class
	case transient(code):
		return d.nodeUnknown(ctx, state, d.settings.Retry.Short)
	default:
		return d.nodeUnknown(ctx, state, d.settings.Retry.Medium)
	}
}

// nodeUnknown stores that the driver cannot name the machine's Node, and asks again as
// long as there is time to drain it. A driver that finds several instances never names
// one: they are deleted all the same.
func (d *deletion) nodeUnknown(ctx context.Context, state dispatch.State, retry time.Duration) (steps.Next, error) {
	code := dispatch.CodeOf(state.Err).String()
	d.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateFailed, code,
		v1alpha1.ErrorText(code, fault(state.Err))+". "+v1alpha1.DeletionTextGetVMStatus)
	if left := d.settings.DrainPolicy.Left(d.machine, d.now); left > 0 {
		return d.inquiry.retryLater(ctx, state, min(retry, left))
	}
	d.warnAfterWritef("NodeUnknown", "The deletion goes on without draining the node, so its pods are not evicted: the driver cannot say which node the instance has: %s", fault(state.Err))

	return steps.Proceed, d.patchStatus(ctx)
}
