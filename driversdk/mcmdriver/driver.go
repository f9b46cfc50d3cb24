package mcmdriver

import (
	"cmp"
	"encoding/json"

	"github.com/gardener/machine-controller-manager/pkg/util/provider/driver"
	corev1 "k8s.io/api/core/v1"

	"github.com/machinebus/machinebus/driversdk"
)

// The abilities that each such driver has by its interface. What it does not implement
// it answers with Unimplemented, which passes through.
var _ interface {
	driversdk.Driver[json.RawMessage]
	driversdk.Getter[json.RawMessage]
	driversdk.Initializer[json.RawMessage]
	driversdk.VolumeIDer
	driversdk.ClassValidator[json.RawMessage]
} = (*Driver)(nil)

// A Driver is a driver of the machine controller manager as the bus asks one. It is safe
// for concurrent use if that driver is, which that controller also requires.
type Driver struct {
	driver   driver.Driver
	provider string
}

// New makes d servable by [driversdk.Serve]. Classes that d gets name the provider as given,
// such as AWS: drivers compare it, and the bus knows it in lower case only.
func New(d driver.Driver, provider string) *Driver { return &Driver{driver: d, provider: provider} }

// A request is what that interface's requests on one machine have in common.
type request = driversdk.Request[json.RawMessage]

// instanceOf returns what an answer says of an instance.
func instanceOf(providerID, nodeName string, addresses []corev1.NodeAddress) *driversdk.Instance {
	i := &driversdk.Instance{ProviderID: providerID, NodeName: nodeName}
	for _, a := range addresses {
		i.Addresses = append(i.Addresses, driversdk.Address{Type: string(a.Type), Address: a.Address})
	}

	return i
}

// keepState keeps the driver's last known state for its next operation, unless it says none.
func keepState(req *request, state string) {
	req.SetLastKnownState(cmp.Or(state, req.Machine.LastKnownState))
}
