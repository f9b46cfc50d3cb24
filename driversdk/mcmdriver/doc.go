// Package mcmdriver serves a driver that was written for the machine controller manager
// (github.com/gardener/machine-controller-manager) as a replica on the bus. The driver
// stays as it is; its main becomes
//
//	func main() {
//		mcmdriver.Main(aws.NewDriver(&spi.PluginSPIImpl{}), driversdk.Config{Provider: "AWS"})
//	}
//
// Such a driver gets what that controller gives it: the whole MachineClass and Machine,
// one Secret with the keys of both references, and a question for the status before each
// create. Its codes, its last known state and its volume ids come back over the bus.
//
// The package adds no ability that the driver lacks. That interface names neither the
// machine's uid nor an owner, so some clauses of the contract stay open. exceptions.txt
// names each, with its cost for the operator, and driver-conformance takes the file.
//
// The package is a module of its own: it links that project's API types, and Kubernetes
// with them. A new driver implements [driversdk.Driver] and links neither.
package mcmdriver
