package machine

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/steps"
)

// initializeInstance has done what must follow creation, by drivers that know
// of any such thing.
func (c *creation) initializeInstance(ctx context.Context) (steps.Next, error) {
	if !c.creating() || c.initialized {
		return steps.Proceed, nil
	}
	state, n, err := c.ops.runOperation(ctx, dispatch.Initialize)
	if n.Stop || err != nil {
		return n, err
	}
	if state.Err != nil && dispatch.CodeOf(state.Err) != dispatch.Unimplemented {
		return c.initializeFailed(ctx, state)
	}
	if state.LastKnownState != "" {
		c.ops.keepDriverState(state)
	}
	if state.Err == nil { // and not only because the driver knows of no such thing
		c.initTook = &state.Took
	}

	return steps.Proceed, c.storeDescription(ctx, state.Instance)
}

// storeDescription stores what a driver says of an instance that was there before its
// machine: adopting it was guesswork.
func (c *creation) storeDescription(ctx context.Context, i *dispatch.Instance) error {
	switch {
	case i == nil:
	case c.target == nil:
		c.machine.Status.Addresses = addresses(i)
	case i.NodeName != "":
		metav1.SetMetaDataLabel(&c.machine.ObjectMeta, v1alpha1.LabelKeyNode, i.NodeName)
	}

	return c.patch(ctx)
}

func (c *creation) initializeFailed(ctx context.Context, state dispatch.State) (steps.Next, error) {
	if state.LastKnownState != "" {
		c.ops.keepDriverState(state)
	}
	c.failCreation(state.Err, v1alpha1.InitializeFailedText)

	return c.ops.operationFailed(ctx, state, "FailedInitialize", c.settings.Retry.Short)
}

// markCreated notes that the instance is there, which settles its
// initialization: the phase says so, and saves a write to the journal.
func (c *creation) markCreated(ctx context.Context) (steps.Next, error) {
	if !c.creating() {
		return steps.Proceed, nil
	}
	if c.target == nil {
		c.setPhase(v1alpha1.MachineAvailable)
		c.setLastOperation(v1alpha1.MachineOperationCreate, v1alpha1.MachineStateSuccessful, "", v1alpha1.TextCreated)
	} else {
		c.setPhase(v1alpha1.MachinePending)
		c.setLastOperation(v1alpha1.MachineOperationCreate, v1alpha1.MachineStateProcessing, "", v1alpha1.TextCreating)
	}
	if err := c.patchStatus(ctx); err != nil {
		return steps.Wait, err
	}
	if c.initTook != nil {
		c.timings.observe(c.class.metricsKind(ctx), stageInitialize, *c.initTook)
	}
	if c.journal.Operation == dispatch.Initialize {
		c.dispatcher.Settle(c.machine.UID, dispatch.OperationID(c.machine.UID, dispatch.Initialize, c.journal.Settled))
	}

	return steps.Proceed, nil
}
