package machine

import (
	"cmp"
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// findInstance asks for the instance of a machine that came with one, or that
// another manager has begun to make: a machine without a journal that is not new.
// The create of all others finds what there is by the machine's uid.
func (p *pass) findInstance(ctx context.Context) (next, error) {
	m := p.machine
	if !p.creating() || p.isNew() || p.journal.Settled > 0 || p.journal.Operation != "" {
		return proceed, nil
	}
	state, n, err := p.ask(ctx)
	if n.stop || err != nil {
		return n, err
	}
	switch code := dispatch.CodeOf(state.Err); code {
	case dispatch.OK, dispatch.Uninitialized:
		p.initialized = code == dispatch.OK

		return p.adopt(ctx, state.Instance)
	case dispatch.NotFound, dispatch.Unimplemented:
		if m.Spec.ProviderID == "" {
			return proceed, nil
		}

		return p.adopt(ctx, nil) // who gave it its instance must know
	default:
		p.failCreation(state.Err, v1alpha1.CreateFailedText)

		return p.cannotFind(ctx, state, p.Settings.Retry.create(code))
	}
}

// isNew tells that no manager without a journal has done anything for the machine.
// Such a one first adds its finalizer, and says nothing more of a create before that
// has ended; this one adds it together with the journal.
func (p *pass) isNew() bool {
	m := p.machine
	if _, journaled := m.Annotations[v1alpha1.AnnotationKeyOperation]; journaled || m.Spec.ProviderID != "" {
		return m.Spec.ProviderID == ""
	}

	return m.Labels[v1alpha1.LabelKeyNode] == "" && m.Status.CurrentStatus.Phase == v1alpha1.MachinePhaseNew &&
		!controllerutil.ContainsFinalizer(p.stored, v1alpha1.FinalizerName)
}

// adopt gives a machine that came with an instance what a created one has. The
// driver's word on the instance, nil for none, wins over what the machine says.
func (p *pass) adopt(ctx context.Context, i *dispatch.Instance) (next, error) {
	if i == nil {
		i = &dispatch.Instance{}
	}
	m := p.machine
	m.Spec.ProviderID = cmp.Or(i.ProviderID, m.Spec.ProviderID)
	if m.Spec.ProviderID == "" {
		p.failCreation(dispatch.Errorf(dispatch.Internal, "driver of provider %s found an instance without a provider id", p.provider),
			v1alpha1.CreateFailedText)

		return again(p.Settings.Retry.Medium), p.patchStatus(ctx)
	}
	controllerutil.AddFinalizer(m, v1alpha1.FinalizerName)
	p.setPriority()
	if p.Target == nil {
		m.Status.Addresses = addresses(i)
	} else {
		metav1.SetMetaDataLabel(&m.ObjectMeta, v1alpha1.LabelKeyNode,
			cmp.Or(i.NodeName, m.Labels[v1alpha1.LabelKeyNode], m.Name))
	}
	p.journal.Provider = p.provider
	if m.Status.CurrentStatus.Phase == v1alpha1.MachineFailed {
		p.setPhase(v1alpha1.MachineCrashLoopBackOff) // as in created
	}
	if !p.initialized {
		m.Status.Conditions = nil
	}
	if err := p.patchStatus(ctx); err != nil {
		return wait, err
	}
	if !p.initialized {
		p.begin(dispatch.Initialize)
	}
	p.notef("Adopted", "Takes over the instance %s", m.Spec.ProviderID)

	return proceed, p.patch(ctx)
}

// findNode finds the name of the Node of a machine that is to go and does not
// know it, so that the Node is drained: a create may have been cut off halfway.
func (p *pass) findNode(ctx context.Context) (next, error) {
	m := p.machine
	if p.Target == nil || m.Labels[v1alpha1.LabelKeyNode] != "" || p.untouched || p.deleting() {
		return proceed, nil
	}
	nodes := &corev1.NodeList{}
	if err := p.Target.List(ctx, nodes, client.MatchingLabels{v1alpha1.LabelKeyMachineName: m.Name}); err != nil {
		return wait, fmt.Errorf("look for the node of machine %s: %w", m.Name, err)
	}
	for i := range nodes.Items {
		// A machine in another namespace may have the name, too, which the manager of
		// this one need not see.
		id, own := nodes.Items[i].Spec.ProviderID, m.Spec.ProviderID
		if id != "" && own != "" && v1alpha1.SameInstance(id, own) {
			metav1.SetMetaDataLabel(&m.ObjectMeta, v1alpha1.LabelKeyNode, nodes.Items[i].Name)

			return proceed, p.patch(ctx)
		}
	}
	if err := p.classForDelete(ctx); err != nil {
		return p.cannotDelete(ctx, err)
	}
	if p.unfoundAsThingsAre() > 0 && p.Settings.DrainPolicy.Left(m, p.now) <= 0 {
		p.cautionf("NodeUnknown", "Goes on without draining the node: the driver could not tell which it is")

		return proceed, nil
	}

	return p.askForNode(ctx)
}

// askForNode asks the driver for the name of the Node.
func (p *pass) askForNode(ctx context.Context) (next, error) {
	state, n, err := p.ask(ctx)
	if n.stop || err != nil {
		return n, err
	}
	switch code, m := dispatch.CodeOf(state.Err), p.machine; {
	case code == dispatch.OK && state.Instance != nil && state.Instance.NodeName != "":
		m.Spec.ProviderID = cmp.Or(m.Spec.ProviderID, state.Instance.ProviderID)
		metav1.SetMetaDataLabel(&m.ObjectMeta, v1alpha1.LabelKeyNode, state.Instance.NodeName)

		return proceed, p.patch(ctx)
	case code == dispatch.OK, code == dispatch.NotFound, code == dispatch.Unimplemented, code == dispatch.Uninitialized:
		return proceed, nil // what belongs to it may be there all the same, and is deleted
	case p.another(code):
		return proceed, nil // the deletion knows what to do about the class
	case transient(code):
		return p.nodeUnknown(ctx, state, p.Settings.Retry.Short)
	default:
		return p.nodeUnknown(ctx, state, p.Settings.Retry.Medium)
	}
}

// nodeUnknown stores that the driver cannot tell the machine's Node, and asks
// again as long as there is time to drain it. A driver that finds several instances
// never tells: then they are deleted all the same.
func (p *pass) nodeUnknown(ctx context.Context, state dispatch.State, retry time.Duration) (next, error) {
	code := dispatch.CodeOf(state.Err).String()
	p.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateFailed, code,
		v1alpha1.ErrorText(code, fault(state.Err))+". "+v1alpha1.DeletionTextGetVMStatus)
	if left := p.Settings.DrainPolicy.Left(p.machine, p.now); left > 0 {
		return p.cannotFind(ctx, state, min(retry, left))
	}
	p.cautionf("NodeUnknown", "Goes on without draining the node: the driver cannot tell which it is: %s", fault(state.Err))

	return proceed, p.patchStatus(ctx)
}

// A failedStatus says until when a machine's instance is not asked for again:
// passes have other causes than that, and reads have no journal. With another
// class, or for another purpose, there is no need to wait.
type failedStatus struct {
	until   time.Time
	class   string
	leaving bool
}

// ask has the driver asked for the machine's instance. It lets the step go on
// only when there is an answer.
func (p *pass) ask(ctx context.Context) (dispatch.State, next, error) {
	if d := p.unfoundAsThingsAre(); d > 0 {
		return dispatch.State{}, again(d), nil
	}
	p.unfound.Delete(p.machine.UID)
	state := p.Dispatcher.Ask(dispatch.Operation{
		Machine: p.machineFor(p.provider), Class: p.class, Provider: p.provider, Timeout: p.Settings.ReadTimeout,
	})
	if state.Phase != dispatch.Done {
		return state, wait, p.waiting(ctx, state)
	}

	return state, proceed, nil
}

// unfoundAsThingsAre is how long the last failure to find the machine's instance
// still counts; 0 when there was none.
func (p *pass) unfoundAsThingsAre() time.Duration {
	last, _ := p.unfound.Load(p.machine.UID)
	f, _ := last.(failedStatus)
	if f.class != p.version || f.leaving != p.leaving() {
		return 0
	}

	return max(0, f.until.Sub(p.now))
}

// cannotFind stores why a machine's instance is not known, which the step has put
// into the status, and asks again later.
func (p *pass) cannotFind(ctx context.Context, state dispatch.State, retry time.Duration) (next, error) {
	if own := dispatch.RetryAfter(state.Err); own > 0 {
		retry = own
	}
	if err := p.patchStatus(ctx); err != nil {
		return wait, err
	}
	p.unfound.Store(p.machine.UID, failedStatus{p.now.Add(retry), p.version, p.leaving()})
	p.warnf("FailedStatus", "%s failed with %s (driver replica %s), next try in %s: %s", state.Kind,
		dispatch.CodeOf(state.Err), orPlain(state.Replica), retry, fault(state.Err))

	return again(retry), nil
}
