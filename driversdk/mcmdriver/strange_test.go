package mcmdriver_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/gardener/machine-controller-manager/pkg/util/provider/driver"
	"github.com/gardener/machine-controller-manager/pkg/util/provider/machinecodes/codes"
	"github.com/gardener/machine-controller-manager/pkg/util/provider/machinecodes/status"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/driversdk"
	"github.com/machinebus/machinebus/driversdk/mcmdriver"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A strange driver does in its creates what create does.
type strange struct {
	driver.Driver

	create func()
}

func (strange) GetMachineStatus(context.Context, *driver.GetMachineStatusRequest) (*driver.GetMachineStatusResponse, error) {
	return nil, status.Error(codes.NotFound, "none")
}

func (s strange) CreateMachine(context.Context, *driver.CreateMachineRequest) (*driver.CreateMachineResponse, error) {
	s.create()

	return &driver.CreateMachineResponse{ProviderID: "fake:///i-1"}, nil
}

// classes answers each fetch with one class.
type classes struct{}

func (classes) Class(_ context.Context, _ string, req *driverv1.FetchClassRequest) (*driverv1.Class, error) {
	return &driverv1.Class{Reference: req.GetClass(), ProviderSpec: []byte(`{}`)}, nil
}

func (classes) Secret(context.Context, string, *driverv1.FetchSecretRequest) (*driverv1.SecretContent, error) {
	return &driverv1.SecretContent{}, nil
}

func (classes) Bootstrap(context.Context, string, *driverv1.FetchBootstrapRequest) (*driverv1.BootstrapContent, error) {
	return &driverv1.BootstrapContent{}, nil
}

// create has a strange driver asked for an instance, in a time.
func create(t *testing.T, d strange, timeout time.Duration) error {
	t.Helper()
	srv := bustest.Server(t, embedded.Options{})
	conn := bustest.Connect(t, bus.Config{URLs: []string{srv.URL()}, Name: "mcm"})
	fetches, err := bus.ServeFetches(conn, optest.Cluster, optest.NewKey(t), classes{}, bustest.Quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(fetches.Stop)
	manager := optest.NewCaller(t, conn, caller.Config{Owner: "the-owner"})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- mcmdriver.Serve(ctx, d, driversdk.Config{
			Provider: optest.Provider, NATS: driversdk.NATSConfig{URLs: []string{srv.URL()}}, Logger: slog.New(slog.DiscardHandler),
		})
	}()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	bustest.Eventually(t, "the driver is on the bus", func() bool { return len(manager.Replicas()) == 1 })
	req := optest.Create("m1")
	req.Timeout = timeout
	req.Body.GetCreate().Class = &driverv1.ClassReference{Class: &driverv1.ObjectReference{Namespace: "shop", Name: "small", ResourceVersion: "1"}}
	_, err = manager.Call(t.Context(), req)

	return err
}

// A panic is a failed operation whose outcome is unknown, as it may have come after the cloud's.
func TestPanic(t *testing.T) {
	t.Parallel()
	err := create(t, strange{create: func() { panic("on purpose") }}, time.Minute) //nolint:forbidigo // a driver that does
	if bus.OriginOf(err) != bus.OriginTimeout || !strings.Contains(err.Error(), "driver panicked in create") {
		t.Errorf("%v (%v), want an unknown outcome that names the panic", err, bus.OriginOf(err))
	}
}

// These drivers were handed no deadline, and many look at none: the manager goes on all the same.
func TestHang(t *testing.T) {
	t.Parallel()
	hang := make(chan struct{})
	err := create(t, strange{create: func() { <-hang }}, 300*time.Millisecond)
	close(hang)
	if bus.OriginOf(err) != bus.OriginTimeout {
		t.Errorf("%v (%v), want an unknown outcome after the deadline", err, bus.OriginOf(err))
	}
}
