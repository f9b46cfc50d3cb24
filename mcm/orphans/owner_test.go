package orphans_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/orphans"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// Only what is proven ours is deleted: another control plane may have the same name and
// the same cloud account.
func TestOwner(t *testing.T) {
	t.Parallel()
	const ours, others, none = "virtual:///ours", "virtual:///others", "virtual:///none"
	for name, tc := range map[string]struct {
		reason string
		adopt  []string
		want   []string
	}{
		"alone":   {"nothing is handed over", nil, []string{others, none}},
		"former":  {"the operator hands over another owner's", []string{"other-uid"}, []string{none}},
		"unowned": {"the operator hands over what is from before there were owners", []string{orphans.NoOwner}, []string{others}},
		"both":    {"the flag is repeatable", []string{orphans.NoOwner, "other-uid"}, nil},
		"unknown": {"an owner that has nothing here", []string{"third-uid"}, []string{others, none}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.Settings.AdoptOwners = tc.adopt
			// Enough of our own that the others are no majority.
			kept := []string{}
			for i := range 4 {
				kept = append(kept, r.made(fmt.Sprint("m", i)).Spec.ProviderID)
			}
			r.cloud.addOf(ownerUID, ours)
			r.cloud.addOf("other-uid", others)
			r.cloud.addOf("", none)
			r.passes()
			if diff := cmp.Diff(append(kept, tc.want...), r.cloud.left()); diff != "" {
				t.Errorf("instances left (-want +got), where %s:\n%s", tc.reason, diff)
			}
			left := strings.Join(tc.want, " ")
			for reason, id := range map[string]string{"other_owner": others, "no_owner": none} {
				shown := strings.Contains(r.metric("mcm_safety_foreign_instances"), reason)
				if is := strings.Contains(left, id); shown != is {
					t.Errorf("metric shows %s: %v, want %v", reason, shown, is)
				}
				if r.hasEvent(orphans.EventOrphanFound, id) && strings.Contains(left, id) {
					t.Errorf("%s is taken for an orphan", id)
				}
				if strings.Contains(left, id) {
					r.event(orphans.EventForeignInstances, id)
				}
			}
		})
	}
}

// An instance of another owner is reported once for as long as it is there, also while its
// driver cannot list it, and again when it comes back.
func TestForeignInstanceIsReportedOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	events := record.NewFakeRecorder(100)
	r.Events = events
	m := r.made("a")
	const others = "virtual:///others"
	look := func(what string, want int) {
		t.Helper()
		r.Pass(t.Context())
		reported := 0
		for len(events.Events) > 0 {
			if strings.Contains(<-events.Events, orphans.EventForeignInstances) {
				reported++
			}
		}
		if reported != want {
			t.Errorf("%s: reported %d times, want %d", what, reported, want)
		}
	}
	r.cloud.addOf("other-uid", others)
	look("it comes", 1)
	look("it is there", 0)
	r.cloud.refuse = map[string]driverv1.Code{"small": driverv1.Code_CODE_UNAVAILABLE}
	look("the driver cannot list it", 0)
	r.cloud.refuse = nil
	look("the driver can", 0)
	r.cloud.instances = r.cloud.instances[:1]
	look("it is gone", 0)
	r.cloud.addOf("other-uid", others)
	look("it is back", 1)
	if diff := cmp.Diff([]string{m.Spec.ProviderID, others}, r.cloud.left()); diff != "" {
		t.Errorf("instances left (-want +got):\n%s", diff)
	}
}

// A machine's own instance needs no owner: it may be older than owners are.
func TestOwnInstanceWithoutOwner(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	m := r.machine("a", "virtual:///a")
	r.cloud.add(m.Spec.ProviderID, "a", m.UID)
	r.cloud.instances[0].Owner = ""
	r.cloud.add(orphanID, "gone", "gone-uid")
	r.passes()
	if diff := cmp.Diff([]string{"virtual:///a"}, r.cloud.left()); diff != "" {
		t.Errorf("instances left (-want +got):\n%s", diff)
	}
	if got := r.metric("mcm_safety_foreign_instances"); got != "" {
		t.Errorf("metric is %q", got)
	}
}

// Instances of others do not make ours a minority, nor a majority.
func TestForeignInstancesDoNotCount(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.made("a")
	for i := range 9 {
		r.cloud.addOf("other-uid", fmt.Sprint("virtual:///other", i))
	}
	for i := range 3 {
		r.cloud.addOf(ownerUID, fmt.Sprint("virtual:///ours", i))
	}
	r.passes()
	if got := r.cloud.deleted(); len(got) != 0 {
		t.Errorf("deleted %d of 4 instances of ours, 3 of which have no machine", len(got))
	}
	r.event(orphans.EventOrphansKept, "3 of the 4 instances")
}

// A class without any Machine is what a lost register looks like, however few
// instances there are.
func TestNoMachineAtAll(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cloud.add(orphanID, "gone", "gone-uid")
	r.passes()
	r.passes()
	if got := r.cloud.deleted(); len(got) != 0 {
		t.Fatalf("deleted without a single Machine: %v", got)
	}
	r.event(orphans.EventOrphansKept, "no Machine at all")
	class := r.classObject()
	r.must(r.Patch(t.Context(), class, client.RawPatch(types.MergePatchType,
		[]byte(`{"metadata":{"annotations":{"machinebus.io/collect-orphans":"true"}}}`))))
	r.Pass(t.Context())
	if got := r.cloud.left(); len(got) != 0 {
		t.Errorf("left after the class was annotated to allow their deletion: %v", got)
	}
}

// A machine of the class is evidence that the Machines are there.
func TestOneMachineIsEvidence(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.machine("new", "")
	r.cloud.add(orphanID, "gone", "gone-uid")
	r.passes()
	if got := r.cloud.left(); len(got) != 0 {
		t.Errorf("left: %v", got)
	}
}

// While another control plane of the same name is heard, nothing is deleted, and the
// grace period starts again afterwards.
func TestBarred(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.made("a")
	r.cloud.add(orphanID, "gone", "gone-uid")
	heard := errors.New("another one is heard")
	var reason error
	r.Barred = func() error { return reason }
	r.Pass(t.Context())
	reason = heard
	r.clock = r.clock.Add(grace)
	r.Pass(t.Context())
	if got := r.metric("mcm_safety_orphan_passes_total"); !strings.Contains(got, `{outcome="barred"} 1`) {
		t.Errorf("metric is %q", got)
	}
	reason = nil
	r.Pass(t.Context())
	if got := r.cloud.deleted(); len(got) != 0 {
		t.Fatalf("deleted although the grace period has started again: %v", got)
	}
	// It may be heard between the look and the delete.
	calls := 0
	r.Barred = func() error {
		calls++
		if calls > 1 {
			return heard
		}

		return nil
	}
	r.clock = r.clock.Add(grace)
	r.Pass(t.Context())
	if got := r.cloud.deleted(); len(got) != 0 || calls != 2 {
		t.Fatalf("deleted after %d questions: %v", calls, got)
	}
	r.Barred = nil
	r.Pass(t.Context())
	if diff := cmp.Diff([]string{"virtual:///a"}, r.cloud.left()); diff != "" {
		t.Errorf("instances left (-want +got):\n%s", diff)
	}
}
