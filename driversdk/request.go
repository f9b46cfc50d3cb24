package driversdk

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Request is one operation on one machine. It is the method's own; what Class
// points to is shared and only read. It prints, logs and marshals without
// secrets.
type Request[S any] struct {
	Machine Machine
	Class   *Class[S]
	// UserData is the secret's key "userData". For Create the placeholders in it
	// are replaced by the machine's own values; otherwise it is as stored.
	UserData UserData
	// OperationID is the same for every attempt at this operation and never used
	// for another: the cloud's idempotency token, where there is one.
	OperationID string
	// Attempt counts the tries at this operation from 1.
	Attempt uint32
	// Recover says that an earlier attempt may have had an effect. The SDK has
	// looked for the one instance by then, see [Driver].Create; a driver of
	// [IdentityNone] also removes all but the oldest of several.
	Recover bool
	// Cluster is the name of the control plane that asks; it belongs into what an
	// instance is tagged with.
	Cluster string
	// Owner is the uid of the control cluster that asks, which its name alone does not
	// identify. Create records it with the instance [OWNER-1]. It is empty where the
	// manager says none.
	Owner string

	call *call // nil in a driver's own unit tests
}

// A Machine is what a driver may need to know of a Machine object.
type Machine struct {
	Namespace string
	Name      string
	// UID is the machine's identity for ever; record it with the instance.
	UID          string
	Labels       map[string]string
	Annotations  map[string]string
	NodeTemplate NodeTemplate
	// ProviderID is empty before creation.
	ProviderID string
	// NodeName is as far as it is known.
	NodeName string
	// LastKnownState is what the driver last gave to
	// [Request.SetLastKnownState].
	LastKnownState string
}

// A NodeTemplate is what the machine's Node is to carry.
type NodeTemplate struct {
	Labels      map[string]string
	Annotations map[string]string
	Taints      []Taint
}

// A Taint is a Kubernetes node taint.
type Taint struct{ Key, Value, Effect string }

// A Class is one version of a MachineClass with the secrets it refers to. It is
// shared by everything that runs: read it, and copy what is to be changed.
type Class[S any] struct {
	// Cluster is the control plane that the class is of.
	Cluster     string
	Namespace   string
	Name        string
	Labels      map[string]string
	Annotations map[string]string
	// UID and ResourceVersion name this version of the object.
	UID, ResourceVersion string
	// Spec is the decoded providerSpec.
	Spec S
	// Secret holds the keys of secretRef and of credentialsSecretRef; the latter
	// win.
	Secret Secret
	// SecretRef and CredentialsSecretRef name the versions of the objects that Secret is
	// from; the zero value names none.
	SecretRef, CredentialsSecretRef SecretReference
	// NodeTemplate describes the class's Nodes before there are any.
	NodeTemplate ClassNodeTemplate
}

// A SecretReference names one version of a Secret of the control cluster.
type SecretReference struct{ Namespace, Name, UID, ResourceVersion string }

// A ClassNodeTemplate describes the Nodes of a class before there are any.
type ClassNodeTemplate struct {
	InstanceType, Region, Zone, Architecture string
	// Capacity and VirtualCapacity are Kubernetes quantities by resource name.
	Capacity, VirtualCapacity map[string]string
}

// An Instance is what exists at the provider for one machine.
type Instance struct {
	// ProviderID equals spec.providerID of the Node the instance becomes,
	// "<provider>://<opaque>". It is never empty [INSTANCE-1].
	ProviderID string
	// NodeName is the name the instance's Node will register with.
	NodeName  string
	Addresses []Address
	// MachineName and MachineUID are what the instance was recorded with. List
	// fills at least the name [INSTANCE-2].
	MachineName string
	MachineUID  string
	// Owner is the [Request].Owner that the instance was recorded with; empty for none.
	// List fills it [OWNER-1]: the manager deletes no instance without a machine unless
	// it is the owner.
	Owner string
}

// An Address is one way to reach an instance.
type Address struct {
	// Type is a Kubernetes NodeAddressType: Hostname, InternalIP, ExternalIP,
	// InternalDNS, ExternalDNS.
	Type    string
	Address string
}

// Progress reports what a long operation is doing, in one line without secrets
// [PROGRESS-1]. It never blocks; only the newest line counts.
func (r *Request[S]) Progress(message string) {
	if r.call != nil {
		r.call.progress(message)
	}
}

// BeginMutation is called right before a cloud call that is not safe to repeat,
// and says whether this replica may still make it; the SDK has called it before
// Create, Initialize and Delete, so only later calls of a method need it. On an
// error return that error.
//
// It writes to the operation's claim, and waits for the answer, up to a few seconds. It
// refuses when ctx or the operation has ended (deadline, cancel, hard stop), when another
// attempt has taken the claim's place, and when the operations stream does not answer:
// make no call then. Each later call of it writes again. From the first success on a
// cancel comes too late and no longer ends the method's context, so that the
// call runs to its end; the deadline and the hard stop still end it, and a method
// that then fails leaves the outcome unknown (see [OutcomeUnknown]).
func (r *Request[S]) BeginMutation(ctx context.Context) error {
	err := ctx.Err()
	if err == nil && r.call != nil {
		err = r.call.ctx.Err() // the bus knows of the deadline and of cancels, not of the hard stop
	}
	switch {
	case err != nil:
		return NewError(CodeOf(err), fmt.Errorf("the call did not start: %w", err))
	case r.call == nil:
		return nil
	}
	if err := r.call.task.BeginMutation(); err != nil {
		return err
	}
	r.call.begun.Store(true)

	return nil
}

// SetLastKnownState keeps a text with the Machine object for the next operation
// to see, also when this one fails. It is readable by everybody and must not
// hold a secret [MACHINE-2]. Without it the former text stays.
func (r *Request[S]) SetLastKnownState(state string) { r.Machine.LastKnownState = state }

// Logger writes lines that carry the operation: machine, class, operation id,
// attempt and replica. What a driver writes must not hold a secret.
func (r *Request[S]) Logger() *slog.Logger {
	if r.call == nil {
		return slog.Default()
	}

	return slog.New(r.call.log.Handler().WithAttrs(r.call.attrs()))
}

// String names the request without anything secret.
func (r *Request[S]) String() string {
	return fmt.Sprintf("operation %s attempt %d of machine %s/%s (class %v, user data %v)",
		r.OperationID, r.Attempt, r.Machine.Namespace, r.Machine.Name, r.Class, r.UserData)
}

// LogValue names the request without anything secret.
func (r *Request[S]) LogValue() slog.Value {
	return slog.GroupValue(
		slog.String("operation_id", r.OperationID),
		slog.Uint64("attempt", uint64(r.Attempt)),
		slog.String("machine", r.Machine.Namespace+"/"+r.Machine.Name),
		slog.Any("class", r.Class),
		slog.Any("user_data", r.UserData),
	)
}

// String names the class without anything secret.
func (c *Class[S]) String() string {
	if c == nil {
		return "none"
	}

	return fmt.Sprintf("%s/%s with secret %v", c.Namespace, c.Name, c.Secret)
}

// LogValue names the class without anything secret.
func (c *Class[S]) LogValue() slog.Value {
	if c == nil {
		return slog.StringValue("none")
	}

	return slog.GroupValue(slog.String("name", c.Namespace+"/"+c.Name), slog.Any("secret", c.Secret))
}

// A PersistentVolume is one volume of a pod that is about to move.
type PersistentVolume struct {
	Name string
	// Spec is the JSON of a Kubernetes PersistentVolumeSpec.
	Spec json.RawMessage
}

func machineOf(m *driverv1.Machine) Machine {
	machine := Machine{
		Namespace: m.GetNamespace(), Name: m.GetName(), UID: m.GetUid(),
		Labels: m.GetLabels(), Annotations: m.GetAnnotations(),
		ProviderID: m.GetProviderId(), NodeName: m.GetNodeName(), LastKnownState: m.GetLastKnownState(),
		NodeTemplate: NodeTemplate{
			Labels: m.GetNodeTemplate().GetLabels(), Annotations: m.GetNodeTemplate().GetAnnotations(),
		},
	}
	for _, t := range m.GetNodeTemplate().GetTaints() {
		machine.NodeTemplate.Taints = append(machine.NodeTemplate.Taints,
			Taint{Key: t.GetKey(), Value: t.GetValue(), Effect: t.GetEffect()})
	}

	return machine
}

func secretReferenceOf(ref *driverv1.ObjectReference) SecretReference {
	return SecretReference{
		Namespace: ref.GetNamespace(), Name: ref.GetName(), UID: ref.GetUid(), ResourceVersion: ref.GetResourceVersion(),
	}
}

func (i *Instance) proto() *driverv1.Instance {
	if i == nil {
		return nil
	}
	p := &driverv1.Instance{
		ProviderId: i.ProviderID, NodeName: i.NodeName, MachineName: i.MachineName, MachineUid: i.MachineUID,
		Owner: i.Owner,
	}
	for _, a := range i.Addresses {
		p.Addresses = append(p.Addresses, &driverv1.Address{Type: a.Type, Address: a.Address})
	}

	return p
}
