package main

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/driversdk/drivertest"
)

// TestContract holds a client of 2018, as the bridge makes a replica of it, against the contract.
// README.md says of each broken clause why.
func TestContract(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, address := w.bridge("--clusters=checked,other")
	start(t, "infra", []string{addressVariable + "=" + address, kindVariable + "=VirtualMachineClass"})
	report, err := drivertest.Check(t.Context(), drivertest.Config{
		NATS: bus.Config{URLs: []string{w.nats.URL()}}, Provider: "virtual", Timeout: 10 * time.Second, Repeat: 2,
		Cluster: "checked", OtherCluster: "other",
		Class: drivertest.Class{
			Namespace: "shop", Name: "small", ProviderSpec: w.store.class.GetProviderSpec(),
			SecretRef: drivertest.Reference{Namespace: "shop", Name: "cloud"},
		},
		Secrets: []drivertest.Secret{{Namespace: "shop", Name: "cloud", Data: map[string][]byte{
			"apiToken": []byte(apiToken), "userData": []byte("join by <<BOOTSTRAP_TOKEN>>"),
		}}},
		Bootstrap: map[string]string{"<<BOOTSTRAP_TOKEN>>": bootstrapToken},
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
	if diff := cmp.Diff([]string{"CREATE-2", "LIST-3", "MACHINE-1", "OWNER-1", "VALIDATE-2"}, failed); diff != "" || report.Left != "" {
		t.Errorf("broken clauses (-want +got):\n%s\nleft: %q", diff, report.Left)
	}
}
