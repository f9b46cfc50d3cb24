package orphans_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/orphans"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const orphanID = "virtual:///orphan"

// metric returns a metric in the text format, without its type and help.
func (r *rig) metric(name string) string {
	r.t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(r.Metrics.Collectors()...)
	families, err := registry.Gather()
	r.must(err)
	var lines []string
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			lines = append(lines, fmt.Sprintf("%s{%s} %g", name, strings.Join(labels, ","), m.GetCounter().GetValue()+m.GetGauge().GetValue()))
		}
	}

	return strings.Join(lines, "\n")
}

func TestOrphanIsDeleted(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.made("kept")
	r.cloud.add(orphanID, "gone", "gone-uid")
	r.Pass(t.Context())
	r.event(orphans.EventOrphanFound, orphanID)
	r.clock = r.clock.Add(grace - time.Second)
	r.Pass(t.Context())
	if got := r.cloud.deleted(); len(got) != 0 {
		t.Fatalf("deleted within the grace period: %v", got)
	}
	r.clock = r.clock.Add(time.Second)
	r.Pass(t.Context())
	if diff := cmp.Diff([]string{"virtual:///kept"}, r.cloud.left()); diff != "" {
		t.Errorf("instances left (-want +got):\n%s", diff)
	}
	r.event(orphans.EventOrphanDeleted, orphanID)
	deletes := r.cloud.deleted()
	if len(deletes) != 1 {
		t.Fatalf("the driver got %d deletes", len(deletes))
	}
	machine, class := deletes[0].GetDelete().GetMachine(), deletes[0].GetDelete().GetClass()
	if machine.GetName() != "gone" || !strings.HasPrefix(machine.GetUid(), "orphan-") || machine.GetProviderId() != orphanID || class.GetClass().GetName() != "small" ||
		class.GetSecret().GetName() != "boot" {
		t.Errorf("the driver got %v", deletes[0])
	}
	if strings.HasPrefix(deletes[0].GetOperationId(), "gone-uid") {
		t.Errorf("operation id is %s: it takes a number of the machine, which may come back", deletes[0].GetOperationId())
	}
	for name, want := range map[string]string{
		"mcm_safety_orphan_passes_total":    `mcm_safety_orphan_passes_total{outcome="done"} 3`,
		"mcm_safety_orphans_found_total":    `mcm_safety_orphans_found_total{provider="virtual"} 1`,
		"mcm_safety_orphan_deletions_total": `mcm_safety_orphan_deletions_total{code="OK",provider="virtual"} 1`,
	} {
		if got := r.metric(name); got != want {
			t.Errorf("metric is %q, want %q", got, want)
		}
	}
	r.Pass(t.Context())
	if got := r.metric("mcm_safety_orphans"); got != "" {
		t.Errorf("orphans left: %s", got)
	}
}

// Whatever may be in use stays, however long it is looked at.
func TestInUse(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason string
		plant  func(r *rig)
		event  string
	}{
		"being created": {"its machine does not know of it yet", func(r *rig) {
			m := r.machine("new", "")
			r.cloud.add("virtual:///1", "new", m.UID)
		}, ""},
		"named": {"a machine of this name has no instance yet and may find this one", func(r *rig) {
			r.machine("new", "")
			r.cloud.add("virtual:///1", "new", "")
		}, ""},
		"adopted": {"a user has given it to a machine of another name", func(r *rig) {
			r.machine("other", "virtual:///1")
			r.cloud.add("virtual:///1", "old", "old-uid")
		}, ""},
		"duplicate": {"a driver that deletes by uid would take the machine's own instance as well", func(r *rig) {
			m := r.made("twice")
			r.cloud.add("virtual:///1", "twice", m.UID)
		}, orphans.EventDuplicateInstance},
		"in flight": {"the Machine was removed by force while its create runs", func(r *rig) {
			m := &v1alpha1.Machine{}
			m.Namespace, m.Name, m.UID = r.namespace, "removed", "removed-uid"
			r.made("kept")
			r.dispatcher.Start(dispatch.Operation{Kind: dispatch.Create, Machine: m, Provider: provider, Timeout: time.Hour})
			bustest.Receive(r.t, "the driver to get the create", r.cloud.entered)
			r.cloud.add("virtual:///1", "removed", "removed-uid")
		}, ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			tc.plant(r)
			r.passes()
			if got := r.cloud.deleted(); len(got) != 0 {
				t.Errorf("deleted, although %s: %v", tc.reason, got)
			}
			if !slices.Contains(r.cloud.left(), "virtual:///1") {
				t.Error("the instance is gone")
			}
			if tc.event != "" {
				r.event(tc.event, "virtual:///1")
			}
			if r.hasEvent(orphans.EventOrphanFound, "virtual:///1") {
				t.Errorf("taken for an orphan, although %s", tc.reason)
			}
		})
	}
}

// A machine's name that is used again keeps no instance of the earlier machine: with a
// cloud of unique names it would wait for that for ever.
func TestNameIsUsedAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.machine("again", "")
	r.cloud.add(orphanID, "again", "earlier-uid")
	r.passes()
	if got := r.cloud.left(); len(got) != 0 {
		t.Errorf("left: %v", got)
	}
	r.event(orphans.EventOrphanDeleted, orphanID)
}

func TestDoubtfulList(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, name := range []string{"a", "b", "c"} {
		r.made(name)
	}
	r.cloud.add(orphanID, "gone", "gone-uid")
	r.Pass(t.Context())
	r.clock = r.clock.Add(grace)
	r.cloud.hide(2)
	r.Pass(t.Context())
	r.event(orphans.EventOrphansKept, "only 1 of the 3")
	if got := r.cloud.deleted(); len(got) != 0 {
		t.Fatalf("deleted by a list that lacks most instances: %v", got)
	}
	r.cloud.hide(0)
	r.Pass(t.Context()) // the grace period starts again
	if got := r.cloud.deleted(); len(got) != 0 {
		t.Fatalf("deleted at once after a list that lacked most instances: %v", got)
	}
	r.passes()
	if got := r.cloud.deleted(); len(got) != 1 {
		t.Errorf("the driver got %d deletes after the list was right again, want 1", len(got))
	}
}

// An API server that has lost its Machines, as after the restore of an old backup,
// must not cost the instances as well.
func TestMachinesVanish(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	machines := []*v1alpha1.Machine{r.made("a"), r.made("b"), r.made("c"), r.made("d")}
	r.Pass(t.Context())
	for _, m := range machines[1:] {
		r.must(r.Delete(t.Context(), m))
	}
	r.clock = r.clock.Add(grace)
	r.Pass(t.Context())
	r.event(orphans.EventOrphansKept, "3 of the 4 instances")
	for range 3 {
		r.passes()
	}
	r.Collector = r.newCollector(r.dispatcher) // the next leader has seen nothing of all that
	r.passes()
	if got := r.cloud.deleted(); len(got) != 0 {
		t.Fatalf("deleted, although most machines have vanished: %v", got)
	}
	class := &v1alpha1.MachineClass{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "small"}}
	r.must(r.Patch(t.Context(), class, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"machinebus.io/collect-orphans":"true"}}}`))))
	r.Pass(t.Context())
	if diff := cmp.Diff([]string{"virtual:///a"}, r.cloud.left()); diff != "" {
		t.Errorf("instances left after the class was annotated to allow their deletion (-want +got):\n%s", diff)
	}
}

// What vanishes between two looks is doubted even where it is not most of a class.
func TestMachinesVanishAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	machines := []*v1alpha1.Machine{r.made("a"), r.made("b"), r.made("c")}
	r.Pass(t.Context())
	for _, m := range machines[1:] {
		r.must(r.Delete(t.Context(), m))
	}
	r.clock = r.clock.Add(grace)
	r.Pass(t.Context())
	r.event(orphans.EventOrphansKept, "shows 1 machines, and showed 3")
	r.Pass(t.Context())
	if got := r.cloud.deleted(); len(got) != 0 {
		t.Fatalf("deleted, although most machines have only just vanished: %v", got)
	}
	r.passes()
	if diff := cmp.Diff([]string{"virtual:///a"}, r.cloud.left()); diff != "" {
		t.Errorf("instances left in the end (-want +got):\n%s", diff)
	}
}

func TestAPITrouble(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.made("kept")
	r.cloud.add(orphanID, "gone", "gone-uid")
	down := errors.New("the API server is down")
	r.passes2(interceptor.Funcs{List: func(context.Context, client.WithWatch, client.ObjectList, ...client.ListOption) error {
		return down
	}})
	if got := r.metric("mcm_safety_orphan_passes_total"); got != `mcm_safety_orphan_passes_total{outcome="unread"} 2` {
		t.Errorf("metric is %q", got)
	}
	r.passes2(interceptor.Funcs{
		Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
			return down
		},
	})
	if got := r.cloud.deleted(); len(got) != 0 {
		t.Errorf("deleted without a word from the API server: %v", got)
	}
}

// passes2 is passes with an API server that misbehaves.
func (r *rig) passes2(f interceptor.Funcs) {
	r.Reader = interceptor.NewClient(r.WithWatch, f)
	r.passes()
}

// A machine that takes an instance over between the look and the delete keeps it.
func TestMachineComesAtLast(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.made("kept")
	r.cloud.add(orphanID, "late", "")
	r.Pass(t.Context())
	r.clock = r.clock.Add(grace)
	r.Reader = interceptor.NewClient(r.WithWatch, interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			err := c.List(ctx, list, opts...)
			r.machine("late", "")

			return err
		},
	})
	r.Pass(t.Context())
	if got := r.cloud.deleted(); len(got) != 0 {
		t.Errorf("deleted, although a machine has come: %v", got)
	}
}

func TestCapAndDryRun(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.Settings.MaxPerPass, r.Settings.DryRun = 2, true
	ids := []string{"virtual:///1", "virtual:///2", "virtual:///3"}
	for _, name := range []string{"a", "b", "c"} {
		r.made(name)
	}
	kept := []string{"virtual:///a", "virtual:///b", "virtual:///c"}
	for _, id := range ids {
		r.cloud.add(id, "gone", types.UID(id[len(id)-1:])+"-uid")
	}
	r.passes()
	r.event(orphans.EventOrphanFound, "dry-run")
	if diff := cmp.Diff(append(kept, ids...), r.cloud.left()); diff != "" {
		t.Fatalf("a dry run deletes (-want +got):\n%s", diff)
	}
	if got := r.metric("mcm_safety_orphans"); !strings.HasSuffix(got, " 3") {
		t.Errorf("metric is %q, want 3", got)
	}
	r.Settings.DryRun = false
	r.Pass(t.Context())
	if diff := cmp.Diff(append(kept, ids[2:]...), r.cloud.left()); diff != "" {
		t.Errorf("left after a look that may delete two (-want +got):\n%s", diff)
	}
	r.Pass(t.Context())
	if diff := cmp.Diff(kept, r.cloud.left()); diff != "" {
		t.Errorf("left after another look (-want +got):\n%s", diff)
	}
}

// An instance that cannot be deleted takes its turn after all others.
func TestDeleteFailsForEver(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.Settings.MaxPerPass = 1
	r.machine("new", "")
	r.cloud.add("virtual:///1", "protected", "")
	r.cloud.add("virtual:///2", "gone", "")
	r.cloud.failing(&driverv1.Status{Code: driverv1.Code_CODE_PERMISSION_DENIED, Message: "protected"})
	r.passes()
	r.event(orphans.EventOrphanNotDeleted, "protected")
	r.cloud.failing(nil)
	r.Pass(t.Context())
	if diff := cmp.Diff([]string{"virtual:///1"}, r.cloud.left()); diff != "" {
		t.Errorf("left after the other's turn (-want +got):\n%s", diff)
	}
	r.Pass(t.Context())
	if got := r.cloud.left(); len(got) != 0 {
		t.Errorf("left in the end: %v", got)
	}
}

func TestDeleteFails(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.machine("new", "")
	r.cloud.add(orphanID, "gone", "") // by a driver that records no uid
	r.cloud.failing(&driverv1.Status{Code: driverv1.Code_CODE_PERMISSION_DENIED, Message: "not allowed"})
	r.passes()
	r.event(orphans.EventOrphanNotDeleted, "not allowed")
	if got := r.metric("mcm_safety_orphan_deletions_total"); !strings.Contains(got, `code="PermissionDenied"`) {
		t.Errorf("metric is %q", got)
	}
	r.cloud.failing(nil)
	r.Pass(t.Context())
	deletes := r.cloud.deleted()
	if len(deletes) != 2 || len(r.cloud.left()) != 0 {
		t.Fatalf("the driver got %d deletes and has %v left", len(deletes), r.cloud.left())
	}
	if deletes[0].GetOperationId() == deletes[1].GetOperationId() {
		t.Errorf("both deletes are operation %s: the second would get the first one's outcome", deletes[0].GetOperationId())
	}
	if uid := deletes[0].GetDelete().GetMachine().GetUid(); !strings.HasPrefix(uid, "orphan-") {
		t.Errorf("uid is %q, want one that no machine has", uid)
	}
}
