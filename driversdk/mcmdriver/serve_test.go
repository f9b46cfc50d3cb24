package mcmdriver_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"testing"

	"github.com/gardener/machine-controller-manager/pkg/util/provider/driver"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/driversdk"
	"github.com/machinebus/machinebus/driversdk/drivertest"
	"github.com/machinebus/machinebus/driversdk/mcmdriver"
)

// serve serves a driver on a bus of its own until the test ends.
func serve(t *testing.T, d driver.Driver) (natsURL string) {
	t.Helper()
	natsURL = bustest.Server(t, embedded.Options{}).URL()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- mcmdriver.Serve(ctx, d, driversdk.Config{
			Provider: "Fake", NATS: driversdk.NATSConfig{URLs: []string{natsURL}}, Logger: slog.New(slog.DiscardHandler),
		})
	}()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})

	return natsURL
}

// only are the clauses that a driver keeps whatever it does: the bus's part of them, and what
// can be seen of a driver without a list.
var only = []string{
	"SUBJECT-1", "SUBJECT-2", "ENV-1", "ENV-6", "ENV-7", "DELETE-1", "DELETE-2", "STATUS-2", "VOLUMEIDS-1", "RESULT-1",
	"CLAIM-1", "CLAIM-2", "CLAIM-5", "FENCE-1", "ACCEPT-1", "CANCEL-1", "HELLO-1",
}

// The fake driver of that project's own tests keeps one instance in memory, and lists none.
func TestFakeDriver(t *testing.T) {
	t.Parallel()
	natsURL := serve(t, driver.NewFakeDriver(false, "fake:///i-1", "node-1", "made", nil, nil, nil))
	drivertest.Run(t, drivertest.Config{
		NATS: bus.Config{URLs: []string{natsURL}}, Provider: "fake", Only: only, Strict: true,
		Class: drivertest.Class{Namespace: "ns", Name: "small", ProviderSpec: []byte(`{}`)},
	})
}

// The fake's instance comes and goes with its machine.
func TestFakeDriver_Life(t *testing.T) {
	t.Parallel()
	d := mcmdriver.New(driver.NewFakeDriver(false, "fake:///i-1", "node-1", "made", nil, nil, nil), "Fake")
	req := &driversdk.Request[json.RawMessage]{
		Machine: driversdk.Machine{Namespace: "ns", Name: "m1"}, Class: &driversdk.Class[json.RawMessage]{Name: "small"},
	}
	if _, err := d.Get(t.Context(), req); driversdk.CodeOf(err) != driversdk.NotFound {
		t.Errorf("before it is made: %v, want NotFound", err)
	}
	for _, attempt := range []string{"created", "created again"} {
		made, err := d.Create(t.Context(), req)
		if err != nil || made.ProviderID != "fake:///i-1" || made.NodeName != "node-1" || req.Machine.LastKnownState != "made" {
			t.Errorf("%s: %+v, state %q, %v", attempt, made, req.Machine.LastKnownState, err)
		}
	}
	if _, err := d.Initialize(t.Context(), req); err != nil {
		t.Errorf("initialize: %v", err)
	}
	if err := d.Delete(t.Context(), req); err != nil {
		t.Errorf("delete: %v", err)
	}
	if _, err := d.Get(t.Context(), req); driversdk.CodeOf(err) != driversdk.NotFound {
		t.Errorf("after it is deleted: %v, want NotFound", err)
	}
}
