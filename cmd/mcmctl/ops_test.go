package main

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestOps(t *testing.T) {
	t.Parallel()
	url := startBus(t)
	started, release := make(chan string, 2), make(chan struct{})
	startReplica(t, url, bus.ServerConfig{Provider: "virtual", Replica: "one"},
		func(ctx context.Context, task *bus.Task) *driverv1.Result {
			name := bus.MachineOf(task.Request).GetName()
			started <- name
			if name == "m2" {
				return &driverv1.Result{Status: &driverv1.Status{Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED}}
			}
			task.Progress("booting")
			select {
			case <-release:
			case <-ctx.Done():
			}

			return &driverv1.Result{}
		})
	t.Cleanup(func() { close(release) })
	for _, name := range []string{"m1", "m2"} {
		startCreate(t, url, name)
		select {
		case <-started:
		case <-time.After(bounded):
			t.Fatalf("the create of %s did not start", name)
		}
	}

	m1 := map[string]string{
		"CLUSTER": "default", "PROVIDER": "virtual", "MACHINE": "default/m1", "OP": "create", "ATTEMPT": "1",
		"REPLICA": "one", "STATE": "running", "PROGRESS": "booting", "OPERATION-ID": "uid-m1.create.0",
	}
	m2 := map[string]string{
		"CLUSTER": "default", "PROVIDER": "virtual", "MACHINE": "default/m2", "OP": "create", "ATTEMPT": "1",
		"REPLICA": "one", "STATE": "settled ResourceExhausted", "PROGRESS": "-", "OPERATION-ID": "uid-m2.create.0",
	}
	cases := map[string]struct {
		reason string
		args   []string
		want   []map[string]string
	}{
		"All":       {"running ones, and settled ones that nobody acknowledged", nil, []map[string]string{m1, m2}},
		"Name":      {"a machine by its name", []string{"m2"}, []map[string]string{m2}},
		"Namespace": {"a machine by namespace and name", []string{"default/m1"}, []map[string]string{m1}},
		"Provider":  {"--provider selects, whatever its case", []string{"--provider", "VIRTUAL"}, []map[string]string{m1, m2}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, _, err := mcmctl(t, append([]string{"ops", "-o", "wide", "--nats-url", url}, tc.args...)...)
			if err != nil {
				t.Fatalf("mcmctl ops: %v", err)
			}
			got := table(t, out)
			for _, row := range got {
				delete(row, "ELAPSED")
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("%s\n-want, +got:\n%s", tc.reason, diff)
			}
		})
	}
	t.Run("JSON", func(t *testing.T) {
		t.Parallel()
		out, _, err := mcmctl(t, "ops", "m1", "-o", "json", "--nats-url", url)
		if err != nil {
			t.Fatalf("mcmctl ops: %v", err)
		}
		var got []opRow
		if err := json.Unmarshal([]byte(out), &got); err != nil || len(got) != 1 || got[0].ElapsedSeconds <= 0 {
			t.Fatalf("want one row of JSON with a time, got %v:\n%s", err, out)
		}
		got[0].ElapsedSeconds = 0
		want := []opRow{{
			Cluster: "default", Provider: "virtual", Namespace: "default", Name: "m1", Operation: "create",
			OperationID: "uid-m1.create.0", Attempt: 1, Replica: "one", State: "running", Progress: "booting",
		}}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("-want, +got:\n%s", diff)
		}
	})
	t.Run("None", func(t *testing.T) {
		t.Parallel()
		out, _, err := mcmctl(t, "ops", "m3", "--nats-url", url)
		if err != nil || out != "no operation in flight (replicas heard: 1)\n" {
			t.Errorf("want a line that says so, got %q, %v", out, err)
		}
	})
}

func TestOpRowOf(t *testing.T) {
	t.Parallel()
	now := time.Now()
	cases := map[string]struct {
		reason  string
		silence time.Duration
		op      *driverv1.OperationState
		state   string
		elapsed float64
	}{
		"Running": {
			"time went on since the session", time.Second,
			&driverv1.OperationState{Elapsed: durationpb.New(2 * time.Second)}, "running", 3,
		},
		"Settled": {
			"but not for what has ended", time.Second,
			&driverv1.OperationState{Elapsed: durationpb.New(2 * time.Second), Settled: true}, "settled", 2,
		},
		"Lost": {
			"nor for what nobody knows about", 2 * time.Second,
			&driverv1.OperationState{Elapsed: durationpb.New(2 * time.Second)}, "lost", 2,
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := opRowOf(replica{session: &driverv1.Session{}, at: now.Add(-tc.silence)}, tc.op, now)
			if got.State != tc.state || got.ElapsedSeconds != tc.elapsed {
				t.Errorf("%s: want %s %v, got %s %v", tc.reason, tc.state, tc.elapsed, got.State, got.ElapsedSeconds)
			}
		})
	}
}
