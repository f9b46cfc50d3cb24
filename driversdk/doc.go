// Package driversdk is what the author of a machinebus driver needs: implement
// [Driver] for one provider, hand it to [Serve], and the replicas of the program
// make and remove that provider's instances for every control plane on the bus.
// A whole main is
//
//	func main() {
//		cfg := driversdk.Config{Provider: "acme", Version: "1.0.0", CreateIdentity: driversdk.IdentityToken}
//		cfg.RegisterFlags(flag.CommandLine)
//		driversdk.ParseFlags()
//
//		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
//		err := driversdk.Serve(ctx, cfg, &acme.Driver{})
//		stop()
//		if err != nil {
//			slog.Error("driver stopped", "err", err)
//			os.Exit(1)
//		}
//	}
//
// `mcmctl new driver` writes a module with such a main, a driver, its tests and manifests.
//
// The SDK decodes the provider spec strictly, keeps classes and secrets until
// they change, fills in user data, bounds what runs at once, sets deadlines,
// answers for a method that panics, drains at a stop signal, and
// reports health, metrics and traces. A method therefore only talks to its cloud, and
// says how that went with a code ([Errorf]).
//
// What the SDK cannot do is make the cloud's own calls repeatable. Any operation
// may be asked again, by another replica, after an answer was lost: Create must
// return the instance that already carries the machine's uid, Delete of an
// absent instance must succeed.
//
// The package is not a client of Kubernetes, and nothing of Kubernetes is linked
// into a driver; classes and secrets arrive over the bus. It is not a retry
// library either: what comes of a failure is the manager's decision, by code.
//
// A driver that was written for the interfaces of the machine controller manager's proposal of 2018
// is run by package external.
//
// Spans go to OpenTelemetry's global tracer provider, or to [Config].Traces; to have
// them sent, a main sets one up with the exporter of its choice. The context of a
// method carries the operation's span, [Request.Logger] its names.
//
// Clause ids such as [CREATE-1] refer to the contract in
// proto/machinebus/driver/v1.
package driversdk
