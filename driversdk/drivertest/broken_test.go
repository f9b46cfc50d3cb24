package drivertest

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// The clauses that full replicas are made to break, and those of plain drivers;
// what binds both is checked the same way, and broken by one of each kind.
var (
	brokenFull = []fault{
		"SUBJECT-1", "SUBJECT-2", "SUBJECT-4", "ENV-1", "ENV-2", "ENV-3", "ENV-4", "ENV-5", "ENV-6", "ENV-7", "ENV-8", "ENV-9",
		"CREATE-1", "CREATE-2", "CREATE-3", "CREATE-4", "IDENTITY-1", "IDENTITY-2", "MACHINE-1", "MACHINE-2", "INITIALIZE-1",
		"STATUS-1", "STATUS-2", "STATUS-3", "STATUS-4", "LIST-1", "LIST-2", "LIST-3", "DELETE-1", "DELETE-2", "DELETE-3",
		"INSTANCE-1", "INSTANCE-2", "VOLUMEIDS-1", "VALIDATE-1", "VALIDATE-2", "MIGRATECLASS-1",
		"RUN-1", "RUN-2", "RESULT-1", "RESULT-2", "RESULT-3", "RESULT-4", "ACCEPT-1", "ACCEPT-2", "BUSY-1", "CANCEL-1", "OPS-1",
		"REF-1", "CHANGED-1", "FETCH-1", "FETCH-2", "FETCH-3", "STATUSTEXT-1", "PROGRESS-1",
		"CLAIM-1", "CLAIM-2", "CLAIM-3", "CLAIM-4", "CLAIM-5", "FENCE-1", "FENCE-2", "FENCE-3",
		"SESSION-1", "SESSION-2", "SESSION-3", "HELLO-1",
	}
	brokenPlain = []fault{
		"SUBJECT-3", "SUBJECT-4", "ENV-5", "ENV-8", "CREATE-1", "DELETE-1", "STATUSTEXT-1", "RESULT-3", "STATUS-3", "LIST-3",
	}
)

// No clause that binds drivers goes unproved.
func TestBroken(t *testing.T) {
	t.Parallel()
	var want, have []string
	for _, c := range Clauses() {
		if !c.Manager {
			want = append(want, c.ID)
		}
	}
	for _, f := range slices.Concat(brokenFull, brokenPlain) {
		have = append(have, string(f))
	}
	slices.SortFunc(have, compareIDs)
	if diff := cmp.Diff(want, slices.Compact(have)); diff != "" {
		t.Errorf("clauses that bind drivers (-) and those that a driver breaks here (+):\n%s", diff)
	}
}

// A driver that breaks a clause fails, and the clause is named.
func TestCheck_Broken(t *testing.T) {
	t.Parallel()
	for name, kind := range map[string]struct {
		plain  bool
		faults []fault
	}{"full": {false, brokenFull}, "plain": {true, brokenPlain}} {
		for _, f := range kind.faults {
			t.Run(name+"/"+string(f), func(t *testing.T) {
				t.Parallel()
				wantBroken(t, traits{fault: f, plain: kind.plain})
			})
		}
	}
}

func wantBroken(t *testing.T, tr traits) {
	t.Helper()
	if tr.fault == "IDENTITY-1" {
		tr.identity = driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN
	}
	srv := bustest.Server(t, embedded.Options{StoreDir: t.TempDir()})
	cfg := lookInto(srv.URL(), startProcess(t, srv.URL(), tr))
	cfg.Timeout, cfg.Patience = 5*time.Second, 3*time.Second // waiting in vain is part of it
	// What is seen of every frame needs frames to be seen.
	cfg.Only = []string{"LIST-2", string(tr.fault)}
	if tr.fault == "MACHINE-1" {
		cfg.Only = []string{"MACHINE-1"}
	}
	report, err := Check(t.Context(), cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	if failed := idsOf(report.Of(Failed)); !slices.Contains(failed, string(tr.fault)) || report.OK() {
		t.Errorf("the driver breaks %s, and these were found broken: %q\n%+v", tr.fault, failed, report.Findings)
	}
}
