package drivertest

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// What full replicas do wrong, and plain drivers; what binds both is checked the same
// way. A clause that can be broken in several ways has them behind a slash.
var (
	brokenFull = []fault{
		"SUBJECT-1", "SUBJECT-2", "SUBJECT-4", "ENV-1", "ENV-2", "ENV-2/failed", "ENV-3", "ENV-4", "ENV-5", "ENV-6", "ENV-6/known", "ENV-6/hello", "ENV-7", "ENV-7/claim", "ENV-8", "ENV-8/failed",
		"ENV-9",
		"CREATE-1", "CREATE-2", "CREATE-3", "CREATE-4", "IDENTITY-1", "IDENTITY-2", "MACHINE-1", "MACHINE-2", "OWNER-1", "INITIALIZE-1",
		"STATUS-1", "STATUS-2", "STATUS-3", "STATUS-4", "LIST-1", "LIST-2", "LIST-3", "DELETE-1", "DELETE-2", "DELETE-2/id", "DELETE-3", "DELETE-3/unasked",
		"INSTANCE-1", "INSTANCE-2", "VOLUMEIDS-1", "VALIDATE-1", "VALIDATE-2", "MIGRATECLASS-1",
		"RUN-1", "RUN-2", "RUN-2/attempt", "RUN-2/kept", "RUN-2/superseded", "RUN-2/failed", "RUN-2/unset", "RUN-2/first", "RUN-2/last", "RESULT-1", "RESULT-1/late",
		"RESULT-2", "RESULT-2/second", "RESULT-2/newest", "RESULT-2/failures", "RESULT-2/session", "RESULT-3", "RESULT-3/recover", "RESULT-3/fenced", "RESULT-4",
		"RESULT-5", "RESULT-5/attached", "RESULT-6", "RESULT-6/fenced", "ACCEPT-1", "ACCEPT-2", "BUSY-1", "CANCEL-1",
		"OPS-1", "OPS-1/forgets", "OPS-1/earlier", "OPS-1/fenced",
		"REF-1", "REF-1/list", "REF-1/secret", "CHANGED-1", "CHANGED-1/secret", "FETCH-1", "FETCH-2", "FETCH-3", "FETCH-5", "FETCH-5/secret", "FETCH-5/bootstrap", "STATUSTEXT-1", "PROGRESS-1",
		"CLAIM-1", "CLAIM-1/epoch", "CLAIM-1/name", "CLAIM-2", "CLAIM-3", "CLAIM-3/unset", "CLAIM-3/store", "CLAIM-4",
		"CLAIM-5", "CLAIM-5/unknown", "CLAIM-5/code", "CLAIM-5/retry", "CLAIM-5/node", "CLAIM-5/sealed", "CLAIM-5/once", "CLAIM-5/acknowledged", "CLAIM-6", "CLAIM-6/busy",
		"FENCE-1", "FENCE-1/state", "FENCE-1/replica", "FENCE-1/blind", "FENCE-1/again", "FENCE-1/lost", "FENCE-1/unanswered", "FENCE-2", "FENCE-3", "FENCE-3/again",
		"SESSION-1", "SESSION-2", "HELLO-1", "HELLO-2",
		"GROUP-1", "GROUP-3", "GROUP-4", "GROUP-5", "GROUP-5/field", "GROUP-6", "GROUP-7", "GROUP-8",
		"GROUP-9", "GROUP-10", "GROUP-11", "GROUP-11/read", "INSTANCES-1", "INSTANCES-2", "INSTANCES-3",
		"RESIZE-1", "RESIZE-1/steps", "RESIZE-2", "RESIZE-3", "RESIZE-4", "RESIZE-4/process",
		"REMOVE-1", "REMOVE-1/part", "REMOVE-2", "REMOVE-3", "REMOVE-4",
	}
	brokenPlain = []fault{
		"SUBJECT-3", "SUBJECT-4", "ENV-5", "ENV-8", "RESULT-1/late", "CREATE-1", "DELETE-1", "STATUSTEXT-1", "RESULT-3", "RESULT-3/recover", "STATUS-3", "LIST-3", "FETCH-5",
	}
)

func (f fault) clause() string {
	id, _, _ := strings.Cut(string(f), "/")

	return id
}

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
		have = append(have, f.clause())
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
	srv := bustest.Server(t, embedded.Options{})
	p := startProcess(t, srv.URL(), tr)
	cfg := lookInto(srv.URL(), p)
	cfg.Timeout, cfg.Patience = 5*time.Second, 3*time.Second // waiting in vain is part of it
	// What is seen of every frame needs frames to be seen.
	clause := tr.fault.clause()
	cfg.Only = []string{"LIST-2", clause}
	switch tr.fault {
	case "MACHINE-1":
		cfg.Only = []string{clause}
	case "RESIZE-4/process": // takes another process
		cfg.Only = []string{"GROUP-4", clause}
	case "SESSION-1": // a few sessions in a row take their time
		cfg.Patience = patience
	}
	report, err := Check(t.Context(), cfg, nil)
	if err != nil && strings.Contains(err.Error(), "["+clause+"]") {
		return // no clause can be checked, and the error names the one that is to blame
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range report.Of(Failed) {
		t.Logf("%s: %s", f.ID, f.Detail)
	}
	if failed := idsOf(report.Of(Failed)); !slices.Contains(failed, clause) || report.OK() {
		t.Errorf("the driver breaks %s, and these were found broken: %q\n%+v", tr.fault, failed, report.Findings)
	}
	wantPools(t, p)
}
