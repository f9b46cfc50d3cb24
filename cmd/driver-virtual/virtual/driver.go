// Package virtual drives virtual-cloud: it is the reference implementation of a
// driver, with one file for each method of driversdk's interfaces.
//
// It shows what any driver has to get right (who an instance belongs to, what a
// repeated or lost create does, which code says what) and holds nothing that the
// SDK does already. The cloud itself is in cmd/virtual-cloud.
package virtual

import (
	"fmt"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk"
)

// What a MachineClass says to get this driver.
const (
	Provider   = "virtual"
	Kind       = "VirtualMachineSpec"
	APIVersion = "virtual.machinebus.io/v1alpha1"
)

// Keys of the class's secrets.
const apiTokenKey = "apiToken"

// A Driver makes and removes instances of virtual clouds; which one, each class
// says. It holds no state, so replicas need not know of each other.
type Driver struct {
	// Identity is how Create is kept from making a second instance. The cloud
	// can do all three ways, real ones have one.
	Identity driversdk.CreateIdentity
	// IgnoreDeadlines has Create and Delete ignore their contexts, for tests of what
	// becomes of drivers that do.
	IgnoreDeadlines bool
}

// What the driver offers beyond the three methods that are needed.
var (
	_ driversdk.Driver[Spec]         = (*Driver)(nil)
	_ driversdk.Getter[Spec]         = (*Driver)(nil)
	_ driversdk.Initializer[Spec]    = (*Driver)(nil)
	_ driversdk.ClassValidator[Spec] = (*Driver)(nil)
	_ driversdk.VolumeIDer           = (*Driver)(nil)
	_ driversdk.ClassMigrator        = (*Driver)(nil)
)

// identities are the ways to identify a create, in our words and in the cloud's.
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

// cloudOf returns a client of the class's cloud; making one costs nothing.
func cloudOf(class *driversdk.Class[Spec]) (*cloudapi.Client, error) {
	client, err := cloudapi.NewClient(class.Spec.Endpoint, string(class.Secret[apiTokenKey]))
	if err != nil {
		return nil, driversdk.NewError(driversdk.InvalidArgument, err)
	}

	return client, nil
}
