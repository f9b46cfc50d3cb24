// Package external runs drivers that were written for the Go interfaces of the machine
// controller manager's proposal of 2018: [ExternalDriverProvider], which makes and removes
// instances, and [MachineClassDataProvider], by which it asks for classes and secrets.
//
// Change the import, hand the provider to [New], and it is a replica on the bus, with claims,
// sessions and drain:
//
//	provider := &aws.Provider{}
//	driver := external.New(external.ClassType{APIVersion: "machine.sapcloud.io/v1alpha1", Kind: "AWSMachineClass"}, provider)
//	provider.MachineClassDataProvider = driver
//	err := external.Serve(ctx, cfg, driver)
//
// The [Driver] is the provider's MachineClassDataProvider, as the gRPC client was in 2018. Set
// it before [Serve]. One published form of ExternalDriverProvider had a method
// GetMachineClassType, which also handed over the data provider. It is not called, as it would
// link Kubernetes. Call provider.GetMachineClassType(driver) yourself, after [New].
//
// Its rules:
//
//   - One call at a time. The gRPC client of 2018 made its calls one by one, so a provider need
//     not be safe for concurrent use. Further operations wait, or go to other replicas.
//   - The provider gets the class and the secret of the operation that runs, and nothing else.
//     See [Driver.GetMachineClass] and [Driver.GetSecret].
//   - Create lists before it creates, and returns the instance that has the machine's name. So
//     a create that is tried again makes no second one.
//   - Errors were texts in 2018. A code that such a text names is kept, see [Driver].
//
// A provider knows less than a native driver:
//
//   - It knows a machine by its name alone, and lists what its class selects. So each control
//     plane, and each namespace, needs classes that select only its own instances.
//   - It records no owner. So mcm deletes its instances without a machine only with
//     --adopt-owner=none.
//   - It lists no names of Nodes. So an instance that was found, and not made, counts as the Node
//     of the machine's name. Where a cloud names Nodes otherwise, that machine does not join, and
//     its set replaces it.
//   - mcm cannot validate its classes beforehand.
//
// The package speaks no gRPC: cmd/mcm-grpc-bridge does, for drivers that cannot be compiled
// again.
package external
