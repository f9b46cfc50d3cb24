package machine_test

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/machine"
)

const isFrozen = "mcm_machine_controller_frozen"

// A step is what a machine's status said at a time.
type step struct {
	Phase v1alpha1.MachinePhase
	Type  v1alpha1.MachineOperationType
	State v1alpha1.MachineState
	Text  string
}

var reset = step{"Running", "HealthCheck", "Successful", "Machine Health Timeout was reset due to APIServer being unreachable"}

// stepsOf are the phases that a machine went through from a status on.
func stepsOf(all []v1alpha1.MachineStatus) (steps []step, last v1alpha1.MachineStatus) {
	for _, s := range all {
		if len(steps) == 0 || last.CurrentStatus.Phase != s.CurrentStatus.Phase {
			o := s.LastOperation
			steps = append(steps, step{s.CurrentStatus.Phase, o.Type, o.State, o.Description})
		}
		last = s
	}

	return steps, last
}

// wantReset waits until a machine is Unknown again since then, and requires that it
// was never Failed and that its timeout has started again.
func (r *rig) wantReset(t *testing.T, m *v1alpha1.Machine, heard func(*v1alpha1.Machine) []v1alpha1.MachineStatus, since time.Time) {
	t.Helper()
	r.event(t, m, "HealthTimeoutReset", reset.Text)
	r.until(t, "Unknown again", m, func(m *v1alpha1.Machine) bool {
		current := m.Status.CurrentStatus

		return current.Phase == v1alpha1.MachineUnknown && !current.LastUpdateTime.Time.Before(since.Truncate(time.Second))
	})
	bustest.Eventually(t, "all was heard", func() bool {
		_, last := stepsOf(heard(m))

		return last.CurrentStatus.Phase == v1alpha1.MachineUnknown && !last.CurrentStatus.LastUpdateTime.Time.Before(since.Truncate(time.Second))
	})
	steps, _ := stepsOf(heard(m))
	for len(steps) > 0 && steps[0] != reset && steps[0].Phase != v1alpha1.MachineFailed {
		steps = steps[1:]
	}
	want := []step{
		reset,
		{"Unknown", "HealthCheck", "Processing", "Machine " + m.Name + " is unhealthy - changing MachinePhase to Unknown. Node conditions: Ready=False (Test)"},
	}
	if diff := cmp.Diff(want, steps); diff != "" {
		t.Errorf("it went through (-want +got):\n%s", diff)
	}
}

// pool makes a MachineDeployment without a controller.
func (r *rig) pool(t *testing.T) *v1alpha1.MachineDeployment {
	t.Helper()
	labels := map[string]string{"pool": "a"}
	d := &v1alpha1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "pool"},
		Spec: v1alpha1.MachineDeploymentSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Strategy: v1alpha1.MachineDeploymentStrategy{Type: v1alpha1.RecreateMachineDeploymentStrategyType},
			Template: v1alpha1.MachineTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: "MachineClass", Name: "small"}},
			},
		},
	}
	r.create(t, d)

	return d
}

// forgotten stores that a machine has been Unknown for an hour.
func (r *rig) forgotten(t *testing.T, m *v1alpha1.Machine) {
	t.Helper()
	m = r.get(t, m)
	before := m.DeepCopy()
	hourAgo := metav1.NewTime(time.Now().Add(-time.Hour))
	m.Status.CurrentStatus.Phase, m.Status.CurrentStatus.LastUpdateTime = v1alpha1.MachineUnknown, hourAgo
	m.Status.LastOperation = checking
	if err := r.Status().Patch(t.Context(), m, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
}

// TestOutage cuts the manager off from an API server for long. Nothing gets worse
// meanwhile, and afterwards only what is still so when the timeouts are over again.
func TestOutage(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		reason string
		way    func(*rig) *gate
	}{
		"control": {"the state of machines is unknown", func(r *rig) *gate { return r.control }},
		"target":  {"the state of Nodes is unknown", func(r *rig) *gate { return r.target }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.outage = &machine.OutageSettings{Period: 100 * time.Millisecond, Timeout: 5 * time.Second} // a look takes a second
			r.startDriver(t)
			r.startManager(t)
			m := r.running(t, r.machine("a"))
			leaving := r.machine("leaving")
			r.create(t, leaving)
			r.phase(t, leaving, v1alpha1.MachinePending)
			if n := r.metric(t, isFrozen); n != 0 {
				t.Errorf("frozen is %v", n)
			}
			pool, owned := r.pool(t), r.machine("owned")
			ofSet("1")(owned)
			r.lived(t, owned, v1alpha1.MachineFailed, checking)
			heard := r.statuses(t)

			row.way(r).setCut(true)
			bustest.Eventually(t, "machines are frozen", func() bool { return r.metric(t, isFrozen) == 1 && r.memory.frozen.Load() })
			since := time.Now()
			r.turn(t, m.Name, corev1.ConditionFalse)
			r.forgotten(t, m)
			r.change(t, m, func() { m.Spec.MachineDrainTimeout = &metav1.Duration{Duration: time.Hour} }) // have it looked at
			late := r.machine("late")
			r.create(t, late)
			r.delete(t, leaving)
			if name == "target" {
				r.event(t, m, "MachinesFrozen", "only deletions go on: read from the API server of the target cluster")
				r.event(t, pool, "MachinesFrozen", "only deletions go on")
				r.gone(t, leaving) // deletions go on
				if phase := r.get(t, late).Status.CurrentStatus.Phase; phase != v1alpha1.MachinePhaseNew {
					t.Errorf("the new machine is %s: %s", phase, row.reason)
				}
			}
			row.way(r).setCut(false)
			r.wantReset(t, m, heard, since)
			r.phase(t, late, v1alpha1.MachinePending)
			r.gone(t, leaving)
			if n := r.metric(t, isFrozen); n != 0 {
				t.Errorf("frozen is %v", n)
			}
			bustest.Eventually(t, "the freeze is forgotten", func() bool { return !r.memory.frozen.Load() })
			r.event(t, pool, "MachinesThawed", ": read from the API server of the "+name+" cluster")
			if events := r.events(t, owned); slices.ContainsFunc(events, func(e string) bool { return strings.HasPrefix(e, "Machines") }) {
				t.Errorf("a machine whose set's deployment has the Event has one too: %q", events)
			}
			for message, n := range map[string]int{"machines are frozen: only deletions go on": 1, "machines are not frozen any more": 1} {
				if lines := r.logged(t, message); len(lines) != n {
					t.Errorf("the log says %d times %q: %v", len(lines), message, lines)
				}
			}
		})
	}
}

// TestShortOutage shows that an outage shorter than the timeout changes nothing.
func TestShortOutage(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.outage = &machine.OutageSettings{Period: 10 * time.Millisecond, Timeout: 5 * time.Second} // a look every second
	m := r.lost(t, "a", func(m *v1alpha1.Machine) { m.Spec.MachineHealthTimeout = &metav1.Duration{Duration: 2 * time.Hour} })
	r.startManager(t)
	heard := r.statuses(t)
	r.until(t, "a pass has read its node", m, func(m *v1alpha1.Machine) bool { return m.Status.Conditions[0].Reason == "Test" })
	asked := r.target.count("GET nodes")
	r.target.setCut(true)
	bustest.Eventually(t, "the API server was asked", func() bool { return r.target.count("GET nodes") > asked+1 })
	r.target.setCut(false)
	r.turn(t, m.Name, corev1.ConditionTrue)
	r.phase(t, m, v1alpha1.MachineRunning)
	steps, _ := stepsOf(heard(m))
	for _, s := range steps {
		if s == reset {
			t.Errorf("its timeout started again: %v", steps)
		}
	}
	if lines := r.logged(t, "machines are frozen: only deletions go on"); len(lines) != 0 {
		t.Errorf("the log says %v", lines)
	}
}

// TestUnwatched has a manager start after none had led for an hour, and for a
// second.
func TestUnwatched(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.outage = new(machine.DefaultOutageSettings())
	r.unwatched = time.Hour
	m := r.lost(t, "a")
	heard := r.statuses(t)
	since := time.Now()
	r.startManager(t)
	r.wantReset(t, m, heard, since)
	r.stop()
	r.forgotten(t, m)
	r.unwatched = time.Second
	r.startManager(t)
	r.phase(t, m, v1alpha1.MachineFailed)
}

// TestFreezeIsRemembered has a manager start after one that had frozen all.
func TestFreezeIsRemembered(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.outage = new(machine.DefaultOutageSettings())
	r.memory.SetFrozen(true)
	r.unwatched = time.Second
	m := r.lost(t, "a")
	heard := r.statuses(t)
	since := time.Now()
	r.startManager(t)
	r.wantReset(t, m, heard, since)
	r.event(t, m, "MachinesThawed", "the previous manager had frozen them")
	bustest.Eventually(t, "the freeze is forgotten", func() bool { return !r.memory.frozen.Load() })
}

// TestPendingReset ends an outage while a webhook fails for one machine. Its time has to
// start again, too, and it blocks no other machine.
func TestPendingReset(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.outage = &machine.OutageSettings{Period: 100 * time.Millisecond, Timeout: 5 * time.Second}
	r.unwatched = time.Hour
	good, bad, gone := r.lost(t, "good"), r.lost(t, "bad"), r.lost(t, "gone")
	r.control.fail(http.MethodPatch, bad, true)
	r.control.fail(http.MethodPatch, gone, true)
	heard := r.statuses(t)
	since := time.Now()
	r.startDriver(t)
	r.startManager(t)
	r.wantReset(t, good, heard, since)
	for _, m := range []*v1alpha1.Machine{bad, gone} {
		r.event(t, m, "HealthTimeoutNotReset", "failed calling webhook")
	}
	if !r.memory.frozen.Load() {
		t.Error("another manager would not know of them")
	}
	r.delete(t, gone)
	r.control.fail(http.MethodPatch, gone, false)
	r.gone(t, gone)
	since = time.Now()
	r.control.fail(http.MethodPatch, bad, false)
	r.wantReset(t, bad, heard, since)
	bustest.Eventually(t, "the freeze is forgotten", func() bool { return !r.memory.frozen.Load() })
}

// TestUndecided has a manager start that cannot read the target cluster at once:
// until it has, it does nothing to machines.
func TestUndecided(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.outage = &machine.OutageSettings{Period: time.Hour, Timeout: time.Hour}
	r.target.hold("GET nodes")
	m := r.lost(t, "a")
	r.startManager(t)
	gone := r.machine("gone")
	gone.Finalizers = []string{v1alpha1.FinalizerName}
	r.lived(t, gone, v1alpha1.MachineRunning, checking)
	r.startDriver(t)
	r.delete(t, gone)
	r.gone(t, gone)
	if got := r.get(t, m); got.Status.CurrentStatus.Phase != v1alpha1.MachineUnknown || r.metric(t, isFrozen) != 1 {
		t.Errorf("machine is %s, frozen is %v", got.Status.CurrentStatus.Phase, r.metric(t, isFrozen))
	}
	r.target.release("GET nodes")
	r.phase(t, m, v1alpha1.MachineFailed)
	if n := r.metric(t, isFrozen); n != 0 {
		t.Errorf("frozen is %v", n)
	}
}
