package replica_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go/micro"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestDiscovery(t *testing.T) {
	t.Parallel()
	const took = 30 * time.Millisecond
	r := optest.NewRig(t)
	rep := r.Replica(t, func(_ context.Context, task *replica.Task) *driverv1.Result {
		if task.Operation == driverv1.Operation_OPERATION_STATUS {
			return &driverv1.Result{Status: &driverv1.Status{Code: driverv1.Code_CODE_NOT_FOUND, Message: "gone"}}
		}
		busy := time.NewTimer(took)
		defer busy.Stop()
		<-busy.C

		return optest.Created(task)
	})
	for range 3 {
		optest.WantOK(t, bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, optest.Create("m"))))
	}
	_, err := r.Caller.Call(t.Context(), optest.Status("m"))
	optest.WantError(t, err, bus.OriginDriver, driverv1.Code_CODE_NOT_FOUND)

	nc := bustest.Raw(t, r.NATS.URL())
	ask := func(subject string, v any) {
		t.Helper()
		m, err := nc.Request(subject, nil, 10*time.Second)
		if err != nil {
			t.Fatalf("%s: %v", subject, err)
		}
		if err := json.Unmarshal(m.Data, v); err != nil {
			t.Fatalf("%s: %v in %s", subject, err, m.Data)
		}
	}
	name := bus.ServiceName(optest.Provider)
	for _, tail := range []string{"", "." + name, "." + name + "." + rep.Replica()} {
		var ping micro.Ping
		ask("$SRV.PING"+tail, &ping)
		if ping.Type != micro.PingResponseType || ping.ID != rep.Replica() || ping.Name != name {
			t.Errorf("ping%s = %+v", tail, ping)
		}
	}
	var info micro.Info
	ask("$SRV.INFO."+name, &info)
	if info.Version != "1.2.3" || info.Metadata["create_identity"] != "token" || info.Metadata["slots"] != "4" ||
		info.Metadata["provider"] != optest.Provider || info.Metadata["draining"] != "false" || len(info.Endpoints) != 9 {
		t.Errorf("info = %+v", info)
	}
	for _, e := range info.Endpoints {
		want := "mcm.v1.default.driver.virtual." + e.Name + ".*.*"
		if e.Name == "nodegroups" {
			want = "mcm.v1.default.nodegroup.virtual.*"
		}
		if e.Subject != want {
			t.Errorf("endpoint %s is on %s, want %s", e.Name, e.Subject, want)
		}
	}
	var stats micro.Stats
	ask("$SRV.STATS."+name, &stats)
	figures := map[string]*micro.EndpointStats{}
	for _, e := range stats.Endpoints {
		figures[e.Name] = e
	}
	if e := figures["create"]; e.NumRequests != 3 || e.NumErrors != 0 || e.AverageProcessingTime < took {
		t.Errorf("create = %+v, want 3 requests of at least %s", e, took)
	}
	if e := figures["status"]; e.NumRequests != 1 || e.NumErrors != 1 || e.LastError != "5:gone" {
		t.Errorf("status = %+v, want one failed request", e)
	}
	var data map[string]uint64
	if err := json.Unmarshal(figures["create"].Data, &data); err != nil || data["unacknowledged"] != 3 {
		t.Errorf("data = %v, %v; want 3 unacknowledged results", data, err)
	}
}

// A replica of several clusters has an endpoint for each, with its own figures.
func TestDiscoveryOfSeveralClusters(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	r.Replica(t, func(_ context.Context, task *replica.Task) *driverv1.Result { return optest.Created(task) },
		func(cfg *replica.Config) {
			cfg.Clusters = []string{optest.Cluster, "other"}
			cfg.Capabilities = []driverv1.Operation{driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_STATUS}
		})
	optest.WantOK(t, bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, optest.Create("m"))))
	m, err := bustest.Raw(t, r.NATS.URL()).Request("$SRV.STATS."+bus.ServiceName(optest.Provider), nil, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	var stats micro.Stats
	if err := json.Unmarshal(m.Data, &stats); err != nil {
		t.Fatal(err)
	}
	got := map[string]int{}
	for _, e := range stats.Endpoints {
		got[e.Name+" "+e.Subject] = e.NumRequests
	}
	want := map[string]int{
		"create-default mcm.v1.default.driver.virtual.create.*.*": 1,
		"status-default mcm.v1.default.driver.virtual.status.*.*": 0,
		"create-other mcm.v1.other.driver.virtual.create.*.*":     0,
		"status-other mcm.v1.other.driver.virtual.status.*.*":     0,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("requests by endpoint (-want +got):\n%s", diff)
	}
}

func TestDiscoveryAnswersNoForeignSubject(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	r.Replica(t, g.Handle)
	nc := bustest.Raw(t, r.NATS.URL())
	const victim = "mcm.v1.default.driver.other.delete.shop.m"
	seen, err := nc.SubscribeSync(victim)
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.PublishRequest("$SRV.PING", victim, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := nc.Request("$SRV.PING", nil, 10*time.Second); err != nil { // answered after the first
		t.Fatal(err)
	}
	if n, _, _ := seen.Pending(); n != 0 {
		t.Errorf("the replica published %d messages where the request said", n)
	}
}
