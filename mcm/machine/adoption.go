package machine

import (
	"cmp"
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/steps"
)

// findInstance asks for the instance of a machine that came with one, or that
// another manager has started to make: a machine without a journal that is not new.
// The create of all others finds what there is by the machine's uid.
func (c *creation) findInstance(ctx context.Context) (steps.Next, error) {
	m := c.machine
	if !c.creating() || c.isNew() || c.journal.Settled > 0 || c.journal.Operation != "" {
		return steps.Proceed, nil
	}
	state, n, err := c.inquiry.askForInstance(ctx)
	if n.Stop || err != nil {
		return n, err
	}
	switch code := dispatch.CodeOf(state.Err); code {
	case dispatch.OK, dispatch.Uninitialized:
		c.initialized = code == dispatch.OK

		return c.adoptInstance(ctx, state.Instance)
	case dispatch.NotFound, dispatch.Unimplemented:
		if m.Spec.ProviderID == "" {
			return steps.Proceed, nil
		}

		return c.adoptInstance(ctx, nil) // who gave it its instance must know
	default:
		c.failCreation(state.Err, v1alpha1.CreateFailedText)

		return c.inquiry.retryLater(ctx, state, c.settings.Retry.create(code))
	}
}

// adoptInstance gives a machine that came with an instance what a created one has. The
// driver's word on the instance, nil for none, wins over what the machine says.
func (c *creation) adoptInstance(ctx context.Context, i *dispatch.Instance) (steps.Next, error) {
	if i == nil {
		i = &dispatch.Instance{}
	}
	m := c.machine
	m.Spec.ProviderID = cmp.Or(i.ProviderID, m.Spec.ProviderID)
	if m.Spec.ProviderID == "" {
		c.failCreation(dispatch.Errorf(dispatch.Internal, "driver of provider %s found an instance without a provider id", c.class.provider),
			v1alpha1.CreateFailedText)

		return steps.Again(c.settings.Retry.Medium), c.patchStatus(ctx)
	}
	controllerutil.AddFinalizer(m, v1alpha1.FinalizerName)
	c.setPriority()
	if c.target == nil {
		m.Status.Addresses = addresses(i)
	} else {
		metav1.SetMetaDataLabel(&m.ObjectMeta, v1alpha1.LabelKeyNode,
			cmp.Or(i.NodeName, m.Labels[v1alpha1.LabelKeyNode], m.Name))
	}
	c.journal.Provider = c.class.provider
	if m.Status.CurrentStatus.Phase == v1alpha1.MachineFailed {
		c.setPhase(v1alpha1.MachineCrashLoopBackOff) // as in created
	}
	if !c.initialized {
		m.Status.Conditions = nil
	}
	if err := c.patchStatus(ctx); err != nil {
		return steps.Wait, err
	}
	if !c.initialized {
		c.ops.beginOperation(dispatch.Initialize)
	}
	c.sayAfterWritef("Adopted", "Takes over the instance %s", m.Spec.ProviderID)

	return steps.Proceed, c.patch(ctx)
}
