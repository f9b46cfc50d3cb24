package cloud

import (
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

func TestLifeOfAnInstance(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{Knobs: cloudapi.Knobs{BootDelay: hour}})
	made := b.mustCreate(t, machine("m"))
	want := &cloudapi.Instance{
		Name: "m", MachineType: "small", Region: "here", Zone: "a", NodeName: "m", State: cloudapi.StatePending,
		ID: made.ID, ProviderID: "virtual:///here/" + made.ID,
		Tags:           map[string]string{cloudapi.TagMachineUID: "uid-of-m"},
		UserDataSHA256: "907972531fda6ca10e8f5a752a4b51503a859141764c6793c27a8cee67707316",
		Addresses:      []cloudapi.Address{{Type: "InternalIP", Address: "10.0.0.1"}, {Type: "Hostname", Address: "m"}},
	}
	if diff := cmp.Diff(want, made, cmpopts.IgnoreFields(cloudapi.Instance{}, "CreatedAt")); diff != "" {
		t.Errorf("created (-want +got):\n%s", diff)
	}
	b.mustCreate(t, machine("n"))
	for range 2 {
		if i, err := b.client.Initialize(t.Context(), made.ID); err != nil || !i.Initialized {
			t.Fatalf("initialize: %+v, %v", i, err)
		}
	}
	list, err := b.client.List(t.Context(), cloudapi.Filter{
		Name: "m", Tags: map[string]string{cloudapi.TagMachineUID: "uid-of-m"},
	})
	if err != nil || len(list) != 1 || list[0].ID != made.ID {
		t.Errorf("list: %v, %v; want the instance", list, err)
	}
	if none, err := b.client.List(t.Context(), cloudapi.Filter{Tags: map[string]string{"a": ""}}); err != nil || len(none) != 0 {
		t.Errorf("list of a tag that no instance has: %v, %v", none, err)
	}
	if err := b.client.Delete(t.Context(), made.ID); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"get":        func() error { _, err := b.client.Get(t.Context(), made.ID); return err }(),
		"delete":     b.client.Delete(t.Context(), made.ID),
		"initialize": func() error { _, err := b.client.Initialize(t.Context(), made.ID); return err }(),
	} {
		if codeOf(err) != cloudapi.CodeNotFound {
			t.Errorf("%s of an absent instance: %v, want %s", what, err, cloudapi.CodeNotFound)
		}
	}
}

func TestLog(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{Identity: cloudapi.IdentityToken, Knobs: cloudapi.Knobs{Quota: 1, BootDelay: hour}})
	i := b.mustCreate(t, withToken(machine("m"), "t"))
	b.mustCreate(t, withToken(machine("m"), "t"))
	if _, err := b.client.Create(t.Context(), withToken(machine("n"), "u")); codeOf(err) != cloudapi.CodeQuotaExceeded {
		t.Fatal(err)
	}
	if err := b.client.Delete(t.Context(), i.ID); err != nil {
		t.Fatal(err)
	}
	if err := b.client.Delete(t.Context(), "i-0"); codeOf(err) != cloudapi.CodeNotFound {
		t.Fatal(err)
	}

	got, err := b.admin.Log(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	const token = cloudapi.IdentityToken
	want := []cloudapi.LogEntry{
		{Op: "start", Event: "started", Identity: token},
		{Op: "create", Event: "begin", Name: "m", Token: "t", Identity: token, MachineUID: "uid-of-m"},
		{Op: "create", Event: "created", Name: "m", Token: "t", Identity: token, MachineUID: "uid-of-m", ID: i.ID},
		{Op: "create", Event: "begin", Name: "m", Token: "t", Identity: token, MachineUID: "uid-of-m"},
		{Op: "create", Event: "existing", Name: "m", Token: "t", Identity: token, MachineUID: "uid-of-m", ID: i.ID},
		{Op: "create", Event: "begin", Name: "n", Token: "u", Identity: token, MachineUID: "uid-of-n"},
		{
			Op: "create", Event: "refused", Name: "n", Token: "u", Identity: token, MachineUID: "uid-of-n",
			Status: 403, Code: "QuotaExceeded",
		},
		{Op: "delete", Event: "begin", Name: "m", MachineUID: "uid-of-m", ID: i.ID},
		{Op: "delete", Event: "deleted", Name: "m", MachineUID: "uid-of-m", ID: i.ID},
		{Op: "delete", Event: "refused", ID: "i-0", Status: 404, Code: "NotFound"},
	}
	for n := range want {
		want[n].Seq = uint64(n) + 1
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(cloudapi.LogEntry{}, "Time")); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
	if after, err := b.admin.Log(t.Context(), 9); err != nil || len(after) != 1 || after[0].Seq != 10 {
		t.Errorf("log after 9: %v, %v; want the last entry", after, err)
	}
	for _, where := range []string{b.log.String(), b.slog.String()} {
		if strings.Contains(where, "secret user data") || strings.Contains(where, testToken) {
			t.Error("a log holds user data or an API token")
		}
	}
	if diff := cmp.Diff(got, lines(t, b.log)); diff != "" {
		t.Errorf("the log as written differs from the log as served:\n%s", diff)
	}
}

// fullDisk takes a few writes and no more.
type fullDisk struct{ left int }

func (d *fullDisk) Write(p []byte) (int, error) {
	d.left--
	if d.left < 0 {
		return 0, errors.New("no space left on device")
	}

	return len(p), nil
}

func TestNothingHappensUnlogged(t *testing.T) {
	t.Parallel()
	disk := &fullDisk{left: 4} // the start, one create, and the beginning of another
	b := setup(t, Options{Log: disk, Knobs: cloudapi.Knobs{BootDelay: hour}})
	i := b.mustCreate(t, machine("m"))
	for what, call := range map[string]func() error{
		"create": func() error { _, err := b.client.Create(t.Context(), machine("n")); return err },
		"delete": func() error { return b.client.Delete(t.Context(), i.ID) },
	} {
		err := call()
		if codeOf(err) != cloudapi.CodeInternal || !strings.Contains(err.Error(), "no space left") {
			t.Errorf("%s: %v, want an error about the disk", what, err)
		}
	}
	disk.left = 100
	if s := b.cloud.Stats(); s.Live != 1 || s.Deleted != 0 {
		t.Errorf("%d live, %d deleted; want 1 and 0", s.Live, s.Deleted)
	}
	if err := b.client.Delete(t.Context(), i.ID); err != nil {
		t.Errorf("delete once there is space: %v", err)
	}
}

func TestAuth(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})
	list := func(token string) string {
		_, err := b.clientWith(t, token).List(t.Context(), cloudapi.Filter{})

		return codeOf(err)
	}
	tests := []struct {
		accepted []string // nil leaves them
		token    string
		want     string
	}{
		{token: testToken, want: "OK"},
		{token: "", want: cloudapi.CodeUnauthorized},
		{token: "wrong", want: cloudapi.CodeUnauthorized},
		{accepted: []string{"new", "newer"}, token: testToken, want: cloudapi.CodeUnauthorized},
		{token: "new", want: "OK"},
		{token: "newer", want: "OK"},
		{accepted: []string{}, token: "new", want: cloudapi.CodeUnauthorized},
		{accepted: []string{testToken}, token: testToken, want: "OK"},
	}
	for n, tc := range tests {
		if tc.accepted != nil {
			if err := b.admin.SetTokens(t.Context(), tc.accepted...); err != nil {
				t.Fatal(err)
			}
		}
		if got := list(tc.token); got != tc.want {
			t.Errorf("call %d with token %q: %s, want %s", n, tc.token, got, tc.want)
		}
	}

	stranger, err := cloudapi.NewAdmin(b.server.URL, "wrong", cloudapi.WithHTTPClient(b.server.Client()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stranger.Stats(t.Context()); codeOf(err) != cloudapi.CodeUnauthorized {
		t.Errorf("stats for a stranger: %v", err)
	}
	if _, err := stranger.Log(t.Context(), 0); codeOf(err) != cloudapi.CodeUnauthorized {
		t.Errorf("log for a stranger: %v", err)
	}
	if got := b.cloud.Stats().Refused; !maps.Equal(got, map[string]int{cloudapi.CodeUnauthorized: 4}) {
		t.Errorf("refused: %v, want 4 strangers", got)
	}
}

func TestBadRequests(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})
	tests := map[string]struct {
		method, path, body string
		status             int
		want               string
	}{
		"no JSON":        {"POST", "/v1/instances", `hello`, 400, "the body is invalid"},
		"unknown field":  {"POST", "/v1/instances", `{"nam": "x"}`, 400, `\"nam\"`},
		"wrong type":     {"POST", "/v1/instances", `{"name": 1}`, 400, `field \"name\" must be of type string`},
		"no name":        {"POST", "/v1/instances", `{"machineType": "x", "region": "x"}`, 400, "name is missing"},
		"no region":      {"POST", "/v1/instances", `{"name": "x", "machineType": "x"}`, 400, "region is missing"},
		"wrong identity": {"POST", "/v1/instances", `{"name":"x","machineType":"x","region":"x","identity":"x"}`, 400, "unique_name"},
		"more":           {"POST", "/v1/instances", `{"name": "x"} {}`, 400, "after the object"},
		"too large":      {"POST", "/v1/instances", `{"name": "` + strings.Repeat("x", maxBody) + `"}`, 413, "larger than"},
		"tag":            {"GET", "/v1/instances?tag=x", ``, 400, "key=value"},
		"duration":       {"PATCH", "/v1/admin/knobs", `{"bootDelay": "5"}`, 400, `\"5\" is not a duration`},
		"negative":       {"PATCH", "/v1/admin/knobs", `{"bootDelay": "-5s"}`, 400, "bootDelay"},
		"pattern":        {"PATCH", "/v1/admin/knobs", `{"hold": ["["]}`, 400, "hold"},
		"knob":           {"PATCH", "/v1/admin/knobs", `{"bootdelays": "5s"}`, 400, "bootdelays"},
		"fault":          {"PATCH", "/v1/admin/knobs", `{"faults": [{"operation": "x"}]}`, 400, "faults[0]"},
		"release":        {"POST", "/v1/admin/release", `{"name": "["}`, 400, "is not a pattern"},
		"empty token":    {"POST", "/v1/admin/tokens", `{"tokens": [""]}`, 400, "empty"},
		"after":          {"GET", "/v1/admin/log?after=x", ``, 400, "not a number"},
		"no such call":   {"GET", "/v2", ``, 404, "GET /v2"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			req, err := http.NewRequestWithContext(t.Context(), tc.method, b.server.URL+tc.path, strings.NewReader(tc.body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "bearer "+testToken)
			resp, err := b.server.Client().Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Fatal(err)
			}
			if resp.StatusCode != tc.status || !strings.Contains(string(body), tc.want) {
				t.Errorf("%d %s\nwant %d and %q", resp.StatusCode, body, tc.status, tc.want)
			}
		})
	}
	t.Cleanup(func() {
		if k := b.cloud.Knobs(); k.BootDelay != 0 || len(k.Hold)+len(k.Faults) != 0 {
			t.Errorf("a refused patch changed the knobs: %+v", k)
		}
	})
}

func TestRetryAfterHeader(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{Knobs: cloudapi.Knobs{RequestsPerSecond: 0.001}})
	if _, err := b.client.List(t.Context(), cloudapi.Filter{}); err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, b.server.URL+"/v1/instances", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+testToken)
	resp, err := b.server.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	seconds, err := strconv.Atoi(resp.Header.Get("Retry-After"))
	if resp.StatusCode != http.StatusTooManyRequests || err != nil || seconds < 1 || seconds > 1000 {
		t.Errorf("%d, Retry-After %d, %v; want 429 and at most 1000 seconds", resp.StatusCode, seconds, err)
	}
	if _, err := b.admin.Stats(t.Context()); err != nil {
		t.Errorf("the limit keeps the admin out: %v", err)
	}
}

func TestPatchLeavesTheOthers(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{Knobs: cloudapi.Knobs{
		BootDelay: hour, Hold: []string{"a"}, Faults: []cloudapi.Fault{{Operation: "get", Next: 2, Status: 500, Drop: true}},
	}})
	b.patch(t, cloudapi.KnobsPatch{Quota: new(7)})
	b.patch(t, cloudapi.KnobsPatch{Faults: &[]cloudapi.Fault{{Operation: "list"}}, NodeNotReady: &[]string{"n"}})
	want := &cloudapi.Knobs{
		BootDelay: hour, CreateEffect: cloudapi.EffectEnd, Quota: 7, Hold: []string{"a"},
		Faults:       []cloudapi.Fault{{Operation: "list"}},
		NodeNotReady: []string{"n"}, NodeSilent: []string{}, NodeRefuse: []string{},
	}
	got, err := b.admin.Knobs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("knobs (-want +got):\n%s", diff)
	}
	if events := b.events(t); !slices.Equal(events, []string{"knobs changed", "knobs changed"}) {
		t.Errorf("log: %v", events)
	}
}
