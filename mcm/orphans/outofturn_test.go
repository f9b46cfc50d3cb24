package orphans_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/orphans"
)

// start runs the collector as the manager does, until the test ends.
func (r *rig) start() {
	r.t.Helper()
	ctx, cancel := context.WithCancel(r.t.Context())
	informers, err := cache.New(apiServer, cache.Options{
		Scheme: scheme, DefaultNamespaces: map[string]cache.Config{r.namespace: {}},
	})
	r.must(err)
	r.must(r.Collector.Watch(ctx, informers))
	done := make(chan error, 2)
	go func() { done <- informers.Start(ctx) }()
	if !informers.WaitForCacheSync(ctx) {
		r.t.Fatal("the cache does not fill")
	}
	go func() { done <- r.Start(ctx) }()
	r.t.Cleanup(func() {
		cancel()
		for range 2 {
			if err := <-done; err != nil {
				r.t.Error(err)
			}
		}
	})
}

func (c *cloud) looks() int {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.lists
}

// describe sets the text of a machine's last operation.
func (r *rig) describe(m *v1alpha1.Machine, text string) {
	r.t.Helper()
	before := m.DeepCopy()
	m.Status.LastOperation.Description = text
	r.must(r.Status().Patch(r.t.Context(), m, client.MergeFrom(before)))
}

// Several instances match one machine: the one too many should not be paid for
// until the next turn.
func TestOutOfRangeIsLookedIntoAtOnce(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ reason, text string }{
		"create":     {"of creates", v1alpha1.CreateFailedText(v1alpha1.ErrorCodeOutOfRange, "two instances")},
		"initialize": {"of initializations", v1alpha1.InitializeFailedText(v1alpha1.ErrorCodeOutOfRange, "two instances")},
		"delete": {
			"of deletions, which in the machine controller manager have no errorCode",
			v1alpha1.ErrorText(v1alpha1.ErrorCodeOutOfRange, "two instances") + ". " + v1alpha1.DeletionTextDeleteVM,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.Settings.Period, r.Settings.Gap = time.Hour, time.Millisecond
			r.Now = time.Now
			m := r.made("a")
			r.describe(m, v1alpha1.CreateFailedText(v1alpha1.ErrorCodeInternal, "no luck"))
			r.start()
			bustest.Eventually(t, "the first look", func() bool { return r.cloud.looks() == 1 })
			r.cloud.add(orphanID, "gone", "gone-uid")
			r.describe(m, tc.text)
			r.event(orphans.EventOrphanFound, orphanID)
			if got := r.cloud.deleted(); len(got) != 0 {
				t.Errorf("deleted without the grace period (%s): %v", tc.reason, got)
			}
			// The same once more is no news; what is news afterwards is heard.
			r.describe(m, tc.text+".")
			r.describe(m, v1alpha1.TextCreating)
			r.describe(m, tc.text)
			bustest.Eventually(t, "the second look out of turn", func() bool { return r.cloud.looks() >= 3 })
			if n := r.cloud.looks(); n != 3 {
				t.Errorf("%d looks, want one in turn and two out of turn", n)
			}
		})
	}
}

// One provider's trouble neither costs the others requests nor shortens or
// prolongs anybody's grace period.
func TestLookAtOneProvider(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create(&v1alpha1.MachineClass{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "other"}, Provider: "other",
		ProviderSpec: runtime.RawExtension{Raw: []byte(`{}`)},
	})
	r.made("kept")
	r.cloud.add(orphanID, "gone", "gone-uid")
	r.Pass(t.Context())
	found := r.metric("mcm_safety_orphans")
	r.clock = r.clock.Add(grace / 2)
	r.Pass(t.Context(), "other")
	if n := r.cloud.looks(); n != 1 {
		t.Errorf("%d lists of a provider that nothing is the matter with", n)
	}
	if diff := cmp.Diff(found, r.metric("mcm_safety_orphans")); diff != "" {
		t.Errorf("what is known of it has changed (-want +got):\n%s", diff)
	}
	r.Pass(t.Context(), provider)
	if got := r.cloud.deleted(); len(got) != 0 {
		t.Errorf("deleted within the grace period: %v", got)
	}
	r.clock = r.clock.Add(grace / 2)
	r.Pass(t.Context(), provider)
	if diff := cmp.Diff([]string{"virtual:///kept"}, r.cloud.left()); diff != "" {
		t.Errorf("instances left (-want +got):\n%s", diff)
	}
	if got := r.metric("mcm_safety_orphans_found_total"); got != `mcm_safety_orphans_found_total{provider="virtual"} 1` {
		t.Errorf("metric is %q, want it found once", got)
	}
}

// Looks out of turn must not make it look normal that Machines vanish.
func TestMachinesVanishBetweenTurns(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	machines := []*v1alpha1.Machine{r.made("a"), r.made("b"), r.made("c")}
	r.Pass(t.Context())
	for _, m := range machines[1:] {
		r.must(r.Delete(t.Context(), m))
		r.clock = r.clock.Add(grace)
		r.Pass(t.Context(), provider)
	}
	r.event(orphans.EventOrphansKept, "shows 1 machines, and showed 3")
	if got := r.cloud.deleted(); len(got) != 0 {
		t.Errorf("deleted, although most machines have only just vanished: %v", got)
	}
}
