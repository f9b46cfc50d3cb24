package bus_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// When the most waits, for what clouds explain at length, people ask most.
func TestOutcomesWhenMuchWaits(t *testing.T) {
	t.Parallel()
	config := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(config, []byte("max_payload: 65536"), 0o600); err != nil {
		t.Fatal(err)
	}
	srv := bustest.Server(t, embedded.Options{ConfigFile: config})
	conn := bustest.Connect(t, bus.Config{URLs: []string{srv.URL()}})
	const all = 1000
	stop, err := bus.ServeOutcomes(conn, optest.Cluster, func() []*driverv1.Audit {
		huge := optest.Audit("huge")
		huge.Namespace = strings.Repeat("x", 65536)

		return []*driverv1.Audit{huge, optest.Audit("last")}
	}, func() *driverv1.OpsResponse {
		w := &driverv1.OpsResponse{Omitted: 1}
		for range all {
			w.Operations = append(w.Operations, &driverv1.OperationState{
				OperationId: "x", Provider: optest.Provider, LastProgress: strings.Repeat("ü", 4096),
			})
		}

		return w
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	outcomes, waits := make(chan *driverv1.Audit, 9), make(chan *driverv1.OpsResponse, 9)
	people := bustest.Connect(t, bus.Config{URLs: []string{srv.URL()}, InboxPrefix: bus.OperatorInbox})
	ask, stop, err := bus.AskOutcomes(people, func(a *driverv1.Audit) { outcomes <- a },
		func(_ string, w *driverv1.OpsResponse) { waits <- w })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	if err := ask(optest.Cluster); err != nil {
		t.Fatal(err)
	}
	w := bustest.Receive(t, "what waits", waits)
	if told := len(w.GetOperations()); told < 50 || told+int(w.GetOmitted()) != all+1 {
		t.Errorf("%d operations wait and %d are left out", told, w.GetOmitted())
	}
	if a := bustest.Receive(t, "the last outcome", outcomes); a.GetName() != "last" {
		t.Errorf("the outcome is of %s", a.GetName())
	}
}
