package machine_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestLife(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.machine("a")
	r.create(t, m)
	pending := r.phase(t, m, v1alpha1.MachinePending)
	type facts struct {
		ProviderID, Node, Priority, LastKnownState string
		Finalizers                                 []string
		TimeoutActive                              bool
		LastOperation                              v1alpha1.LastOperation
	}
	last := pending.Status.LastOperation
	last.LastUpdateTime = metav1.Time{}
	want := facts{
		ProviderID: "virtual://" + m.Name, Node: m.Name, Priority: "3", LastKnownState: "made", TimeoutActive: true,
		Finalizers: []string{v1alpha1.FinalizerName},
		LastOperation: v1alpha1.LastOperation{
			Type: "Create", State: "Processing", Description: "Creating machine on cloud provider",
		},
	}
	got := facts{
		pending.Spec.ProviderID, pending.Labels["node"], pending.Annotations["machinepriority.machine.sapcloud.io"],
		pending.Status.LastKnownState, pending.Finalizers, pending.Status.CurrentStatus.TimeoutActive, last,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("pending machine (-want +got):\n%s", diff)
	}
	if journal := pending.Annotations[v1alpha1.AnnotationKeyOperation]; !strings.Contains(journal, `"settled":1`) {
		t.Errorf("journal is %s, want one operation settled", journal)
	}
	r.event(t, m, "Created", "virtual://"+m.Name)

	r.join(t, m)
	running := r.phase(t, m, v1alpha1.MachineRunning)
	if text := running.Status.LastOperation.Description; !strings.HasPrefix(text, "Machine "+m.Name+" successfully joined the cluster in ") {
		t.Errorf("description is %q", text)
	}
	if running.Status.LastOperation.State != v1alpha1.MachineStateSuccessful || len(running.Status.Conditions) != 1 {
		t.Errorf("status is %+v", running.Status)
	}
	r.event(t, m, "Joined", "as node "+m.Name)
	node := r.node(t, m.Name)
	if node.Labels[v1alpha1.LabelKeyMachineName] != m.Name || !cmp.Equal(node.Finalizers, []string{v1alpha1.FinalizerNameNode}) {
		t.Errorf("node has labels %v and finalizers %v", node.Labels, node.Finalizers)
	}

	r.delete(t, m)
	r.gone(t, m)
	if r.node(t, m.Name) != nil {
		t.Error("the node is still there")
	}
	if there, made := r.cloud.has(); there != 0 || made != 1 {
		t.Errorf("the cloud has %d instances of %d", there, made)
	}
	r.event(t, m, "Deleted", "")
}

// What a machine costs the API server bounds how many one control plane can
// have.
func TestRequests(t *testing.T) {
	t.Parallel()
	const machines = 20
	r := newRunningRig(t)
	r.requests.Store(0)
	var all []*v1alpha1.Machine
	for i := range machines {
		m := r.machine(fmt.Sprint(i))
		all = append(all, m)
		r.create(t, m)
	}
	for _, m := range all {
		r.phase(t, m, v1alpha1.MachinePending)
		r.join(t, m, ready(corev1.ConditionFalse))
	}
	for _, m := range all {
		r.condition(t, r.node(t, m.Name), ready(corev1.ConditionTrue))
	}
	for _, m := range all {
		r.phase(t, m, v1alpha1.MachineRunning)
	}
	if n := r.requests.Swap(0); n > 10*machines {
		t.Errorf("%d requests for %d machines until all ran, want at most 10 each", n, machines)
	} else {
		t.Logf("%.1f requests for each machine to run", float64(n)/machines)
	}
	for _, m := range all {
		r.delete(t, m)
	}
	for _, m := range all {
		r.gone(t, m)
	}
	if n := r.requests.Swap(0); n > 14*machines {
		t.Errorf("%d requests for %d machines until all were gone, want at most 14 each", n, machines)
	} else {
		t.Logf("%.1f requests for each machine to go", float64(n)/machines)
	}
	// A cache that lags behind must not have had anything made twice.
	if there, made := r.cloud.has(); there != 0 || made != machines {
		t.Errorf("the cloud has %d instances, and made %d for %d machines", there, made, machines)
	}
	for op, want := range map[driverv1.Operation]int{
		driverv1.Operation_OPERATION_CREATE: machines, driverv1.Operation_OPERATION_INITIALIZE: machines,
		driverv1.Operation_OPERATION_DELETE: machines,
	} {
		if got := r.cloud.count(op); got != want {
			t.Errorf("%d times %v for %d machines", got, op, want)
		}
	}
}

// Machines that wait for a slot cost the API server no more than others: that they wait
// is one line of the log, and mcmctl ops lists them.
func TestWaitForASlotCostsNoRequests(t *testing.T) {
	t.Parallel()
	const machines = 8
	r := newRig(t)
	r.slots = 1
	open := make(chan struct{})
	r.cloud.hold(open)
	r.startDriver(t)
	r.startManager(t)
	first := r.machine("first")
	r.create(t, first)
	bustest.Receive(t, "the driver to get the first create", r.cloud.entered)
	bustest.Eventually(t, "a session without a free slot", func() bool {
		all := r.caller.Replicas()

		return len(all) == 1 && all[0].Session.GetRunning() == 1
	})
	r.requests.Store(0)
	var all []*v1alpha1.Machine
	for i := range machines {
		m := r.machine(fmt.Sprint(i))
		all = append(all, m)
		r.create(t, m)
	}
	bustest.Eventually(t, "all wait for a slot", func() bool {
		waiting := r.dispatcher.Waiting().GetOperations()
		for _, op := range waiting {
			if !strings.Contains(op.GetLastProgress(), "all replicas of provider virtual are busy") {
				return false
			}
		}

		return len(waiting) == machines
	})
	close(open)
	for _, m := range all {
		r.phase(t, m, v1alpha1.MachinePending)
	}
	// The finalizer with the journal, the provider id with the state, the status, the
	// initialization and its end.
	if n := r.requests.Swap(0); n > 5*machines {
		t.Errorf("%d requests for %d machines that waited for a slot, want at most 5 each", n, machines)
	} else {
		t.Logf("%.1f requests for each machine", float64(n)/machines)
	}
	if lines := r.logged(t, "operations wait; mcmctl ops lists them"); len(lines) != 1 {
		t.Errorf("the log says %v, want one line for the cause", lines)
	}
	for _, m := range all {
		for _, event := range r.events(t, m) {
			if strings.HasPrefix(event, "OperationWaiting") {
				t.Errorf("%s has the Event %s, want none", m.Name, event)
			}
		}
	}
}

func TestNoTarget(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.noTarget, r.cloud.noInitialize = true, true
	r.startDriver(t)
	r.startManager(t)
	m := r.machine("a")
	r.create(t, m)
	got := r.phase(t, m, v1alpha1.MachineAvailable)
	want := []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: m.Name}, {Type: corev1.NodeInternalIP, Address: "10.0.0.1"}}
	if diff := cmp.Diff(want, got.Status.Addresses); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
	if _, labelled := got.Labels["node"]; labelled || got.Status.LastOperation.Description != "Created machine on cloud provider" {
		t.Errorf("labels are %v, description is %q", got.Labels, got.Status.LastOperation.Description)
	}
	r.delete(t, m)
	r.gone(t, m)
	if there, made := r.cloud.has(); there != 0 || made != 1 {
		t.Errorf("the cloud has %d instances of %d", there, made)
	}
}

func TestAdoptWithoutATarget(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.noTarget = true
	r.cloud.answerStatus(found)
	r.startDriver(t)
	r.startManager(t)
	m := r.machine("a")
	m.Spec.ProviderID = "virtual://" + m.Name
	r.create(t, m)
	got := r.phase(t, m, v1alpha1.MachineAvailable)
	want := []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: m.Name}, {Type: corev1.NodeInternalIP, Address: "10.0.0.1"}}
	if diff := cmp.Diff(want, got.Status.Addresses); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
}

func TestAdopt(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.machine("a")
	m.Spec.ProviderID = "virtual://" + m.Name
	r.create(t, m)
	r.join(t, m)
	r.phase(t, m, v1alpha1.MachineRunning)
	r.event(t, m, "Adopted", m.Spec.ProviderID)
	if n := r.cloud.count(driverv1.Operation_OPERATION_CREATE); n != 0 {
		t.Errorf("%d creates for a machine that came with an instance", n)
	}
	r.delete(t, m)
	r.gone(t, m)
	if n := r.cloud.count(driverv1.Operation_OPERATION_DELETE); n != 1 {
		t.Errorf("%d deletes, want 1", n)
	}
}
