package driversdk_test

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/machinebus/machinebus/driversdk"
)

// Spec is what users write into a MachineClass's providerSpec.
type Spec struct {
	Size string `json:"size"`
}

// Shelf is a driver whose instances are boxes on a shelf.
type Shelf struct{}

func (*Shelf) Create(_ context.Context, req *driversdk.Request[Spec]) (*driversdk.Instance, error) {
	if req.Class.Spec.Size != "s" {
		return nil, driversdk.Errorf(driversdk.ResourceExhausted, "no boxes of size %s", req.Class.Spec.Size)
	}

	return &driversdk.Instance{ProviderID: "shelf://" + req.Machine.UID, NodeName: req.Machine.Name}, nil
}

func (*Shelf) Delete(context.Context, *driversdk.Request[Spec]) error { return nil }

func (*Shelf) List(context.Context, *driversdk.Class[Spec]) ([]*driversdk.Instance, error) {
	return nil, nil
}

// The whole main of a driver. S is inferred from the driver's methods.
func ExampleServe() { //nolint:testableexamples // it serves until it gets a stop signal
	cfg := driversdk.Config{Provider: "shelf", Version: "1.0.0", CreateIdentity: driversdk.IdentityUniqueName}
	cfg.RegisterFlags(flag.CommandLine)
	driversdk.ParseFlags()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := driversdk.Serve(ctx, cfg, &Shelf{})
	stop()
	if err != nil {
		slog.Error("driver stopped", "err", err)
		os.Exit(1)
	}
}

// A driver's methods are tested like any others.
func ExampleDriver() {
	class := &driversdk.Class[Spec]{Name: "large", Spec: Spec{Size: "l"}}
	_, err := new(Shelf).Create(context.Background(), &driversdk.Request[Spec]{Class: class})
	fmt.Println(driversdk.CodeOf(err), err)
	// Output: CODE_RESOURCE_EXHAUSTED no boxes of size l
}

// Errors say what comes next by their code.
func ExampleErrorf() {
	err := driversdk.Errorf(driversdk.NotFound, "no image %q", "ubuntu-26")
	fmt.Println(driversdk.CodeOf(err) == driversdk.NotFound, err)
	// Output: true no image "ubuntu-26"
}
