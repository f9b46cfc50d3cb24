package machine

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// initializeInstance has done what must follow creation, by drivers that know
// of any such thing.
func (p *pass) initializeInstance(ctx context.Context) (next, error) {
	if !p.creating() || p.initialized {
		return proceed, nil
	}
	state, n, err := p.operate(ctx, dispatch.Initialize)
	if n.stop || err != nil {
		return n, err
	}
	if state.Err != nil && dispatch.CodeOf(state.Err) != dispatch.Unimplemented {
		return p.initializeFailed(ctx, state)
	}
	if state.LastKnownState != "" {
		p.remember(state)
	}
	if state.Err == nil { // and not only because the driver knows of no such thing
		p.initTook = &state.Took
	}

	return proceed, p.described(ctx, state.Instance)
}

// described stores what a driver says of an instance that was there before its
// machine: adopting it was guesswork.
func (p *pass) described(ctx context.Context, i *dispatch.Instance) error {
	switch {
	case i == nil:
	case p.Target == nil:
		p.machine.Status.Addresses = addresses(i)
	case i.NodeName != "":
		metav1.SetMetaDataLabel(&p.machine.ObjectMeta, v1alpha1.LabelKeyNode, i.NodeName)
	}

	return p.patch(ctx)
}

func (p *pass) initializeFailed(ctx context.Context, state dispatch.State) (next, error) {
	if state.LastKnownState != "" {
		p.remember(state)
	}
	p.failCreation(state.Err, v1alpha1.InitializeFailedText)

	return p.failed(ctx, state, "FailedInitialize", p.Settings.Retry.Short)
}

// markCreated notes that the instance is there, which settles its
// initialization: the phase says so, and saves a write to the journal.
func (p *pass) markCreated(ctx context.Context) (next, error) {
	if !p.creating() {
		return proceed, nil
	}
	if p.Target == nil {
		p.setPhase(v1alpha1.MachineAvailable)
		p.setLastOperation(v1alpha1.MachineOperationCreate, v1alpha1.MachineStateSuccessful, "", v1alpha1.TextCreated)
	} else {
		p.setPhase(v1alpha1.MachinePending)
		p.setLastOperation(v1alpha1.MachineOperationCreate, v1alpha1.MachineStateProcessing, "", v1alpha1.TextCreating)
	}
	if err := p.patchStatus(ctx); err != nil {
		return wait, err
	}
	if p.initTook != nil {
		p.timings.observe(p.kind(ctx), stageInitialize, *p.initTook)
	}
	if p.journal.Operation == dispatch.Initialize {
		p.Dispatcher.Settle(p.machine.UID, dispatch.OperationID(p.machine.UID, dispatch.Initialize, p.journal.Settled))
	}

	return proceed, nil
}
