package main

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestOps(t *testing.T) {
	t.Parallel()
	url := startBus(t)
	started, release := make(chan string, 2), make(chan struct{})
	startReplica(t, url, replica.Config{Provider: "virtual", Replica: "one"},
		func(_ context.Context, task *replica.Task) *driverv1.Result {
			name := bus.MachineOf(task.Request).GetName()
			started <- name
			if name == "m2" {
				return &driverv1.Result{Status: &driverv1.Status{Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED}}
			}
			task.Progress("booting")
			<-release // however long that takes: what is seen is a create that runs

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
		"CLUSTER": "default", "PROVIDER": "virtual", "MACHINE": "default/m1", "OP": "create", "TRY": "0", "ATTEMPT": "1", "MESSAGE": "-",
		"REPLICA": "one", "STATE": "running", "PROGRESS": "booting", "OPERATION-ID": "uid-m1.create.0",
	}
	m2 := map[string]string{
		"CLUSTER": "default", "PROVIDER": "virtual", "MACHINE": "default/m2", "OP": "create", "TRY": "0", "ATTEMPT": "1", "MESSAGE": "-",
		"REPLICA": "one", "STATE": "settled ResourceExhausted", "PROGRESS": "-", "OPERATION-ID": "uid-m2.create.0",
	}
	cases := map[string]struct {
		reason string
		args   []string
		want   []map[string]string
	}{
		"All":       {"running ones, and settled ones that mcm has not acknowledged", nil, []map[string]string{m1, m2}},
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

// What has ended and is acknowledged, mcm alone knows of.
func TestOutcomes(t *testing.T) {
	t.Parallel()
	url := startBus(t)
	startReplica(t, url, replica.Config{Provider: "virtual", Replica: "one"}, ok)
	began := time.Now().Add(-time.Minute)
	audit := func(name, id string, waited time.Duration, code driverv1.Code) *driverv1.Audit {
		return &driverv1.Audit{
			Cluster: "default", Provider: "virtual", Namespace: "default", Name: name, OperationId: id,
			Operation: driverv1.Operation_OPERATION_CREATE, Attempts: 2, Replica: "two",
			Status: &driverv1.Status{Code: code, Message: "no more"}, StartedAt: timestamppb.New(began),
			Waited: durationpb.New(waited), Took: durationpb.New(3 * time.Second),
		}
	}
	stop, err := bus.ServeOutcomes(connectTo(t, url), "default", func() []*driverv1.Audit {
		return []*driverv1.Audit{
			audit("m2", "uid-m2.create.4", 2*time.Second, driverv1.Code_CODE_RESOURCE_EXHAUSTED),
			audit("m1", "uid-m1.create.0", time.Second, driverv1.Code_CODE_UNAVAILABLE),
		}
	}, func() *driverv1.OpsResponse {
		return &driverv1.OpsResponse{Operations: []*driverv1.OperationState{{
			OperationId: "uid-m3.delete.2", Operation: driverv1.Operation_OPERATION_DELETE, Provider: "virtual",
			Namespace: "default", Name: "m3", Elapsed: durationpb.New(time.Hour), LastProgress: "all replicas are busy",
		}}}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	row := func(name, id, try, code string) map[string]string {
		return map[string]string{
			"CLUSTER": "default", "PROVIDER": "virtual", "MACHINE": "default/" + name, "OP": "create", "TRY": try, "ATTEMPT": "2",
			"REPLICA": "two", "ELAPSED": "3.0s", "STATE": "ended " + code, "PROGRESS": "-", "OPERATION-ID": id, "MESSAGE": "no more",
		}
	}
	m1, m2 := row("m1", "uid-m1.create.0", "0", "Unavailable"), row("m2", "uid-m2.create.4", "4", "ResourceExhausted")
	m3 := map[string]string{
		"CLUSTER": "default", "PROVIDER": "virtual", "MACHINE": "default/m3", "OP": "delete", "TRY": "2", "ATTEMPT": "0",
		"REPLICA": "-", "ELAPSED": "60m", "STATE": "waiting", "PROGRESS": "all replicas are busy", "OPERATION-ID": "uid-m3.delete.2",
		"MESSAGE": "-",
	}
	cases := map[string]struct {
		reason string
		args   []string
		want   []map[string]string
	}{
		"All":     {"in the order in which they ended, after what waits", nil, []map[string]string{m3, m1, m2}},
		"Waiting": {"what waits, of one machine", []string{"m3"}, []map[string]string{m3}},
		"Machine": {"a machine by its name", []string{"m2"}, []map[string]string{m2}},
		"Cluster": {"asked by its name", []string{"--cluster", "default", "m1"}, []map[string]string{m1}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, _, err := mcmctl(t, append([]string{"ops", "-o", "wide", "--nats-url", url}, tc.args...)...)
			if err != nil {
				t.Fatalf("mcmctl ops: %v", err)
			}
			if diff := cmp.Diff(tc.want, table(t, out)); diff != "" {
				t.Errorf("%s\n-want, +got:\n%s", tc.reason, diff)
			}
		})
	}
}

// When no driver lives, what waits for one is what an operator looks for.
func TestOpsWithoutDrivers(t *testing.T) {
	t.Parallel()
	url := startBus(t)
	conn := connectTo(t, url)
	for _, cluster := range []string{"default", "west"} {
		stop, err := bus.ServeOutcomes(conn, cluster, func() []*driverv1.Audit { return nil }, func() *driverv1.OpsResponse {
			return &driverv1.OpsResponse{Operations: []*driverv1.OperationState{{
				OperationId: "uid-m1.create.0", Operation: driverv1.Operation_OPERATION_CREATE, Provider: "virtual",
				Namespace: "default", Name: "m1", LastProgress: "no driver serves virtual",
			}}}
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(stop)
	}
	lead, err := bus.NewAnnouncer(conn, "west")
	if err != nil {
		t.Fatal(err)
	}
	stopped := make(chan struct{})
	defer func() { <-stopped }()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { // as mcm does every five seconds
		defer close(stopped)
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			if err := lead.Hello(&driverv1.Hello{}); err != nil {
				t.Error(err)
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
	out, _, err := mcmctl(t, "ops", "--nats-url", url)
	if err != nil {
		t.Fatalf("mcmctl ops: %v", err)
	}
	var clusters []string
	for _, row := range table(t, out) {
		clusters = append(clusters, row["CLUSTER"])
	}
	if diff := cmp.Diff([]string{"default", "west"}, clusters); diff != "" {
		t.Errorf("what waits at all control planes is listed; -want, +got:\n%s\n%s", diff, out)
	}
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
		"Stuck": {
			"its call has not returned", time.Second,
			&driverv1.OperationState{Elapsed: durationpb.New(2 * time.Second), Stuck: true}, "stuck", 3,
		},
		"Lost": {
			"nor for one whose replica is silent", 2 * time.Second,
			&driverv1.OperationState{Elapsed: durationpb.New(2 * time.Second)}, "lost", 2,
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := opRowOf(knownReplica{session: &driverv1.Session{}, at: now.Add(-tc.silence)}, tc.op, now)
			if got.State != tc.state || got.ElapsedSeconds != tc.elapsed {
				t.Errorf("%s: want %s %v, got %s %v", tc.reason, tc.state, tc.elapsed, got.State, got.ElapsedSeconds)
			}
		})
	}
}
