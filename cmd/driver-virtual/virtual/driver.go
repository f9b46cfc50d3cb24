// Package virtual is the driver of virtual-cloud and the reference implementation of a
// driver, with one file for each method of driversdk's interfaces.
//
// It shows what every driver must get right: to whom an instance belongs, what a
// repeated or lost create does, and which error gets which code. The cloud itself is in
// cmd/virtual-cloud.
package virtual

import (
	"fmt"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk"
)

// Values in a MachineClass that select this driver.
const (
	Provider   = "virtual"
	Kind       = "VirtualMachineSpec"
	APIVersion = "virtual.machinebus.io/v1alpha1"
)

// apiTokenKey is the key of the API token in the class's secret.
const apiTokenKey = "apiToken"

// A Driver creates and deletes instances of virtual clouds. Each class names its cloud.
// A Driver has no state, so replicas need not know of each other.
type Driver struct {
	// Identity is how Create avoids a second instance. This cloud supports all three
	// ways, a real one only one.
	Identity driversdk.CreateIdentity
	// IgnoreDeadlines makes Create and Delete ignore their contexts, for tests.
	IgnoreDeadlines bool
}

// The interfaces that the driver implements, of which only the first is required.
var (
	_ driversdk.Driver[Spec]         = (*Driver)(nil)
	_ driversdk.Getter[Spec]         = (*Driver)(nil)
	_ driversdk.Initializer[Spec]    = (*Driver)(nil)
	_ driversdk.ClassValidator[Spec] = (*Driver)(nil)
	_ driversdk.VolumeIDer           = (*Driver)(nil)
	_ driversdk.ClassMigrator        = (*Driver)(nil)
)

// identities maps the SDK's ways to identify a create to the cloud's.
var identities = map[driversdk.CreateIdentity]cloudapi.Identity{
	driversdk.IdentityToken:      cloudapi.IdentityToken,
	driversdk.IdentityUniqueName: cloudapi.IdentityUniqueName,
	driversdk.IdentityNone:       cloudapi.IdentityNone,
}

// UnmarshalText sets Identity from a flag's value.
func (d *Driver) UnmarshalText(text []byte) error {
	for identity, name := range identities {
		if string(name) == string(text) {
			d.Identity = identity

			return nil
		}
	}

	return fmt.Errorf("identity %q: want token, unique_name or none", text)
}

// MarshalText is the inverse of UnmarshalText.
func (d *Driver) MarshalText() ([]byte, error) { return []byte(identities[d.Identity]), nil }

// cloudOf returns a client of the class's cloud, which is cheap.
func cloudOf(class *driversdk.Class[Spec]) (*cloudapi.Client, error) {
	client, err := cloudapi.NewClient(class.Spec.Endpoint, string(class.Secret[apiTokenKey]))
	if err != nil {
		return nil, driversdk.NewError(driversdk.InvalidArgument, err)
	}

	return client, nil
}
