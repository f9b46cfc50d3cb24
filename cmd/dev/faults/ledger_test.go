package main

import (
	"cmp"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestReadLog judges what became of one machine, which was to go after 10 seconds and
// was gone after 20.
func TestReadLog(t *testing.T) {
	t.Parallel()
	at := func(second int) time.Time { return testTime.Add(time.Duration(second) * time.Second) }
	created := func(second int, id string) cloudapi.LogEntry {
		return cloudapi.LogEntry{
			Time: at(second), Op: cloudapi.OpCreate, Event: cloudapi.EventCreated, ID: id, MachineUID: "uid", Identity: cloudapi.IdentityToken,
		}
	}
	deleted := func(second int, id string) cloudapi.LogEntry {
		return cloudapi.LogEntry{Time: at(second), Op: cloudapi.OpDelete, Event: cloudapi.EventDeleted, ID: id, MachineUID: "uid"}
	}
	const none = cloudapi.IdentityNone
	for name, tc := range map[string]struct {
		reason   string
		identity cloudapi.Identity
		forced   bool
		entries  []cloudapi.LogEntry
		want     map[string]int
		lives    int
		surplus  int
	}{
		"whole life": {
			reason:  "an instance that goes between the wish for it and the end of its machine is as it should be",
			entries: []cloudapi.LogEntry{created(1, "a"), deleted(15, "a")},
			lives:   1,
		},
		"still there": {
			reason:  "a life that has not ended is none",
			entries: []cloudapi.LogEntry{created(1, "a")},
		},
		"taken away": {
			reason:  "no deletion was requested",
			entries: []cloudapi.LogEntry{created(1, "a"), deleted(5, "a")},
			want:    map[string]int{lost: 1}, lives: 1,
		},
		"collected": {
			reason:  "the finalizer went before the instance, and orphan collection came to the rescue",
			entries: []cloudapi.LogEntry{created(1, "a"), deleted(29, "a")},
			want:    map[string]int{leaked: 1}, lives: 1,
		},
		"left behind by force": {
			reason: "nothing but the orphan collection could remove its instance", forced: true,
			entries: []cloudapi.LogEntry{created(1, "a"), deleted(29, "a")},
			lives:   1,
		},
		"late after force": {
			reason: "by force or not, nothing is made for a machine that is gone", forced: true,
			entries: []cloudapi.LogEntry{created(25, "a"), deleted(35, "a")},
			want:    map[string]int{leaked: 1}, lives: 1,
		},
		"late": {
			reason:  "a resumed replica created an instance without a Machine, which was collected",
			entries: []cloudapi.LogEntry{created(25, "a"), deleted(35, "a")},
			want:    map[string]int{leaked: 1}, lives: 1,
		},
		"twice": {
			reason:  "that must never happen with a token, whatever was collected",
			entries: []cloudapi.LogEntry{created(1, "a"), created(2, "b"), deleted(3, "b"), deleted(15, "a")},
			want:    map[string]int{doubled: 1}, lives: 1,
		},
		"twice for none": {
			reason: "nothing identified the creates, and the surplus was collected", identity: none,
			entries: []cloudapi.LogEntry{created(1, "a"), created(2, "b"), deleted(3, "b"), deleted(15, "a")},
			lives:   1, surplus: 1,
		},
		"surplus of none collected": {
			reason: "the surplus alone may outlive the machine", identity: none,
			entries: []cloudapi.LogEntry{created(1, "a"), created(2, "b"), deleted(15, "a"), deleted(29, "b")},
			lives:   1, surplus: 1,
		},
		"both of none collected": {
			reason: "one of them was the machine's own", identity: none,
			entries: []cloudapi.LogEntry{created(1, "a"), created(2, "b"), deleted(28, "a"), deleted(29, "b")},
			want:    map[string]int{leaked: 1}, lives: 1, surplus: 1,
		},
		"late for none": {
			reason: "it is the only one, and has no Machine", identity: none,
			entries: []cloudapi.LogEntry{created(25, "a"), deleted(35, "a")},
			want:    map[string]int{leaked: 1}, lives: 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := witnessAt(at(20))
			m := seenMachine("uid", time.Time{})
			m.Status.CurrentStatus.Phase = v1alpha1.MachineRunning
			w.saw(m, false)
			if tc.forced {
				w.removed("uid")
			}
			w.saw(seenMachine("uid", at(10)), true)
			for i := range tc.entries {
				tc.entries[i].Identity = cmp.Or(tc.identity, cloudapi.IdentityToken)
			}
			found, sums := readLog(tc.entries, w)
			if diff := gocmp.Diff(tc.want, total(found), cmpopts.EquateEmpty()); diff != "" || sums != (figures{machines: 1, lifecycles: tc.lives, surplus: tc.surplus}) {
				t.Errorf("%s: %+v, found (-want +got):\n%s", tc.reason, sums, diff)
			}
		})
	}
	found, sums := readLog([]cloudapi.LogEntry{created(1, "a"), deleted(2, "a")}, newWitness())
	if len(found) != 0 || sums != (figures{machines: 1, strange: 1}) {
		t.Errorf("of a machine that was never stored: %v, %+v; want it counted as strange, and nothing else found", found, sums)
	}
}
