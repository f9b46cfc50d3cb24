package external

import "context"

// A MachineClassMeta names the class of an operation. The name is a path that is unique in the
// control cluster, and only of use to [MachineClassDataProvider].
type MachineClassMeta struct {
	Name string
	// Revision changes whenever the class or one of its secrets changes. It does not grow.
	Revision int32
}

// A SecretMeta names a secret as the class does in spec.secretRef. The revision is ignored: the
// newest secret is returned.
type SecretMeta struct {
	SecretName      string
	SecretNameSpace string
	Revision        int32
}

// A MachineClassDataProvider gives a provider the class and the secret of the operation that
// runs. [Driver] is one.
type MachineClassDataProvider interface {
	// GetMachineClass returns the JSON of the class, as a string.
	GetMachineClass(machineClassMeta *MachineClassMeta) (any, error)
	// GetSecret returns the JSON of the Secret.
	GetSecret(secretMeta *SecretMeta) (string, error)
}

// An ExternalDriverProvider makes and removes the instances of one provider. Its methods are
// called one at a time. credentials is the namespace and name of the class's secret, as
// "namespace/name"; it is never a secret itself.
type ExternalDriverProvider interface { //nolint:revive // the name of 2018
	// Create makes an instance named machineName and returns its provider id and the name of
	// its Node. machineID is empty.
	Create(machineclass *MachineClassMeta, credentials, machineID, machineName string) (string, string, error)
	// Delete removes the instance with the provider id machineID.
	Delete(machineclass *MachineClassMeta, credentials, machineID string) error
	// List returns the machine names of the class's instances by provider id: of all, or of
	// the one with the provider id machineID if that is not empty.
	List(machineclass *MachineClassMeta, credentials, machineID string) (map[string]string, error)
}

// A ContextProvider is an ExternalDriverProvider whose calls can end early. Without it a call
// that runs past the operation's deadline occupies the replica until it returns.
type ContextProvider interface {
	ExternalDriverProvider
	// WithContext returns the provider of one operation. Its methods return soon after ctx
	// ends. When that leaves open whether a call had an effect, they return an error of
	// driversdk.OutcomeUnknown.
	WithContext(ctx context.Context) ExternalDriverProvider
}
