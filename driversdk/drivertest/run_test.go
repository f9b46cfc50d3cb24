package drivertest

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
)

// patience bounds what the replicas of these tests wait for.
const patience = 20 * time.Second

const testToken = "a-token-that-nobody-may-tell"

// atOnce is how many tests run at a time: they wait for what does not come, and
// leave the cores alone meanwhile.
const atOnce = 16

func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", strconv.Itoa(atOnce)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1) //nolint:forbidigo // as every TestMain
	}
	os.Exit(m.Run()) //nolint:forbidigo // as every TestMain
}

func testConfig(url string) Config {
	return Config{
		NATS: bus.Config{URLs: []string{url}}, Provider: testProvider, Timeout: 10 * time.Second, Repeat: 2,
		Class: Class{
			Namespace: "ns", Name: "small", ProviderSpec: []byte(`{"size":"small"}`), SecretRef: Reference{"ns", "cloud"},
		},
		Secrets: []Secret{{Namespace: "ns", Name: "cloud", Data: map[string][]byte{"token": []byte(testToken)}}},
	}
}

// A driver that keeps the contract passes, also one that uses nothing of ours.
func TestRun(t *testing.T) {
	t.Parallel()
	for name, plain := range map[string]bool{"full": false, "plain": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := bustest.Server(t, embedded.Options{StoreDir: t.TempDir()})
			newReplica(t, srv.URL(), "", plain)
			Run(t, testConfig(srv.URL()))
		})
	}
}

// A driver that breaks a clause fails, and the clause is named.
func TestCheck_Broken(t *testing.T) {
	t.Parallel()
	both := []fault{
		"SUBJECT-4", "ENV-1", "ENV-2", "ENV-3", "ENV-4", "ENV-5", "ENV-8", "ENV-9", "CREATE-1", "CREATE-2", "CREATE-3",
		"CREATE-4", "MACHINE-1", "MACHINE-2", "STATUS-1", "STATUS-2", "LIST-1", "LIST-2", "DELETE-1", "DELETE-2", "DELETE-3",
		"INSTANCE-1", "INSTANCE-2", "VALIDATE-1", "VALIDATE-2", "REF-1", "FETCH-2", "FETCH-3", "STATUSTEXT-1", "RESULT-1",
	}
	cases := map[bool][]fault{
		true: {"SUBJECT-3", "SUBJECT-4", "ENV-5", "ENV-8", "CREATE-1", "DELETE-1", "STATUSTEXT-1"}, // the checks are the same
		false: append([]fault{
			"SUBJECT-1", "SUBJECT-2", "ENV-6", "ENV-7", "IDENTITY-2", "RUN-1", "RUN-2", "RESULT-2", "RESULT-4", "ACCEPT-1", "ACCEPT-2",
			"BUSY-1", "CANCEL-1", "OPS-1", "CHANGED-1", "CLAIM-1", "CLAIM-2", "CLAIM-3", "CLAIM-4", "CLAIM-5", "FENCE-1", "FENCE-2",
			"SESSION-1", "SESSION-2", "SESSION-3", "HELLO-1",
		}, both...),
	}
	for plain, faults := range cases {
		for _, f := range faults {
			name := "full/" + string(f)
			if plain {
				name = "plain/" + string(f)
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				wantBroken(t, f, plain)
			})
		}
	}
}

func wantBroken(t *testing.T, f fault, plain bool) {
	t.Helper()
	srv := bustest.Server(t, embedded.Options{StoreDir: t.TempDir()})
	newReplica(t, srv.URL(), f, plain)
	cfg := testConfig(srv.URL())
	cfg.Timeout, cfg.Patience = 5*time.Second, 3*time.Second // waiting in vain is part of it
	// What is seen of every frame needs frames to be seen.
	cfg.Only = []string{"LIST-2", string(f)}
	if f == "MACHINE-1" {
		cfg.Only = []string{"MACHINE-1"}
	}
	report, err := Check(t.Context(), cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	var failed []string
	for _, found := range report.Of(Failed) {
		failed = append(failed, found.ID)
	}
	if !slices.Contains(failed, string(f)) || report.OK() {
		t.Errorf("the driver breaks %s, and these were found broken: %q\n%+v", f, failed, report.Findings)
	}
}

// A driver that never comes is told from one that breaks the contract.
func TestCheck_Nobody(t *testing.T) {
	t.Parallel()
	srv := bustest.Server(t, embedded.Options{})
	cfg := testConfig(srv.URL())
	cfg.Wait = time.Millisecond
	if _, err := Check(t.Context(), cfg, nil); err == nil {
		t.Error("nobody is on the bus, and no error says so")
	}
}
