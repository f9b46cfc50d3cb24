package main

import (
	"context"
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go/micro"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestDrivers(t *testing.T) {
	t.Parallel()
	url := startBus(t)
	startReplica(t, url, replica.Config{
		Provider: "virtual", Replica: "one", Version: "1.2.3", Hostname: "node-a", Slots: 7,
		Kind: "VirtualSpec", APIVersions: []string{"v1", "v2"}, Clusters: []string{"default", "other"},
	}, ok)
	startReplica(t, url, replica.Config{Provider: "metal", Replica: "two", Version: "0.1.0", Hostname: "node-b"}, ok)

	type row struct{ Cluster, Provider, Replica, Version, Host, State, Running, Slots string }
	one := row{"default", "virtual", "one", "1.2.3", "node-a", "serving", "0", "7"}
	other := one
	other.Cluster = "other"
	two := row{"default", "metal", "two", "0.1.0", "node-b", "serving", "0", strconv.Itoa(replica.DefaultSlots())}
	cases := map[string]struct {
		reason string
		args   []string
		want   []row
	}{
		"All":      {"one row for each replica and cluster, in order", nil, []row{two, one, other}},
		"Provider": {"the argument selects, whatever its case", []string{"Virtual"}, []row{one, other}},
		"Cluster":  {"--cluster selects", []string{"--cluster", "other"}, []row{other}},
		"Wide":     {"wide adds columns and changes none", []string{"metal", "-o", "wide"}, []row{two}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, _, err := mcmctl(t, append([]string{"drivers", "--nats-url", url}, tc.args...)...)
			if err != nil {
				t.Fatalf("mcmctl drivers: %v", err)
			}
			var got []row
			for _, r := range table(t, out) {
				got = append(got, row{
					r["CLUSTER"], r["PROVIDER"], r["REPLICA"], r["VERSION"], r["HOST"], r["STATE"], r["RUNNING"], r["SLOTS"],
				})
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("%s\n-want, +got:\n%s", tc.reason, diff)
			}
		})
	}

	t.Run("JSON", func(t *testing.T) {
		t.Parallel()
		out, _, err := mcmctl(t, "drivers", "virtual", "--nats-url", url, "--cluster", "default", "-o", "json")
		if err != nil {
			t.Fatalf("mcmctl drivers: %v", err)
		}
		var got []driverRow
		if err := json.Unmarshal([]byte(out), &got); err != nil || len(got) != 1 {
			t.Fatalf("want one row of JSON, got %v:\n%s", err, out)
		}
		if got[0].StartedAt.IsZero() || got[0].LastSeen.IsZero() {
			t.Errorf("startedAt and lastSeen are not set:\n%s", out)
		}
		got[0].StartedAt, got[0].LastSeen = time.Time{}, time.Time{}
		want := []driverRow{{
			Cluster: "default", Provider: "virtual", Replica: "one", Version: "1.2.3", Host: "node-a", State: "serving",
			Slots: 7, CreateIdentity: "token", Kind: "VirtualSpec", APIVersions: []string{"v1", "v2"},
			Capabilities: []string{"create", "delete", "list"}, Protocol: 1, Requests: new(0), Errors: new(0),
		}}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("-want, +got:\n%s", diff)
		}
	})

	t.Run("OtherProviders", func(t *testing.T) {
		t.Parallel()
		_, _, err := mcmctl(t, "drivers", "vritual", "--nats-url", url)
		if err == nil || !strings.Contains(err.Error(), "vritual") || !strings.Contains(err.Error(), "metal, virtual") {
			t.Errorf("want an error that names the provider and those that exist, got: %v", err)
		}
	})

	t.Run("Watch", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var out, errOut output
		done := make(chan error, 1)
		go func() { done <- execute(ctx, &out, &errOut, "drivers", "--watch", "--nats-url", url, "-o", "json") }()
		bustest.Eventually(t, "two refreshes", func() bool { return strings.Count(out.String(), "\n") >= 2 })
		cancel()
		if err := <-done; err != nil {
			t.Errorf("want an interrupted watch to end well, got: %v", err)
		}
		line, _, _ := strings.Cut(out.String(), "\n")
		var rows []driverRow
		if err := json.Unmarshal([]byte(line), &rows); err != nil || len(rows) != 3 {
			t.Errorf("want a line with three replicas, got %v:\n%s", err, line)
		}
	})
}

func TestFigures(t *testing.T) {
	t.Parallel()
	url := startBus(t)
	startReplica(t, url, replica.Config{Provider: "virtual", Replica: "one"}, func(context.Context, *replica.Task) *driverv1.Result {
		return &driverv1.Result{Status: &driverv1.Status{Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED, Message: "sold out"}}
	})
	client, err := caller.New(connectTo(t, url), caller.Config{Cluster: "default", Operations: &caller.StreamConfig{Memory: true}, Logger: bustest.Quiet()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	bustest.Eventually(t, "the replica", func() bool { return len(client.Replicas()) == 1 })
	for _, name := range []string{"m1", "m2"} {
		if out, err := client.Call(t.Context(), createRequest(name)); bus.CodeOf(err) != driverv1.Code_CODE_RESOURCE_EXHAUSTED {
			t.Fatalf("create of %s: %+v, %v", name, out, err)
		}
	}
	// A driver that only answers, by means of what NATS's clients bring along.
	plain, err := micro.AddService(bustest.Raw(t, url), micro.Config{Name: bus.ServiceName("metal"), Version: "0.0.1"})
	if err != nil {
		t.Fatal(err)
	}
	err = plain.AddGroup("mcm.v1.default.plain.metal").AddEndpoint("create", micro.HandlerFunc(func(micro.Request) {}),
		micro.WithEndpointSubject("create.*.*"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := micro.AddService(bustest.Raw(t, url), micro.Config{Name: "other-service", Version: "0.0.1"}); err != nil {
		t.Fatal(err)
	}

	out, _, err := mcmctl(t, "drivers", "-o", "wide", "--nats-url", url)
	if err != nil {
		t.Fatalf("mcmctl drivers: %v", err)
	}
	type row struct{ Provider, State, Slots, Requests, Errors, LastError string }
	var got []row
	for _, r := range table(t, out) {
		got = append(got, row{r["PROVIDER"], r["STATE"], r["SLOTS"], r["REQUESTS"], r["ERRORS"], r["LAST-ERROR"]})
		if measured := r["LATENCY"] != "-"; measured != (r["STATE"] == "serving") {
			t.Errorf("latency of %s is %s", r["PROVIDER"], r["LATENCY"])
		}
	}
	want := []row{
		{"metal", "plain", "-", "0", "0", "-"},
		{"virtual", "serving", strconv.Itoa(replica.DefaultSlots()), "2", "2", "8:sold out"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want, +got:\n%s\n%s", diff, out)
	}
	if out, _, err := mcmctl(t, "drivers", "--cluster", "other", "--nats-url", url, "--timeout", "200ms"); err == nil {
		t.Errorf("want no driver of another control plane, got:\n%s", out)
	}
}

func TestNothingToShow(t *testing.T) {
	t.Parallel()
	url := startBus(t)
	cases := map[string]struct {
		reason string
		args   []string
		want   []string
	}{
		"NoDriver": {
			"the error for an empty bus names the server and the time",
			[]string{"drivers"},
			[]string{"no driver replica of any cluster was heard within 100ms on " + url, "start a driver"},
		},
		"NoDriverOfCluster": {
			"and the cluster", []string{"ops", "--cluster", "prod"}, []string{"no driver replica of cluster prod"},
		},
		"NoServer": {
			"a wrong URL is named, with what to check",
			[]string{"drivers", "--nats-url", "nats://127.0.0.1:1"},
			[]string{"nats://127.0.0.1:1", "is the URL right?"},
		},
		"Insecure": {
			"plaintext beyond this host needs a flag",
			[]string{"ops", "--nats-url", "nats://192.0.2.1:4222"},
			[]string{"192.0.2.1", "--nats-allow-insecure"},
		},
		"NoCredentials": {
			"a credentials file that is not there is named",
			[]string{"sub", "--nats-creds", "testdata/none.creds"},
			[]string{"testdata/none.creds", "no such file"},
		},
		"BadCluster":  {"a cluster is one token", []string{"ops", "--cluster", "a.b"}, []string{"--cluster", `"a.b"`}},
		"BadTimeout":  {"listening takes time", []string{"ops", "--timeout", "0s"}, []string{"--timeout 0s"}},
		"BadFormat":   {"formats are listed", []string{"ops", "-o", "xml"}, []string{"xml", "table, wide, json"}},
		"BadFlag":     {"the help is pointed at", []string{"ops", "--al"}, []string{"--al", "mcmctl ops --help"}},
		"Misspelt":    {"the nearest command is offered", []string{"driver5"}, []string{`"driver5"`, "did you mean drivers"}},
		"NoCommand":   {"the help is pointed at", []string{"frobnicate"}, []string{`"frobnicate"`, "mcmctl --help"}},
		"BadCount":    {"counts are not negative", []string{"sub", "--count", "-1"}, []string{"--count"}},
		"NotSoMany":   {"fewer messages than asked for is an error", []string{"sub", "--cluster", "silent", "--for", "50ms", "-n", "2"}, []string{"0 of 2"}},
		"NoFile":      {"a missing file is named", []string{"decode", "testdata/none"}, []string{"testdata/none"}},
		"TwoMachines": {"one machine at a time", []string{"ops", "a", "b"}, []string{"at most 1 arg"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, _, err := mcmctl(t, append([]string{"--nats-url", url, "--timeout", "100ms"}, tc.args...)...)
			if err == nil {
				t.Fatalf("%s: want an error", tc.reason)
			}
			for _, want := range append(tc.want, "") {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%s\nwant %q in: %v", tc.reason, want, err)
				}
			}
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("want one line, got: %v", err)
			}
		})
	}
}

func TestStates(t *testing.T) {
	t.Parallel()
	now := time.Now()
	cases := map[string]struct {
		reason  string
		session *driverv1.Session
		silence time.Duration
		want    string
	}{
		"Serving":  {"heard within the contract's 1.5 s", &driverv1.Session{}, time.Second, "serving"},
		"Refused":  {"it speaks another protocol", &driverv1.Session{ProtocolMin: 5, Protocol: 7}, 0, "refused"},
		"Draining": {"it says so itself", &driverv1.Session{Draining: true}, 0, "draining"},
		"Silent":   {"mcm takes it for dead, whatever it said", &driverv1.Session{Draining: true}, 2 * time.Second, "silent"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := stateOf(knownReplica{session: tc.session, at: now.Add(-tc.silence)}, now); got != tc.want {
				t.Errorf("%s: want %s, got %s", tc.reason, tc.want, got)
			}
		})
	}
}

func TestFleetForgets(t *testing.T) {
	t.Parallel()
	f := newFleet(anyCluster)
	f.onSession(&driverv1.Session{Provider: "virtual", Replica: "stays"})
	f.onSession(&driverv1.Session{Provider: "virtual", Replica: "stops"})
	f.onSession(&driverv1.Session{Provider: "virtual", Replica: "stops", Stopped: true})
	if got := f.list(time.Now()); len(got) != 1 || got[0].session.GetReplica() != "stays" {
		t.Errorf("want only the replica that has not stopped, got %v", got)
	}
	if got := f.list(time.Now().Add(forgetAfter + time.Second)); len(got) != 0 {
		t.Errorf("want a replica that went without a word to be forgotten, got %v", got)
	}
}

// TestEnvironment reads the variables of the nats CLI for flags that are not set.
func TestEnvironment(t *testing.T) {
	url := startBus(t)
	for _, variable := range []string{"NATS_CREDS", "NATS_CA", "NATS_CERT"} {
		t.Run(variable, func(t *testing.T) {
			t.Setenv("NATS_URL", url)
			t.Setenv(variable, "testdata/none.file")
			if variable == "NATS_CERT" {
				t.Setenv("NATS_KEY", "testdata/none.key")
			}
			_, _, err := mcmctl(t, "drivers", "--timeout", "100ms")
			if err == nil || !strings.Contains(err.Error(), "testdata/none.file") {
				t.Errorf("want an error that names the file, got: %v", err)
			}
			flag := "--nats-" + strings.ToLower(strings.TrimPrefix(variable, "NATS_"))
			_, _, err = mcmctl(t, "drivers", "--timeout", "100ms", flag, "testdata/other.file")
			if err == nil || !strings.Contains(err.Error(), "testdata/other.file") {
				t.Errorf("want the flag to win, got: %v", err)
			}
		})
	}
}
