package machine_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const status = driverv1.Operation_OPERATION_STATUS

// crashed stores a machine as another manager may leave it behind in the middle of
// its creation.
func (r *rig) crashed(t *testing.T, m *v1alpha1.Machine) {
	t.Helper()
	r.left(t, m, v1alpha1.MachineCrashLoopBackOff)
}

func (r *rig) left(t *testing.T, m *v1alpha1.Machine, phase v1alpha1.MachinePhase) {
	t.Helper()
	r.create(t, m)
	before := m.DeepCopy()
	m.Status.CurrentStatus.Phase = phase
	m.Status.LastKnownState = "half made"
	if err := r.Status().Patch(t.Context(), m, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
}

// found with a node name of its own, as the provider sees it.
func foundAs(m *driverv1.Machine, node string, code driverv1.Code) *driverv1.Result {
	result := found(m)
	result.GetInstanceStatus().Instance.NodeName = node
	if code != driverv1.Code_CODE_OK {
		result.Status = &driverv1.Status{Code: code, Message: "no luck"}
	}

	return result
}

// What another manager has left is looked for before anything is made.
func TestStatusBeforeCreation(t *testing.T) {
	t.Parallel()
	type done struct {
		Asked              bool // a cache that lags behind may have it asked twice
		Create, Initialize int
		ProviderID, Node   string
	}
	const preset = "virtual://preset"
	for name, c := range map[string]struct {
		reason     string
		providerID string // of the Machine
		answer     func(m *driverv1.Machine) *driverv1.Result
		want       func(m *v1alpha1.Machine) done
	}{
		"OK": {
			"it is there and ready", "",
			func(m *driverv1.Machine) *driverv1.Result { return foundAs(m, "n1", driverv1.Code_CODE_OK) },
			func(m *v1alpha1.Machine) done { return done{true, 0, 0, "virtual://" + m.Name, "n1"} },
		},
		"OK, preset": {
			"the driver knows better", preset,
			func(m *driverv1.Machine) *driverv1.Result { return foundAs(m, "n1", driverv1.Code_CODE_OK) },
			func(m *v1alpha1.Machine) done { return done{true, 0, 0, "virtual://" + m.Name, "n1"} },
		},
		"NotFound": {
			"there is nothing", "",
			func(*driverv1.Machine) *driverv1.Result { return failure(driverv1.Code_CODE_NOT_FOUND) },
			func(m *v1alpha1.Machine) done { return done{true, 1, 1, "virtual://" + m.Name, m.Name} },
		},
		"NotFound, preset": {
			"who set it must know", preset,
			func(*driverv1.Machine) *driverv1.Result { return failure(driverv1.Code_CODE_NOT_FOUND) },
			func(m *v1alpha1.Machine) done { return done{true, 0, 1, preset, m.Name} },
		},
		"Unimplemented": {
			"create finds what there is", "",
			func(*driverv1.Machine) *driverv1.Result { return failure(driverv1.Code_CODE_UNIMPLEMENTED) },
			func(m *v1alpha1.Machine) done { return done{true, 1, 1, "virtual://" + m.Name, m.Name} },
		},
		"Unimplemented, preset": {
			"who set it must know", preset,
			func(*driverv1.Machine) *driverv1.Result { return failure(driverv1.Code_CODE_UNIMPLEMENTED) },
			func(m *v1alpha1.Machine) done { return done{true, 0, 1, preset, m.Name} },
		},
		"Uninitialized": {
			"it is there and not ready", "",
			func(m *driverv1.Machine) *driverv1.Result { return foundAs(m, "n1", driverv1.Code_CODE_UNINITIALIZED) },
			func(m *v1alpha1.Machine) done { return done{true, 0, 1, "virtual://" + m.Name, "n1"} },
		},
		"Uninitialized, preset, without an instance": {
			"the answer lacks what the machine says", preset,
			func(*driverv1.Machine) *driverv1.Result { return failure(driverv1.Code_CODE_UNINITIALIZED) },
			func(m *v1alpha1.Machine) done { return done{true, 0, 1, preset, m.Name} },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			m := r.machine("a")
			m.Spec.ProviderID = c.providerID
			r.crashed(t, m)
			r.cloud.answerStatus(c.answer)
			r.startDriver(t)
			r.startManager(t)
			got := r.phase(t, m, v1alpha1.MachinePending)
			did := done{
				r.cloud.count(status) > 0, r.cloud.count(create), r.cloud.count(initialize), got.Spec.ProviderID, got.Labels[v1alpha1.LabelKeyNode],
			}
			if diff := cmp.Diff(c.want(m), did); diff != "" {
				t.Errorf("%s (-want +got):\n%s", c.reason, diff)
			}
			if did.Create == 0 {
				r.event(t, m, "Adopted", did.ProviderID)
				if got.Status.LastKnownState != "half made" || got.Annotations[v1alpha1.AnnotationKeyMachinePriority] != "3" {
					t.Errorf("adopted machine has state %q and annotations %v", got.Status.LastKnownState, got.Annotations)
				}
			}
		})
	}
}

// A creation that took too long may have ended all the same.
func TestAdoptAFailedMachine(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		code        driverv1.Code
		initialized int
	}{
		"ready":     {driverv1.Code_CODE_OK, 0},
		"not ready": {driverv1.Code_CODE_UNINITIALIZED, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			m := r.machine("a")
			r.left(t, m, v1alpha1.MachineFailed)
			r.cloud.answerStatus(func(m *driverv1.Machine) *driverv1.Result { return foundAs(m, m.GetName(), c.code) })
			r.startDriver(t)
			r.startManager(t)
			r.phase(t, m, v1alpha1.MachinePending)
			if creates, n := r.cloud.count(create), r.cloud.count(initialize); creates != 0 || n != c.initialized {
				t.Errorf("%d creates and %d initializations, want none and %d", creates, n, c.initialized)
			}
		})
	}
}

// A manager that was replaced in the middle of a create leaves its finalizer and no
// more.
func TestTakenOverInTheMiddleOfACreate(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]func(*driverv1.Machine) *driverv1.Result{
		"made":     found,
		"not made": func(*driverv1.Machine) *driverv1.Result { return failure(driverv1.Code_CODE_NOT_FOUND) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			m := r.machine("a")
			m.Finalizers = []string{v1alpha1.FinalizerName}
			r.create(t, m)
			r.cloud.answerStatus(answer)
			r.startDriver(t)
			r.startManager(t)
			r.phase(t, m, v1alpha1.MachinePending)
			if asked, creates := r.cloud.count(status), r.cloud.count(create); asked == 0 || (creates == 0) != (name == "made") {
				t.Errorf("asked %d times, %d creates", asked, creates)
			}
		})
	}
}

// A new machine needs no look: its create finds what there may be.
func TestNoStatusForANewMachine(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	r.pending(t, "a")
	if n := r.cloud.count(status); n != 0 {
		t.Errorf("%d times asked for the instance of a new machine", n)
	}
}

// An instance that is there and has no id can be no machine's.
func TestStatusWithoutAProviderID(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	m := r.machine("a")
	r.crashed(t, m)
	r.cloud.failOnce(status, func(*driverv1.Machine) *driverv1.Result { return failure(driverv1.Code_CODE_UNINITIALIZED) })
	r.startDriver(t)
	r.startManager(t)
	r.until(t, "a failure that says so", m, func(m *v1alpha1.Machine) bool {
		return m.Status.LastOperation.ErrorCode == "Internal" && strings.Contains(m.Status.LastOperation.Description, "without a provider id")
	})
	r.phase(t, m, v1alpha1.MachinePending) // found out again, and made
}

// A machine that is to go and does not know its Node asks for it, to have it
// drained.
func TestStatusBeforeDeletion(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		reason  string
		answer  func(m *driverv1.Machine) *driverv1.Result
		drained bool
	}{
		"OK": {
			"its pods are evicted first",
			func(m *driverv1.Machine) *driverv1.Result { return foundAs(m, m.GetName(), driverv1.Code_CODE_OK) }, true,
		},
		"NotFound": {
			"something else of it may be left",
			func(*driverv1.Machine) *driverv1.Result { return failure(driverv1.Code_CODE_NOT_FOUND) }, false,
		},
		"Unimplemented": {
			"delete finds what there is",
			func(*driverv1.Machine) *driverv1.Result { return failure(driverv1.Code_CODE_UNIMPLEMENTED) }, false,
		},
		"Uninitialized": {
			"it never was a Node",
			func(m *driverv1.Machine) *driverv1.Result {
				return foundAs(m, m.GetName(), driverv1.Code_CODE_UNINITIALIZED)
			}, false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			m := r.machine("a")
			m.Finalizers = []string{v1alpha1.FinalizerName}
			r.crashed(t, m)
			r.join(t, m)
			r.delete(t, m)
			r.cloud.answerStatus(c.answer)
			r.startDriver(t)
			r.startManager(t)
			r.gone(t, m)
			if asked, deleted := r.cloud.count(status), r.cloud.count(remove); asked < 1 || deleted != 1 {
				t.Errorf("asked %d times, deleted %d times: %s", asked, deleted, c.reason)
			}
			drained := strings.Contains(strings.Join(r.events(t, m), "\n"), "Drained: ")
			if drained != c.drained || (r.node(t, m.Name) == nil) != c.drained {
				t.Errorf("node drained: %v, want %v: %s", drained, c.drained, c.reason)
			}
		})
	}
}

// A Node that carries the machine's name and is its instance saves the question.
func TestNodeKnownByItsLabel(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	m := r.machine("a")
	m.Finalizers, m.Spec.ProviderID = []string{v1alpha1.FinalizerName}, "virtual://"+m.Name
	r.crashed(t, m)
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: m.Name + "-x", Labels: map[string]string{v1alpha1.LabelKeyMachineName: m.Name}},
		Spec:       corev1.NodeSpec{ProviderID: m.Spec.ProviderID},
	}
	r.create(t, node)
	t.Cleanup(func() { r.forceDelete(t, node) })
	r.delete(t, m)
	r.startDriver(t)
	r.startManager(t)
	r.gone(t, m)
	if n := r.cloud.count(status); n != 0 || r.node(t, node.Name) != nil {
		t.Errorf("asked %d times, node is %v", n, r.node(t, node.Name))
	}
}

// A machine in another namespace may have the name, and a Node that bears it.
func TestNodeOfANamesake(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason, providerID string
	}{
		"another instance": {"only the driver could know whose it is, and it knows of none", "virtual://theirs"},
		"no id":            {"the same", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			m := r.machine("a")
			m.Finalizers = []string{v1alpha1.FinalizerName}
			r.crashed(t, m)
			node := &corev1.Node{
				ObjectMeta: metav1.ObjectMeta{Name: m.Name + "-theirs", Labels: map[string]string{v1alpha1.LabelKeyMachineName: m.Name}},
				Spec:       corev1.NodeSpec{ProviderID: tc.providerID},
			}
			r.create(t, node)
			t.Cleanup(func() { r.forceDelete(t, node) })
			r.delete(t, m)
			r.startDriver(t)
			r.startManager(t)
			r.gone(t, m)
			if got := r.node(t, node.Name); got == nil || got.Spec.Unschedulable {
				t.Errorf("%s: the node is %v", tc.reason, got)
			}
			if all := strings.Join(r.events(t, m), "\n"); strings.Contains(all, "Drain") {
				t.Errorf("%s; but there are\n%s", tc.reason, all)
			}
		})
	}
}

// A driver that finds several instances never returns the Node. Neither that nor
// a driver without an answer may keep the machine for ever.
func TestNodeStaysUnknown(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		reason  string
		timeout time.Duration
		force   bool
	}{
		"late":   {"its time to drain is over", 2 * time.Second, false},
		"forced": {"a person has inspected it", time.Hour, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.settings.Retry.Short, r.settings.Retry.Medium = time.Hour, time.Hour
			m := r.machine("a")
			m.Finalizers = []string{v1alpha1.FinalizerName}
			m.Spec.MachineDrainTimeout = &metav1.Duration{Duration: c.timeout}
			r.crashed(t, m)
			r.delete(t, m)
			r.cloud.answerStatus(func(*driverv1.Machine) *driverv1.Result { return failure(driverv1.Code_CODE_OUT_OF_RANGE) })
			r.startDriver(t)
			r.startManager(t)
			if c.force {
				r.event(t, m, "FailedStatus", "failed with OutOfRange")
				r.change(t, m, func() { metav1.SetMetaDataLabel(&m.ObjectMeta, v1alpha1.LabelKeyForceDeletion, "true") })
			}
			r.gone(t, m)
			r.event(t, m, "NodeUnknown", "without draining the node")
			if n := r.cloud.count(remove); n != 1 {
				t.Errorf("%d deletes, want 1: %s", n, c.reason)
			}
		})
	}
}
