package machine_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/bootstrap"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// The tables below are the transitions between phases, a row for each: those of
// machines whose instance is made, of machines whose Node does something, and of
// machines that are deleted. What a set does with Failed machines is shown in
// package machineset.

// lived stores a machine in some phase, of which nothing else is known than that
// its instance and Node were made an hour ago.
func (r *rig) lived(t *testing.T, m *v1alpha1.Machine, phase v1alpha1.MachinePhase, last v1alpha1.LastOperation) {
	t.Helper()
	m.Finalizers = []string{v1alpha1.FinalizerName}
	m.Spec.ProviderID = "virtual://" + m.Name
	metav1.SetMetaDataLabel(&m.ObjectMeta, v1alpha1.LabelKeyNode, m.Name)
	m.Annotations = map[string]string{v1alpha1.AnnotationKeyOperation: `{"settled":1,"provider":"virtual"}`}
	r.create(t, m)
	r.cloud.mu.Lock()
	r.cloud.instances[string(m.UID)] = m.Spec.ProviderID
	r.cloud.mu.Unlock()
	before := m.DeepCopy()
	hourAgo := metav1.NewTime(time.Now().Add(-time.Hour))
	last.LastUpdateTime = hourAgo
	m.Status = v1alpha1.MachineStatus{
		CurrentStatus: v1alpha1.CurrentStatus{Phase: phase, LastUpdateTime: hourAgo, TimeoutActive: phase == v1alpha1.MachinePending},
		LastOperation: last,
	}
	if phase != v1alpha1.MachinePending {
		m.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "AnHourAgo"}}
	}
	if err := r.Status().Patch(t.Context(), m, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
}

// transition is where a row leads. In Text, %s is the machine's name.
type transition struct {
	Phase  v1alpha1.MachinePhase
	Type   v1alpha1.MachineOperationType
	State  v1alpha1.MachineState
	Code   string
	Text   string
	Active bool // the timeout
}

func transitionOf(m *v1alpha1.Machine) transition {
	last := m.Status.LastOperation

	return transition{
		m.Status.CurrentStatus.Phase, last.Type, last.State, last.ErrorCode,
		strings.ReplaceAll(last.Description, m.Name, "%s"), m.Status.CurrentStatus.TimeoutActive,
	}
}

// leads waits until a machine has made a transition.
func (r *rig) leads(t *testing.T, m *v1alpha1.Machine, want transition, reason string) {
	t.Helper()
	var got transition
	if !poll(t, func() bool {
		stored := r.get(t, m)
		if stored == nil {
			t.Fatalf("the machine is gone: %s", reason)
		}
		got = transitionOf(stored)
		// How long it took to join is no constant.
		if head, tail, cut := strings.Cut(want.Text, "*"); cut && strings.HasPrefix(got.Text, head) && strings.HasSuffix(got.Text, tail) {
			got.Text = want.Text
		}

		return got == want
	}) {
		t.Errorf("%s (-want +got):\n%s", reason, cmp.Diff(want, got))
	}
}

// From new and CrashLoopBackOff, by what the driver answers.
func TestCreationTransitions(t *testing.T) { //nolint:tparallel // what follows the rows must wait for them
	t.Parallel()
	fails := func(op driverv1.Operation) func(*driverv1.Machine, driverv1.Operation) *driverv1.Result {
		return func(_ *driverv1.Machine, asked driverv1.Operation) *driverv1.Result {
			if asked != op {
				return nil
			}

			return failure(driverv1.Code_CODE_INTERNAL)
		}
	}
	const text = "machine codes error: code = [Internal] message = [no luck]"
	const created, initialized = "Cloud provider message - " + text, "Provider error: " + text + ". Initialize VM Instance"
	failed := func(phase v1alpha1.MachinePhase, text string) transition {
		return transition{phase, "Create", "Failed", "Internal", text, false}
	}
	pending := transition{v1alpha1.MachinePending, "Create", "Processing", "", "Creating machine on cloud provider", true}
	rows := map[string]struct {
		reason string
		left   bool // by another manager, in CrashLoopBackOff
		late   bool // the machine is older than it may be
		answer func(*driverv1.Machine, driverv1.Operation) *driverv1.Result
		want   transition
	}{
		"new":                        {"its instance is made", false, false, nil, pending},
		"crashed":                    {"it is found or made", true, false, nil, pending},
		"new, create fails":          {"there is time to try again", false, false, fails(create), failed(v1alpha1.MachineCrashLoopBackOff, created)},
		"new, initialize fails":      {"there is time to try again", false, false, fails(initialize), failed(v1alpha1.MachineCrashLoopBackOff, initialized)},
		"crashed, create fails":      {"there is time to try again", true, false, fails(create), failed(v1alpha1.MachineCrashLoopBackOff, created)},
		"crashed, status fails":      {"there is time to try again", true, false, fails(status), failed(v1alpha1.MachineCrashLoopBackOff, created)},
		"late, create fails":         {"a person should inspect it", false, true, fails(create), failed(v1alpha1.MachineFailed, created)},
		"late, initialize fails":     {"a person should inspect it", false, true, fails(initialize), failed(v1alpha1.MachineFailed, initialized)},
		"late crashed, create fails": {"a person should inspect it", true, true, fails(create), failed(v1alpha1.MachineFailed, created)},
		"late crashed, status fails": {"a person should inspect it", true, true, fails(status), failed(v1alpha1.MachineFailed, created)},
		"old node": {
			"it would take over another one's Node", false, false,
			func(m *driverv1.Machine, asked driverv1.Operation) *driverv1.Result {
				if asked != create {
					return nil
				}

				return &driverv1.Result{Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{
					Instance: &driverv1.Instance{ProviderId: "virtual://" + m.GetName(), NodeName: m.GetName() + "-of-before"},
				}}}
			},
			transition{v1alpha1.MachineFailed, "Create", "Failed", "", "VM using old node obj", false},
		},
	}
	r := newRig(t)
	r.settings.Retry.Short, r.settings.Retry.Medium = time.Hour, time.Hour
	machines, answers := map[string]*v1alpha1.Machine{}, map[string]func(*driverv1.Machine, driverv1.Operation) *driverv1.Result{}
	for name, row := range rows {
		m := r.machine(strings.NewReplacer(" ", "-", ",", "").Replace(name))
		if row.late {
			m.Spec.MachineCreationTimeout = &metav1.Duration{Duration: time.Millisecond}
		}
		if row.left {
			r.crashed(t, m)
		} else {
			r.create(t, m)
		}
		machines[name], answers[m.Name] = m, row.answer
	}
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: machines["old node"].Name + "-of-before"}, Spec: corev1.NodeSpec{ProviderID: "virtual://before"},
	}
	r.create(t, node)
	t.Cleanup(func() { r.forceDelete(t, node) })
	untilLater(t, metav1.NewTime(time.Now())) // than all of them were made
	r.cloud.answer(func(_ context.Context, task *replica.Task) *driverv1.Result {
		m := bus.MachineOf(task.Request)
		if answer := answers[m.GetName()]; answer != nil {
			return answer(m, task.Operation)
		}

		return nil
	})
	r.startDriver(t)
	r.startManager(t)
	for name, row := range rows {
		t.Run(name, func(t *testing.T) { r.leads(t, machines[name], row.want, row.reason) })
	}
	r.event(t, machines["old node"], "InstanceDeleted", machines["old node"].Name)
}

// By what becomes of the Node.
func TestNodeTransitions(t *testing.T) { //nolint:tparallel // what follows the rows must wait for them
	t.Parallel()
	creating := v1alpha1.LastOperation{Type: "Create", State: "Processing", Description: "Creating machine on cloud provider"}
	joined := v1alpha1.LastOperation{Type: "Create", State: "Successful", Description: "Machine x successfully joined the cluster in 1m0s"}
	neverJoined := v1alpha1.LastOperation{Type: "Create", State: "Failed", Description: "Machine x failed to join the cluster in 20 minutes."}
	checking := v1alpha1.LastOperation{Type: "HealthCheck", State: "Processing", Description: "Machine x is unhealthy"}
	timedOut := v1alpha1.LastOperation{Type: "HealthCheck", State: "Failed", Description: "Machine x health checks failing since last 10m0s"}
	updated := v1alpha1.LastOperation{Type: "InPlaceUpdate", State: "Successful", Description: "Node x is updated"}
	healthy, unhealthy := ready(corev1.ConditionTrue), ready(corev1.ConditionFalse)
	rejoins := transition{v1alpha1.MachineRunning, "HealthCheck", "Successful", "", "Machine %s successfully re-joined the cluster", false}
	joins := transition{v1alpha1.MachineRunning, "Create", "Successful", "", "Machine %s successfully joined the cluster in *", false}
	suspected := func(why string) transition {
		return transition{
			v1alpha1.MachineUnknown, "HealthCheck", "Processing", "",
			"Machine %s is unhealthy - changing MachinePhase to Unknown. Node conditions: " + why, false,
		}
	}
	stays := func(phase v1alpha1.MachinePhase, last v1alpha1.LastOperation) transition {
		return transition{phase, last.Type, last.State, "", last.Description, phase == v1alpha1.MachinePending}
	}
	rows := map[string]struct {
		reason string
		from   v1alpha1.MachinePhase
		last   v1alpha1.LastOperation
		node   *corev1.NodeCondition // nil when there is no Node
		taint  string
		spec   func(*v1alpha1.MachineSpec)
		want   transition
	}{
		"pending, healthy": {"it has joined", v1alpha1.MachinePending, creating, &healthy, "", nil, joins},
		"pending, critical components": {
			"it is of no use yet", v1alpha1.MachinePending, creating, &healthy, v1alpha1.TaintKeyCriticalComponentsNotReady, nil,
			stays(v1alpha1.MachinePending, creating),
		},
		"pending, unhealthy": {"it may become healthy", v1alpha1.MachinePending, creating, &unhealthy, "", nil, stays(v1alpha1.MachinePending, creating)},
		"pending, late": {
			"it will not join any more", v1alpha1.MachinePending, creating, nil, "",
			func(s *v1alpha1.MachineSpec) {
				s.MachineCreationTimeout = &metav1.Duration{Duration: 600 * time.Millisecond}
			},
			transition{v1alpha1.MachineFailed, "Create", "Failed", "", "Machine %s failed to join the cluster in 0.01 minutes.", false},
		},
		"running, unhealthy": {"pods may not run", v1alpha1.MachineRunning, joined, &unhealthy, "", nil, suspected("Ready=False (Test)")},
		"running, no node":   {"nothing is known of it", v1alpha1.MachineRunning, joined, nil, "", nil, suspected("the node does not exist")},
		"running, critical components": {
			"they were there before", v1alpha1.MachineRunning, joined, &healthy, v1alpha1.TaintKeyCriticalComponentsNotReady, nil,
			stays(v1alpha1.MachineRunning, joined),
		},
		"unknown, healthy": {"it was a matter of time", v1alpha1.MachineUnknown, checking, &healthy, "", nil, rejoins},
		"unknown, for too long": {
			"it should be replaced", v1alpha1.MachineUnknown, checking, &unhealthy, "",
			func(s *v1alpha1.MachineSpec) { s.MachineHealthTimeout = &metav1.Duration{Duration: 10 * time.Minute} },
			transition{v1alpha1.MachineFailed, "HealthCheck", "Failed", "", "Machine %s health checks failing since last 10m0s", false},
		},
		"unknown, for less": {
			"there is time", v1alpha1.MachineUnknown, checking, &unhealthy, "",
			func(s *v1alpha1.MachineSpec) { s.MachineHealthTimeout = &metav1.Duration{Duration: 2 * time.Hour} },
			stays(v1alpha1.MachineUnknown, checking),
		},
		"unknown, no timeout": {
			"its owner says so", v1alpha1.MachineUnknown, checking, &unhealthy, "",
			func(s *v1alpha1.MachineSpec) { s.DisableHealthTimeout = new(true) },
			stays(v1alpha1.MachineUnknown, checking),
		},
		"failed to join, healthy": {"late, and not replaced", v1alpha1.MachineFailed, neverJoined, &healthy, "", nil, joins},
		"failed, healthy":         {"not replaced yet", v1alpha1.MachineFailed, timedOut, &healthy, "", nil, rejoins},
		"failed, unhealthy":       {"its set replaces it", v1alpha1.MachineFailed, timedOut, &unhealthy, "", nil, stays(v1alpha1.MachineFailed, timedOut)},
		"updated, healthy":        {"the update has ended", v1alpha1.MachineInPlaceUpdateSuccessful, updated, &healthy, "", nil, rejoins},
		"updating, unhealthy": {
			"the update decides", v1alpha1.MachineInPlaceUpdating, updated, &unhealthy, "",
			func(s *v1alpha1.MachineSpec) {
				s.MachineInPlaceUpdateTimeout = &metav1.Duration{Duration: 2 * time.Hour}
			},
			stays(v1alpha1.MachineInPlaceUpdating, updated),
		},
		"updating, for too long": {
			"it would stay for ever", v1alpha1.MachineInPlaceUpdating, updated, &healthy, "", nil,
			transition{v1alpha1.MachineInPlaceUpdateFailed, "InPlaceUpdate", "Failed", "", "Machine %s failed to in-place update in 20m0s minutes.", false},
		},
		"update failed, for less": {
			"the update may be tried again", v1alpha1.MachineInPlaceUpdateFailed, updated, &healthy, "",
			func(s *v1alpha1.MachineSpec) { s.MachineHealthTimeout = &metav1.Duration{Duration: 2 * time.Hour} },
			stays(v1alpha1.MachineInPlaceUpdateFailed, updated),
		},
		"update failed, for too long": {
			"it should be replaced", v1alpha1.MachineInPlaceUpdateFailed, updated, &unhealthy, "", nil,
			transition{v1alpha1.MachineFailed, "InPlaceUpdate", "Failed", "", "Machine %s health checks failing since last 10m0s", false},
		},
	}
	r := newRig(t)
	r.tokens = &bootstrap.Tokens{Target: r.Client}
	machines := map[string]*v1alpha1.Machine{}
	for name, row := range rows {
		m := r.machine(strings.NewReplacer(" ", "-", ",", "").Replace(name))
		if row.spec != nil {
			row.spec(&m.Spec)
		}
		machines[name] = m
		if row.node != nil {
			node := r.join(t, m, *row.node)
			if row.taint != "" {
				r.change(t, node, func() { node.Spec.Taints = []corev1.Taint{{Key: row.taint, Effect: corev1.TaintEffectNoSchedule}} })
			}
		}
		r.lived(t, m, row.from, row.last)
		if _, err := r.tokens.Ensure(t.Context(), m, time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	r.startDriver(t)
	r.startManager(t)
	for name, row := range rows {
		t.Run(name, func(t *testing.T) {
			m := machines[name]
			if row.node != nil { // what is copied of it is stored with the phase
				r.until(t, "a pass over it", m, func(m *v1alpha1.Machine) bool {
					return len(m.Status.Conditions) > 0 && m.Status.Conditions[0].Reason == row.node.Reason
				})
			}
			r.leads(t, m, row.want, row.reason)
		})
	}
	for name, left := range map[string]bool{
		"pending, healthy": false, "pending, critical components": false, "failed to join, healthy": false,
		"pending, unhealthy": true, "pending, late": true, "failed, unhealthy": true,
	} {
		if got := r.hasToken(t, machines[name]); got != left {
			t.Errorf("%s: it has a token to join with: %t, want %t", name, got, left)
		}
	}
	r.event(t, machines["pending, late"], "FailedToJoin", "failed to join the cluster in 0.01 minutes.")
	r.event(t, machines["running, unhealthy"], "Unhealthy", "Ready=False (Test)")
	r.event(t, machines["unknown, for too long"], "HealthTimeout", "health checks failing since last 10m0s")
	r.event(t, machines["unknown, healthy"], "Rejoined", "re-joined")
}

// statuses hears of every status that machines of the rig's namespace ever have.
func (r *rig) statuses(t *testing.T) func(*v1alpha1.Machine) []v1alpha1.MachineStatus {
	t.Helper()
	var mu sync.Mutex
	all := map[types.UID][]v1alpha1.MachineStatus{}
	r.watch(t, func(what watch.EventType, m *v1alpha1.Machine) {
		if what == watch.Modified {
			mu.Lock()
			defer mu.Unlock()
			all[m.UID] = append(all[m.UID], m.Status)
		}
	})

	return func(m *v1alpha1.Machine) []v1alpha1.MachineStatus {
		mu.Lock()
		defer mu.Unlock()

		return all[m.UID]
	}
}

// From every phase, by a wish to delete.
func TestDeletionTransitions(t *testing.T) { //nolint:tparallel // what follows the rows must wait for them
	t.Parallel()
	r := newRig(t)
	heard := r.statuses(t)
	machines := map[v1alpha1.MachinePhase]*v1alpha1.Machine{}
	for i, phase := range []v1alpha1.MachinePhase{
		v1alpha1.MachinePhaseNew, v1alpha1.MachinePending, v1alpha1.MachineAvailable, v1alpha1.MachineRunning, v1alpha1.MachineUnknown,
		v1alpha1.MachineFailed, v1alpha1.MachineCrashLoopBackOff, v1alpha1.MachineInPlaceUpdating,
		v1alpha1.MachineInPlaceUpdateSuccessful, v1alpha1.MachineInPlaceUpdateFailed,
	} {
		m := r.machine(fmt.Sprint(i))
		r.lived(t, m, phase, v1alpha1.LastOperation{Type: "Create", State: "Processing", Description: "Anything"})
		r.join(t, m)
		before := m.DeepCopy()
		m.Status.CurrentStatus.PreserveExpiryTime = &metav1.Time{Time: time.Now().Add(time.Hour)}
		if err := r.Status().Patch(t.Context(), m, client.MergeFrom(before)); err != nil {
			t.Fatal(err)
		}
		r.delete(t, m)
		machines[phase] = m
	}
	r.startDriver(t)
	r.startManager(t)
	for phase, m := range machines {
		t.Run("from "+string(phase), func(t *testing.T) {
			r.gone(t, m)
			for _, s := range heard(m) {
				if s.CurrentStatus.Phase != v1alpha1.MachineTerminating {
					continue
				}
				want := transition{
					v1alpha1.MachineTerminating, "Delete", "Processing", "", "Set machine status to termination. Now, getting VM Status", false,
				}
				if diff := cmp.Diff(want, transitionOf(&v1alpha1.Machine{ObjectMeta: m.ObjectMeta, Status: s})); diff != "" {
					t.Errorf("the first word of the deletion (-want +got):\n%s", diff)
				}
				if s.CurrentStatus.PreserveExpiryTime != nil {
					t.Errorf("it is to be preserved until %v", s.CurrentStatus.PreserveExpiryTime)
				}

				return
			}
			t.Errorf("it was never Terminating: %+v", heard(m))
		})
	}
	if there, made := r.cloud.has(); there != 0 || made != 0 {
		t.Errorf("the cloud has %d instances, and made %d", there, made)
	}
}
