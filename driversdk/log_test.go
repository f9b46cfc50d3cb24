package driversdk

import (
	"context"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus/bustest"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// TestLogLinesNameTheOperation reads the lines of an operation, the driver's own
// among them.
func TestLogLinesNameTheOperation(t *testing.T) {
	t.Parallel()
	logs := &lockedBuffer{}
	logger, err := newLogger(logs, "json", slog.LevelDebug)
	if err != nil {
		t.Fatal(err)
	}
	const own, ended = "asking the cloud", "operation ended"
	w := start(t, &testDriver{onDelete: func(_ context.Context, req *Request[testSpec]) error {
		req.Logger().Info(own)

		return nil
	}}, func(cfg *Config) { cfg.Logger = logger })
	env := deletion(machine("m"), &driverv1.ClassReference{Class: w.store.setClass("c", "1", `{"size":"big"}`)})
	env.Attempt = 3
	w.askTraced(env, sampled).result()
	bustest.Eventually(t, "the operation's last line", func() bool { return strings.Contains(logs.String(), ended) })

	want := map[string]any{
		"machine": "ns/m", "class": "ns/c", "operation": "delete", "operation_id": env.GetOperationId(), "attempt": 3.0,
		"replica": w.replica.name, "provider": testProvider, "cluster": testCluster, "trace_id": testTrace,
	}
	seen := map[string]bool{}
	for line := range strings.Lines(logs.String()) {
		fields := map[string]any{}
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		text, _ := fields["msg"].(string)
		if text != own && text != ended {
			continue
		}
		seen[text] = true
		got := map[string]any{}
		for key := range want {
			got[key] = fields[key]
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("line %q (-want +got):\n%s", text, diff)
		}
	}
	if !seen[own] || !seen[ended] {
		t.Errorf("lines are missing: %s", logs)
	}
}
