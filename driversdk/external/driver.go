package external

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"slices"
	"sync"

	"github.com/machinebus/machinebus/driversdk"
)

// A ClassType is the kind of class that a provider understands, such as AWSMachineClass of
// machine.sapcloud.io/v1alpha1.
type ClassType struct{ APIVersion, Kind string }

// A Driver makes a driver of the bus from an [ExternalDriverProvider], and is its
// [MachineClassDataProvider]. It is safe for concurrent use and lets one operation run at a
// time.
//
// An error keeps the code that it has from package driversdk. Otherwise it gets the one that
// its text names in the form of a gRPC status or of the later machine controller manager, or
// else Unknown. NotFound from Delete is success.
type Driver struct {
	classType ClassType
	provider  ExternalDriverProvider
	turn      chan struct{} // holds one element while an operation runs

	mu      sync.Mutex
	running *operation // nil between operations
}

var (
	_ driversdk.Driver[json.RawMessage] = (*Driver)(nil)
	_ MachineClassDataProvider          = (*Driver)(nil)
)

// New returns the driver of a provider.
func New(classType ClassType, provider ExternalDriverProvider) *Driver {
	return &Driver{classType: classType, provider: provider, turn: make(chan struct{}, 1)}
}

// Create returns the instance that has the machine's name, or makes it.
func (d *Driver) Create(ctx context.Context, req *driversdk.Request[json.RawMessage]) (*driversdk.Instance, error) {
	op, err := d.begin(ctx, req.Class, req.UserData)
	if err != nil {
		return nil, err
	}
	defer d.end()
	ids, err := op.find(req.Machine.Name)
	switch {
	case err != nil:
		return nil, err
	case len(ids) > 1:
		return nil, driversdk.Errorf(driversdk.OutOfRange, "%d instances are named %s: %q; delete all but one of them", len(ids), req.Machine.Name, ids)
	case len(ids) == 1:
		return instance(ids[0], req.Machine.Name), nil
	}
	// Listing may have taken long: meanwhile another replica may have the machine.
	if err := req.BeginMutation(ctx); err != nil {
		return nil, err
	}
	id, node, err := op.provider.Create(op.class, op.credentials, req.Machine.ProviderID, req.Machine.Name)
	if err != nil {
		return nil, cutOff(coded(err))
	}

	return &driversdk.Instance{ProviderID: id, NodeName: cmp.Or(node, req.Machine.Name)}, nil
}

// Delete removes the instance with the machine's provider id; if that is not known, those with
// its name.
func (d *Driver) Delete(ctx context.Context, req *driversdk.Request[json.RawMessage]) error {
	op, err := d.begin(ctx, req.Class, req.UserData)
	if err != nil {
		return err
	}
	defer d.end()
	ids := []string{req.Machine.ProviderID}
	if req.Machine.ProviderID == "" {
		if ids, err = op.find(req.Machine.Name); err != nil {
			return err
		}
	}
	for _, id := range ids {
		if err := req.BeginMutation(ctx); err != nil {
			return err
		}
		err := coded(op.provider.Delete(op.class, op.credentials, id))
		if err != nil && driversdk.CodeOf(err) != driversdk.NotFound {
			return cutOff(err)
		}
	}

	return nil
}

// List returns the class's instances. Those without a machine name are left out: they are of
// no machine.
func (d *Driver) List(ctx context.Context, class *driversdk.Class[json.RawMessage]) ([]*driversdk.Instance, error) {
	op, err := d.begin(ctx, class, nil)
	if err != nil {
		return nil, err
	}
	defer d.end()
	names, err := op.list()
	if err != nil {
		return nil, err
	}
	var instances []*driversdk.Instance
	for _, id := range slices.Sorted(maps.Keys(names)) {
		if names[id] != "" {
			instances = append(instances, instance(id, names[id]))
		}
	}

	return instances, nil
}

// instance is one that was listed. A list says no names of Nodes; most clouds name the Node
// like the instance.
func instance(id, machine string) *driversdk.Instance {
	return &driversdk.Instance{ProviderID: id, NodeName: machine, MachineName: machine}
}

// begin waits until no other operation runs. Only after an error is there no need of end.
func (d *Driver) begin(
	ctx context.Context, class *driversdk.Class[json.RawMessage], userData []byte,
) (*operation, error) {
	op, err := d.operation(ctx, class, userData)
	if err != nil {
		return nil, err
	}
	select {
	case d.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, driversdk.Errorf(driversdk.CodeOf(ctx.Err()), "the call did not start: the driver was busy with another one until %w", ctx.Err())
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running = op

	return op, nil
}

func (d *Driver) end() {
	d.mu.Lock()
	d.running = nil
	d.mu.Unlock()
	<-d.turn
}
