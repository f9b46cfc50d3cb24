package machine

import (
	"cmp"
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// Reasons of Events about a machine whose cloud knows each name once.
const (
	EventNameTaken = "NameTaken"
	EventNameFree  = "NameFree"
)

// createInstance has the machine's instance made, unless it has one: made
// before, or given by the user as spec.providerID.
func (p *pass) createInstance(ctx context.Context) (next, error) {
	if !p.creating() {
		return proceed, nil
	}
	if p.machine.Spec.ProviderID != "" {
		return proceed, nil
	}
	state, n, err := p.operate(ctx, dispatch.Create)
	if n.stop || err != nil {
		return n, err
	}
	if state.Err == nil {
		state.Err = p.checkInstance(state.Instance)
	}
	if state.Err != nil {
		return p.createFailed(ctx, state)
	}
	if state.Stated {
		p.remember(state)
	}
	node, err := p.nodeInTheWay(ctx, state.Instance)
	if err != nil {
		return wait, err
	}
	if node != nil {
		return p.giveBack(ctx, state, node)
	}

	return proceed, p.created(ctx, state)
}

// checkInstance refuses an answer that the contract does not allow.
func (p *pass) checkInstance(instance *dispatch.Instance) error {
	switch {
	case instance == nil || instance.ProviderID == "":
		return dispatch.Errorf(dispatch.Internal, "driver of provider %s created an instance without a provider id", p.provider)
	case p.Target != nil && instance.NodeName == "":
		return dispatch.Errorf(dispatch.Internal, "driver of provider %s created instance %s without a node name",
			p.provider, instance.ProviderID)
	default:
		return nil
	}
}

// created stores what the driver made, and begins its initialization in the
// same write.
func (p *pass) created(ctx context.Context, state dispatch.State) error {
	if p.Target == nil {
		p.machine.Status.Addresses = addresses(state.Instance)
	}
	if p.machine.Status.CurrentStatus.Phase == v1alpha1.MachineFailed {
		p.setPhase(v1alpha1.MachineCrashLoopBackOff) // there is hope again, and more to be done
	}
	p.machine.Status.Conditions = nil // of no Node of this instance: see endCreation
	// Mostly nothing. It cannot be left to a later step: that may have to wait.
	if err := p.patchStatus(ctx); err != nil {
		return err
	}
	p.machine.Spec.ProviderID = state.Instance.ProviderID
	if p.Target != nil {
		metav1.SetMetaDataLabel(&p.machine.ObjectMeta, v1alpha1.LabelKeyNode, state.Instance.NodeName)
	}
	p.setPriority()
	p.journal = p.journal.settle()
	p.journal.Provider = state.Provider
	p.begin(dispatch.Initialize)
	if err := p.patch(ctx); err != nil {
		return err
	}
	p.Dispatcher.Settle(p.machine.UID, state.ID)
	p.timings.observe(p.kind(ctx), stageCreate, p.age())
	p.accept(ctx, state)
	if _, taken := p.told.LoadAndDelete(subject{p.machine.UID, aboutName}); taken {
		p.sayf(EventNameFree, "The instance that had this machine's name is gone")
	}
	p.sayf("Created", "Created instance %s in %s (driver replica %s, attempt %d)",
		state.Instance.ProviderID, state.Took.Round(time.Millisecond), orPlain(state.Replica), state.Attempt)

	return nil
}

func (p *pass) setPriority() {
	if _, ok := p.machine.Annotations[v1alpha1.AnnotationKeyMachinePriority]; !ok {
		metav1.SetMetaDataAnnotation(&p.machine.ObjectMeta, v1alpha1.AnnotationKeyMachinePriority, v1alpha1.MachinePriorityDefault)
	}
}

func orPlain(replica string) string {
	if replica == "" {
		return "without a session"
	}

	return replica
}

// addresses are the instance's, without doubles and in a fixed order.
func addresses(i *dispatch.Instance) []corev1.NodeAddress {
	all := slices.Clone(i.Addresses)
	if i.NodeName != "" {
		all = append(all, corev1.NodeAddress{Type: corev1.NodeHostName, Address: i.NodeName})
	}
	slices.SortFunc(all, func(a, b corev1.NodeAddress) int {
		return cmp.Or(cmp.Compare(a.Type, b.Type), cmp.Compare(a.Address, b.Address))
	})

	return slices.Compact(all)
}

// createFailed stores how a create failed and when it is tried again.
func (p *pass) createFailed(ctx context.Context, state dispatch.State) (next, error) {
	// What the driver remembered before belongs to a try that goes on; what another
	// one did is not for this one to end.
	code := dispatch.CodeOf(state.Err)
	ended := !transient(code) && code != dispatch.ResourceExhausted && p.journal.stateIsOf(state.Provider)
	if state.LastKnownState != "" || ended {
		p.remember(state)
	}
	p.failCreation(state.Err, v1alpha1.CreateFailedText)
	if retry := p.Settings.Retry.create(code); code == dispatch.AlreadyExists && p.news(aboutName, fault(state.Err)) {
		p.cautionf(EventNameTaken, "Another instance has this machine's name: %s; if no machine has that instance, orphan collection "+
			"deletes it after its grace period; next try in %s", fault(state.Err), retry)
	}

	return p.failed(ctx, state, "FailedCreate", p.Settings.Retry.create(code))
}

// failCreation sets phase and lastOperation for a creation that failed; the
// text's form is parsed by other tools. It tells whether that is news.
func (p *pass) failCreation(err error, text func(code, message string) string) (news bool) {
	code := dispatch.CodeOf(err)
	before := p.machine.Status.LastOperation
	p.setLastOperation(v1alpha1.MachineOperationCreate, v1alpha1.MachineStateFailed, code.String(),
		text(code.String(), fault(err)))
	phase := v1alpha1.MachineCrashLoopBackOff
	if p.age() > p.creationTimeout() {
		phase = v1alpha1.MachineFailed
	}
	p.setPhase(phase)

	return before.Description != p.machine.Status.LastOperation.Description
}
