package drivertest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
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
			Namespace: "ns", Name: "small", ProviderSpec: []byte(`{"size":"small"}`), SecretRef: Reference{Namespace: "ns", Name: "cloud"},
		},
		Secrets: []Secret{{Namespace: "ns", Name: "cloud", Data: map[string][]byte{"token": []byte(testToken)}}},
	}
}

// lookInto is testConfig with all that the suite may be lent.
func lookInto(url string, p *process) Config {
	cfg := testConfig(url)
	cfg.OtherCluster, cfg.Cloud, cfg.Process = otherCluster, p.cloud.hooks(), p
	if !p.traits.plain {
		cfg.NodeGroup, cfg.OtherNodeGroup = "pool-a", "pool-b"
	}

	return cfg
}

// A driver that keeps the contract passes, also when nothing lends a look.
func TestRun(t *testing.T) {
	t.Parallel()
	srv := bustest.Server(t, embedded.Options{})
	startProcess(t, srv.URL(), traits{})
	Run(t, testConfig(srv.URL()))
}

// With a look lent, nothing is skipped but what binds others.
func TestCheck(t *testing.T) {
	t.Parallel()
	token := driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN
	cases := map[string]struct {
		reason  string
		traits  traits
		skipped func(Clause) bool
	}{
		"unique name": {"a full replica whose names are unique", traits{}, func(c Clause) bool {
			return c.binds == plainly || c.ID == "IDENTITY-1"
		}},
		"token": {"a full replica that passes tokens", traits{identity: token}, func(c Clause) bool {
			return c.binds == plainly || c.ID == "IDENTITY-2"
		}},
		"plain": {"a driver that only answers", traits{plain: true}, func(c Clause) bool {
			return c.binds == full || c.binds == groups
		}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := bustest.Server(t, embedded.Options{})
			p := startProcess(t, srv.URL(), tc.traits)
			report, err := Check(t.Context(), lookInto(srv.URL(), p), nil)
			if err != nil {
				t.Fatal(err)
			}
			var skipped []string
			for _, c := range Clauses() {
				if tc.skipped(c) {
					skipped = append(skipped, c.ID)
				}
			}
			if diff := cmp.Diff(skipped, idsOf(report.Of(Skipped))); diff != "" {
				t.Errorf("%s: skipped clauses (-want +got):\n%s\n%v", tc.reason, diff, report.Of(Skipped))
			}
			if !report.OK() {
				t.Errorf("%s: %v, left: %q", tc.reason, report.Of(Failed), report.Left)
			}
			wantPools(t, p)
		})
	}
}

// A driver that needs neither class nor secret to list has to keep up with them all the
// same, and is judged by what it makes next.
func TestCheck_ListsWithoutClass(t *testing.T) {
	t.Parallel()
	srv := bustest.Server(t, embedded.Options{})
	p := startProcess(t, srv.URL(), traits{sees: true})
	report, err := Check(t.Context(), lookInto(srv.URL(), p), nil)
	if err != nil {
		t.Fatal(err)
	}
	if !report.OK() {
		t.Errorf("a good driver: %v, left: %q", report.Of(Failed), report.Left)
	}
	for _, id := range []string{"REF-1", "CHANGED-1"} {
		if !slices.Contains(idsOf(report.Of(Passed)), id) {
			t.Errorf("%s was not proved", id)
		}
		for _, f := range []fault{fault(id), fault(id + "/secret")} {
			t.Run(string(f), func(t *testing.T) {
				t.Parallel()
				wantBroken(t, traits{fault: f, sees: true})
			})
		}
	}
}

// wantPools wants node groups as they were before the suite came.
func wantPools(t *testing.T, p *process) {
	t.Helper()
	pools := p.cloud.pools
	pools.mu.Lock()
	defer pools.mu.Unlock()
	if a, b := pools.all["pool-a"].size(""), pools.all["pool-b"].size(""); a != 1 || b != 0 {
		t.Errorf("node groups were left with %d and %d instances, not 1 and 0", a, b)
	}
}

func idsOf(findings []Finding) []string {
	var ids []string
	for _, f := range findings {
		ids = append(ids, f.ID)
	}

	return ids
}

// A driver without node groups is not told that its groups are in order.
func TestCheck_NoNodeGroups(t *testing.T) {
	t.Parallel()
	srv := bustest.Server(t, embedded.Options{})
	startProcess(t, srv.URL(), traits{plain: true})
	cfg := testConfig(srv.URL())
	cfg.NodeGroup = "pool-a"
	if _, err := Check(t.Context(), cfg, nil); err == nil || !strings.Contains(err.Error(), "pool-a") {
		t.Errorf("the driver serves no node groups, and no error names the one that was to be looked at: %v", err)
	}
}

// A clause that was being looked at when checking was interrupted is not broken: the
// driver has had no say.
func TestCheck_Interrupted(t *testing.T) {
	t.Parallel()
	srv := bustest.Server(t, embedded.Options{})
	p := startProcess(t, srv.URL(), traits{})
	ctx, interrupt := context.WithCancelCause(t.Context())
	cfg := lookInto(srv.URL(), p)
	cfg.Strict, cfg.Only = true, []string{"LIST-2", "RESULT-3", "FENCE-3"}
	hold := cfg.Cloud.Hold
	cfg.Cloud.Hold = func(ctx context.Context, machine string) (func(), error) {
		interrupt(errors.New("enough"))

		return hold(ctx, machine)
	}
	report, err := Check(ctx, cfg, nil)
	if err == nil || report == nil || err.Error() != "enough" {
		t.Fatalf("%v, %+v; want a report, and why it ends early", err, report)
	}
	var end strings.Builder
	if err := report.WriteSummary(&end); err != nil {
		t.Fatal(err)
	}
	if passed, skipped := idsOf(report.Of(Passed)), idsOf(report.Of(Skipped)); !report.OK() ||
		!slices.Equal(passed, []string{"LIST-2"}) || !slices.Equal(skipped, []string{"RESULT-3"}) || !strings.Contains(end.String(), "  RESULT-3: enough\n") {
		t.Errorf("passed %q, skipped %q, want LIST-2 and RESULT-3:\n%s", passed, skipped, end.String())
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
