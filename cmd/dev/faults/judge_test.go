package main

import (
	"bytes"
	"context"
	"errors"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloud"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// TestSettle waits for what never comes, once for the last change, once in the end and
// once without pools: whatever is wrong with a machine counts once.
func TestSettle(t *testing.T) {
	t.Parallel()
	const uid = types.UID("uid")
	orphan := func(n int) *state {
		return &state{instances: map[types.UID][]cloudapi.Instance{uid: make([]cloudapi.Instance, n)}}
	}
	stays := wholeWorld(uid)
	stays.machines[uid].DeletionTimestamp = seenMachine("", testTime).DeletionTimestamp
	stays.pools["pool"].Spec.Replicas = 0
	for name, tc := range map[string]struct {
		reason string
		states []*state // of the waits, one after the other
		want   string
	}{
		"nothing": {"all is as it should be", []*state{{}, {}, {}}, "lost 0 doubled 0 leaked 0 stuck 0"},
		"an orphan that never goes": {
			"it is what each of the waits is for", []*state{orphan(1), orphan(1), orphan(1)}, "lost 0 doubled 0 leaked 1 stuck 0",
		},
		"orphans that go one by one": {
			"so many there were", []*state{orphan(3), orphan(2), orphan(1)}, "lost 0 doubled 0 leaked 3 stuck 0",
		},
		"a machine that never goes": {
			"another text is not another machine", []*state{stays, stays, stays}, "lost 0 doubled 0 leaked 0 stuck 1",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := &world{tally: newTally(busCluster, 0, 0), patience: time.Millisecond}
			for i, wrong := range []func(*state) []finding{(*state).flaws, (*state).flaws, (*state).remains} {
				err := w.settle(t.Context(), "all is well", func(context.Context) ([]finding, error) { return wrong(tc.states[i]), nil })
				if err != nil {
					t.Fatal(err)
				}
			}
			wantLastLine(t, tc.reason, w.tally, tc.want)
		})
	}
}

// TestSettle_Unexplained fails a wait without findings, or with only some of them.
func TestSettle_Unexplained(t *testing.T) {
	t.Parallel()
	errAway := errors.New("the API server is away")
	for name, tc := range map[string]struct {
		reason string
		then   error // of the last look
		found  []finding
		want   string
	}{
		"well at last": {"it has taken too long", nil, nil, "lost 0 doubled 0 leaked 0 stuck 1"},
		"no look":      {"nothing is known about machines", errAway, nil, "lost 0 doubled 0 leaked 0 stuck 0"},
		"half a look": {
			"what it has seen is known", errAway, []finding{foundf(leaked, "uid", 1, "machine")}, "lost 0 doubled 0 leaked 1 stuck 0",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := &world{tally: newTally(busCluster, 0, 0), patience: time.Millisecond}
			for range 2 {
				err := w.settle(t.Context(), "all is well", func(ctx context.Context) ([]finding, error) {
					if _, waits := ctx.Deadline(); waits {
						return nil, errAway
					}
					return tc.found, tc.then
				})
				if !errors.Is(err, tc.then) {
					t.Errorf("%s: %v, want %v", tc.reason, err, tc.then)
				}
			}
			wantLastLine(t, tc.reason, w.tally, tc.want)
		})
	}
}

// TestSalvage has a run go wrong. What its log proves counts: a machine that is gone had
// an instance. What may only not have come to its end does not, as an instance that was
// deleted before anybody has heard that its machine is to go.
func TestSalvage(t *testing.T) {
	t.Parallel()
	c, err := cloud.New(t.Context(), cloud.Options{})
	if err != nil {
		t.Fatal(err)
	}
	const token = "token"
	server := httptest.NewServer(cloud.NewHandler(c, token))
	defer server.Close()
	api, err := cloudapi.NewClient(server.URL, token)
	if err != nil {
		t.Fatal(err)
	}
	admin, err := cloudapi.NewAdmin(server.URL, token)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{tally: newTally(busCluster, 0, 0), witness: witnessAt(testTime), cloud: &stack.Cloud{Admin: admin}}
	for _, uid := range []string{"gone", "unheard"} {
		w.witness.saw(seenMachine(uid, time.Time{}), false)
		i, err := api.Create(t.Context(), cloudapi.CreateRequest{
			Name: uid, MachineType: "small", Region: "moon", Identity: cloudapi.IdentityNone, Tags: map[string]string{cloudapi.TagMachineUID: uid},
		})
		if err == nil {
			err = api.Delete(t.Context(), i.ID)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	w.witness.saw(seenMachine("gone", testTime), true) // long before the cloud has made an instance
	interrupted, interrupt := context.WithCancel(t.Context())
	interrupt()
	if err := w.salvage(interrupted); err != nil {
		t.Fatal(err)
	}
	wantLastLine(t, "one was made for a machine that was gone", w.tally, "lost 0 doubled 0 leaked 1 stuck 0")
	server.Close()
	if err := w.salvage(t.Context()); err == nil {
		t.Error("the cloud is away, and nothing was said of it")
	}
	w.cloud = nil
	if err := w.salvage(t.Context()); err != nil {
		t.Errorf("there was no cloud yet: %v", err)
	}
}

func wantLastLine(t *testing.T, reason string, one *tally, want string) {
	t.Helper()
	var out bytes.Buffer
	_ = verdict(&out, nil, []*tally{one})
	if !strings.HasSuffix(out.String(), "\n"+want+"\n") {
		t.Errorf("%s: want %q:\n%s", reason, want, out.String())
	}
}
