package machine

import (
	"cmp"
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/steps"
)

// Reasons of Events about a machine whose cloud knows each name once.
const (
	EventNameTaken = "NameTaken"
	EventNameFree  = "NameFree"
)

// creation has a machine's instance made and made ready.
type creation struct {
	*object
	class      *machineClass
	ops        *operations
	inquiry    *inquiry
	returning  *instanceReturn
	dispatcher Dispatcher
	target     client.Client // nil without a target cluster
	timings    *timings

	initialized bool           // the driver has said so
	initTook    *time.Duration // what the driver took to initialize it, if it did so just now
}

// createInstance has the machine's instance made, unless it has one: made
// before, or given by the user as spec.providerID.
func (c *creation) createInstance(ctx context.Context) (steps.Next, error) {
	if !c.creating() {
		return steps.Proceed, nil
	}
	if c.machine.Spec.ProviderID != "" {
		return steps.Proceed, nil
	}
	state, n, err := c.ops.runOperation(ctx, dispatch.Create)
	if n.Stop || err != nil {
		return n, err
	}
	if state.Err == nil {
		state.Err = c.checkInstance(state.Instance)
	}
	if state.Err != nil {
		return c.createFailed(ctx, state)
	}
	if state.Stated {
		c.ops.keepDriverState(state)
	}
	node, err := c.returning.nodeInTheWay(ctx, state.Instance)
	if err != nil {
		return steps.Wait, err
	}
	if node != nil {
		return c.returning.beginReturn(ctx, state, node)
	}

	return steps.Proceed, c.storeInstance(ctx, state)
}

// checkInstance refuses an answer that the contract does not allow.
func (c *creation) checkInstance(instance *dispatch.Instance) error {
	switch {
	case instance == nil || instance.ProviderID == "":
		return dispatch.Errorf(dispatch.Internal, "driver of provider %s created an instance without a provider id", c.class.provider)
	case c.target != nil && instance.NodeName == "":
		return dispatch.Errorf(dispatch.Internal, "driver of provider %s created instance %s without a node name",
			c.class.provider, instance.ProviderID)
	default:
		return nil
	}
}

// storeInstance stores what the driver made, and begins its initialization in the
// same write.
func (c *creation) storeInstance(ctx context.Context, state dispatch.State) error {
	if c.target == nil {
		c.machine.Status.Addresses = addresses(state.Instance)
	}
	if c.machine.Status.CurrentStatus.Phase == v1alpha1.MachineFailed {
		c.setPhase(v1alpha1.MachineCrashLoopBackOff) // there is hope again, and more to be done
	}
	c.machine.Status.Conditions = nil // of no Node of this instance: see endCreation
	// Mostly nothing. It cannot be left to a later step: that may have to wait.
	if err := c.patchStatus(ctx); err != nil {
		return err
	}
	c.machine.Spec.ProviderID = state.Instance.ProviderID
	if c.target != nil {
		metav1.SetMetaDataLabel(&c.machine.ObjectMeta, v1alpha1.LabelKeyNode, state.Instance.NodeName)
	}
	c.setPriority()
	c.journal = c.journal.settle()
	c.journal.Provider = state.Provider
	c.ops.beginOperation(dispatch.Initialize)
	if err := c.ops.storeSettled(ctx, state.ID); err != nil {
		return err
	}
	c.timings.observe(c.class.metricsKind(ctx), stageCreate, c.age())
	c.class.noteAccepted(ctx, state)
	if _, taken := c.said.LoadAndDelete(subject{c.machine.UID, aboutName}); taken {
		c.sayf(EventNameFree, "The instance that had this machine's name is gone")
	}
	c.sayf("Created", "Created instance %s in %s (driver replica %s, attempt %d)",
		state.Instance.ProviderID, state.Took.Round(time.Millisecond), orPlain(state.Replica), state.Attempt)

	return nil
}

func (c *creation) setPriority() {
	if _, ok := c.machine.Annotations[v1alpha1.AnnotationKeyMachinePriority]; !ok {
		metav1.SetMetaDataAnnotation(&c.machine.ObjectMeta, v1alpha1.AnnotationKeyMachinePriority, v1alpha1.MachinePriorityDefault)
	}
}

func orPlain(replica string) string {
	if replica == "" {
		return "unnamed, of a plain driver"
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
func (c *creation) createFailed(ctx context.Context, state dispatch.State) (steps.Next, error) {
	// What the driver remembered before belongs to a try that goes on; what another
	// one did is not for this one to end.
	code := dispatch.CodeOf(state.Err)
	ended := !transient(code) && code != dispatch.ResourceExhausted && c.journal.stateIsOf(state.Provider)
	if state.LastKnownState != "" || ended {
		c.ops.keepDriverState(state)
	}
	c.failCreation(state.Err, v1alpha1.CreateFailedText)
	if retry := c.settings.Retry.create(code); code == dispatch.AlreadyExists && c.isNews(aboutName, fault(state.Err)) {
		c.warnAfterWritef(EventNameTaken, "Another instance has this machine's name: %s; if no machine has that instance, orphan collection "+
			"deletes it after its grace period; next try in %s", fault(state.Err), retry)
	}

	return c.ops.operationFailed(ctx, state, "FailedCreate", c.settings.Retry.create(code))
}
