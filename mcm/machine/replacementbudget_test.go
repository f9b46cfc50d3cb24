package machine_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// inPool puts a machine into a pool by its label.
func inPool(name string) func(*v1alpha1.Machine) {
	return func(m *v1alpha1.Machine) {
		metav1.SetMetaDataLabel(&m.ObjectMeta, v1alpha1.LabelKeyMachineDeployment, name)
	}
}

// ofSet gives a machine to a set.
func ofSet(uid types.UID) func(*v1alpha1.Machine) {
	return func(m *v1alpha1.Machine) {
		m.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "MachineSet", Name: "s", UID: uid, Controller: new(true),
		}}
	}
}

var checking = v1alpha1.LastOperation{Type: "HealthCheck", State: "Processing", Description: "Machine x is unhealthy"}

// lost makes a machine whose Node has been unhealthy for longer than it may.
func (r *rig) lost(t *testing.T, name string, change ...func(*v1alpha1.Machine)) *v1alpha1.Machine {
	t.Helper()
	m := r.machine(name)
	for _, c := range change {
		c(m)
	}
	r.join(t, m, ready(corev1.ConditionFalse))
	r.lived(t, m, v1alpha1.MachineUnknown, checking)

	return m
}

// A fleet is what a watch saw of a namespace's machines.
type fleet struct {
	mu     sync.Mutex
	now    map[string]*v1alpha1.Machine
	failed map[string]bool // the names of those that ever were Failed
	most   int             // that were being replaced at a time
}

// watchFleet replays, in order, all that ever happens to the machines.
func (r *rig) watchFleet(t *testing.T) *fleet {
	t.Helper()
	f := &fleet{now: map[string]*v1alpha1.Machine{}, failed: map[string]bool{}}
	r.watch(t, func(what watch.EventType, m *v1alpha1.Machine) { f.see(m, what == watch.Deleted) })

	return f
}

func (f *fleet) see(m *v1alpha1.Machine, gone bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.now[m.Name] = m
	if gone {
		delete(f.now, m.Name)
	}
	var replaced []string
	for name, m := range f.now {
		if m.Status.CurrentStatus.Phase == v1alpha1.MachineFailed || m.DeletionTimestamp != nil {
			replaced = append(replaced, name)
		}
	}
	for _, name := range replaced {
		f.failed[name] = true
	}
	f.most = max(f.most, len(replaced))
}

// replaced returns how many machines were replaced, and how many at a time.
func (f *fleet) replaced() (all map[string]bool, most int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	all = map[string]bool{}
	for name := range f.failed {
		all[name] = true
	}

	return all, f.most
}

// replace does what a set does, once: it deletes a Failed machine and makes another
// one, which joins.
func (r *rig) replace(t *testing.T, m *v1alpha1.Machine, change ...func(*v1alpha1.Machine)) {
	t.Helper()
	r.delete(t, m)
	other := r.machine(strings.TrimPrefix(m.Name, r.namespace+"-") + "-again")
	for _, c := range change {
		c(other)
	}
	r.running(t, other)
	r.gone(t, m)
}

// TestFleetIsReplacedInTurn has all Nodes of six machines become unhealthy, of which
// one recovers while it waits.
func TestFleetIsReplacedInTurn(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		reason string
		pool   func(*v1alpha1.Machine)
		at     int // a time
	}{
		"deployment":    {"its label says so", inPool("a"), 1},
		"set":           {"the label is not set", ofSet("b"), 1},
		"several sets":  {"a deployment has them in a rollout", func(m *v1alpha1.Machine) { inPool("c")(m); ofSet(types.UID(m.Name))(m) }, 1},
		"two at a time": {"the setting says so", inPool("d"), 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.settings.MaxReplacements, r.settings.HealthTimeout = row.at, 1
			r.startDriver(t)
			r.startManager(t)
			seen := r.watchFleet(t)
			waiting := map[string]*v1alpha1.Machine{}
			for i := range 6 {
				m := r.machine(fmt.Sprint(i))
				row.pool(m)
				waiting[m.Name] = r.running(t, m)
			}
			for name := range waiting {
				r.turn(t, name, corev1.ConditionFalse)
			}
			recovers := r.any(t, waiting, "waits", func(m *v1alpha1.Machine) bool {
				return strings.Contains(m.Status.LastOperation.Description, "may be replaced at a time")
			})
			r.turn(t, recovers.Name, corev1.ConditionTrue)
			r.phase(t, recovers, v1alpha1.MachineRunning)
			delete(waiting, recovers.Name)
			for len(waiting) > 0 {
				m := r.any(t, waiting, "is Failed", isFailed)
				delete(waiting, m.Name)
				r.replace(t, m, row.pool)
			}
			all, most := seen.replaced()
			if most != row.at || len(all) != 5 || all[recovers.Name] {
				t.Errorf("%v were replaced, up to %d at a time, and %s recovered; want %d at a time of the others: %s",
					all, most, recovers.Name, row.at, row.reason)
			}
		})
	}
}

// any waits until one of the machines is as wanted.
func (r *rig) any(t *testing.T, among map[string]*v1alpha1.Machine, what string, ok func(*v1alpha1.Machine) bool) (found *v1alpha1.Machine) {
	t.Helper()
	if !poll(t, func() bool {
		for _, m := range among {
			if found = r.get(t, m); ok(found) {
				return true
			}
		}

		return false
	}) {
		t.Fatalf("none of %d machines %s", len(among), what)
	}

	return found
}

func isFailed(m *v1alpha1.Machine) bool {
	return m.Status.CurrentStatus.Phase == v1alpha1.MachineFailed
}

// TestNoReplacement shows that machines that are not replaced wait for none.
func TestNoReplacement(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	a, b := r.lost(t, "a"), r.lost(t, "b")
	r.startManager(t)
	r.phase(t, a, v1alpha1.MachineFailed)
	r.phase(t, b, v1alpha1.MachineFailed)
}

// TestHeldMachine has a machine wait for one of its pool, which its status names, until
// that one is gone.
func TestHeldMachine(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.settings.Retry.Short = time.Hour // a notice ends the wait
	first := r.machine("first")
	inPool("p")(first)
	r.lived(t, first, v1alpha1.MachineFailed, checking)
	other := r.lost(t, "other", inPool("q"))
	m := r.lost(t, "a", inPool("p"))
	r.startDriver(t)
	r.startManager(t)
	r.phase(t, other, v1alpha1.MachineFailed)
	text := fmt.Sprintf("Machine %s is unhealthy for longer than 10m0s and is not replaced yet: "+
		"at most 1 of MachineDeployment p may be replaced at a time (--machine-max-replacements), and %s is starting, failed or being deleted", m.Name, first.Name)
	r.event(t, m, "ReplacementDelayed", text)
	m = r.get(t, m)
	last, want := m.Status.LastOperation, v1alpha1.LastOperation{Type: "HealthCheck", State: "Processing", Description: text}
	want.LastUpdateTime = last.LastUpdateTime
	if phase := m.Status.CurrentStatus.Phase; last != want || phase != v1alpha1.MachineUnknown {
		t.Errorf("machine is %s, and its last operation is %+v", phase, last)
	}
	bustest.Eventually(t, "the metric shows it", func() bool { return r.metric(t, "mcm_machine_replacements_waiting") == 1 })
	r.change(t, m, func() { m.Spec.MachineDrainTimeout = &metav1.Duration{Duration: time.Hour} }) // another pass
	r.delete(t, first)
	r.phase(t, m, v1alpha1.MachineFailed)
	r.story(t, m, "Warning ReplacementDelayed", "Warning HealthTimeout")
	bustest.Eventually(t, "the metric shows it", func() bool { return r.metric(t, "mcm_machine_replacements_waiting") == 0 })
}

// TestReplacementsUnderWay keeps the word that a machine is Failed on its way to the
// API server, which no cache shows yet, and then from the cache.
func TestReplacementsUnderWay(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	const words = http.MethodPatch + " machines/status"
	r.control.hold(words)
	a, b := r.lost(t, "a", inPool("p")), r.lost(t, "b", inPool("p"))
	seen := r.watchFleet(t)
	r.startManager(t)
	bustest.Eventually(t, "both have something to say", func() bool { return r.control.count(words) == 2 })
	r.control.hold("WATCH machines")
	r.control.release(words)
	m := r.any(t, map[string]*v1alpha1.Machine{a.Name: a, b.Name: b}, "is Failed", isFailed)
	waits := a
	if m.Name == a.Name {
		waits = b
	}
	r.event(t, waits, "ReplacementDelayed", m.Name)
	if all, _ := seen.replaced(); len(all) > 1 {
		t.Errorf("%v are Failed", all)
	}
	r.control.release("WATCH machines")
	r.turn(t, m.Name, corev1.ConditionTrue) // it was too early to say so
	r.phase(t, waits, v1alpha1.MachineFailed)
}

// TestReplacementsUnseen has a machine deleted that the cache shows as Running.
func TestReplacementsUnseen(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var ahead clock
	r.now = ahead.now
	r.startDriver(t)
	r.startManager(t)
	first := r.machine("first")
	inPool("p")(first)
	m := r.machine("a")
	inPool("p")(m)
	r.running(t, first)
	r.running(t, m)
	r.turn(t, m.Name, corev1.ConditionFalse)
	r.phase(t, m, v1alpha1.MachineUnknown)
	bustest.Eventually(t, "the manager knows of that", func() bool {
		known := &v1alpha1.Machine{}

		return r.seen.Get(t.Context(), client.ObjectKeyFromObject(m), known) == nil &&
			known.Status.CurrentStatus.Phase == v1alpha1.MachineUnknown
	})
	r.control.hold("WATCH machines")
	r.delete(t, first)
	ahead.add(time.Hour)
	r.turn(t, m.Name, corev1.ConditionUnknown) // a pass has to look at it
	r.event(t, m, "ReplacementDelayed", first.Name)
	r.control.release("WATCH machines")
	r.gone(t, first)
	r.phase(t, m, v1alpha1.MachineFailed)
}

// TestNodeUnseen has machines whose time is over, and whose Nodes are healthy by now
// without the cache knowing.
func TestNodeUnseen(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var ahead clock
	r.now = ahead.now
	unknown := r.lost(t, "unknown", func(m *v1alpha1.Machine) { m.Spec.MachineHealthTimeout = &metav1.Duration{Duration: 2 * time.Hour} })
	pending := r.machine("pending")
	pending.Spec.MachineCreationTimeout = &metav1.Duration{Duration: 2 * time.Hour}
	r.lived(t, pending, v1alpha1.MachinePending, v1alpha1.LastOperation{Type: "Create", State: "Processing"})
	seen := r.watchFleet(t)
	r.startManager(t)
	r.until(t, "a pass has read its node", unknown, func(m *v1alpha1.Machine) bool { return m.Status.Conditions[0].Reason == "Test" })
	r.target.hold("WATCH nodes")
	r.turn(t, unknown.Name, corev1.ConditionTrue)
	r.join(t, pending)
	ahead.add(3 * time.Hour)
	for _, m := range []*v1alpha1.Machine{unknown, pending} {
		r.change(t, m, func() { m.Spec.MachineDrainTimeout = &metav1.Duration{Duration: time.Hour} })
	}
	bustest.Eventually(t, "the API server was asked", func() bool {
		return r.target.count("GET /api/v1/nodes/"+unknown.Name) > 0 && r.target.count("GET /api/v1/nodes/"+pending.Name) > 0
	})
	r.target.release("WATCH nodes")
	r.phase(t, unknown, v1alpha1.MachineRunning)
	r.phase(t, pending, v1alpha1.MachineRunning)
	if all, _ := seen.replaced(); len(all) > 0 {
		t.Errorf("%v were Failed", all)
	}
}

// A clock is ahead of the real one.
type clock struct {
	mu sync.Mutex
	by time.Duration
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()

	return time.Now().Add(c.by)
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.by += d
}
