package external_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/driversdk"
	"github.com/machinebus/machinebus/driversdk/drivertest"
	"github.com/machinebus/machinebus/driversdk/external"
)

const testProvider = "shelf"

// serve runs a replica of a provider until the test ends.
func serve(t *testing.T, url string, d *external.Driver, clusters ...string) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- external.Serve(ctx, driversdk.Config{
			Provider: testProvider, NATS: driversdk.NATSConfig{URLs: []string{url}}, Clusters: clusters,
			DrainTimeout: time.Second, Logger: bustest.Quiet(),
		}, d)
	}()
	t.Cleanup(func() {
		stop()
		if err := bustest.Receive(t, "the end of the replica", done); err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
}

// broken are the clauses that no provider of 2018 can keep; README.md of the bridge lists them too.
var broken = []string{
	"CREATE-2",   // it knows machines by their names alone
	"LIST-3",     // what it lists depends on the class alone, here on nothing
	"MACHINE-1",  // it gets no uid
	"OWNER-1",    // it gets no owner
	"VALIDATE-2", // its class's fields are its own
}

// TestContract holds a provider of 2018 against the contract.
func TestContract(t *testing.T) {
	t.Parallel()
	srv := bustest.Server(t, embedded.Options{})
	serve(t, srv.URL(), newDriver(newCloud()), "default", "other")
	report, err := drivertest.Check(t.Context(), drivertest.Config{
		NATS: bus.Config{URLs: []string{srv.URL()}}, Provider: testProvider, Timeout: 10 * time.Second, Repeat: 2, OtherCluster: "other",
		Class: drivertest.Class{
			Namespace: "ns", Name: "small", ProviderSpec: []byte(`{"size":"small"}`),
			SecretRef: drivertest.Reference{Namespace: "ns", Name: "cloud"},
		},
		Secrets: []drivertest.Secret{{Namespace: "ns", Name: "cloud", Data: map[string][]byte{
			"token": []byte(testToken), "userData": []byte("join with <<BOOTSTRAP_TOKEN>>"),
		}}},
		Bootstrap: map[string]string{"<<BOOTSTRAP_TOKEN>>": "abcdef.0123456789abcdef"},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	var failed []string
	for _, f := range report.Of(drivertest.Failed) {
		failed = append(failed, f.ID)
		t.Logf("%s: %s: %s", f.ID, f.Says, f.Detail)
	}
	slices.Sort(failed)
	if diff := cmp.Diff(broken, failed); diff != "" || report.Left != "" {
		t.Errorf("broken clauses (-want +got):\n%s\nleft: %q", diff, report.Left)
	}
}
