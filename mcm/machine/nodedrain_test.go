package machine_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// running makes a machine with a healthy Node.
func (r *rig) running(t *testing.T, m *v1alpha1.Machine) *v1alpha1.Machine {
	t.Helper()
	r.create(t, m)
	r.phase(t, m, v1alpha1.MachinePending)
	r.join(t, m)

	return r.phase(t, m, v1alpha1.MachineRunning)
}

// pod makes a ready pod on the machine's Node. There is no kubelet that ends it.
func (r *rig) pod(t *testing.T, m *v1alpha1.Machine) *corev1.Pod {
	t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, GenerateName: m.Name + "-", Labels: map[string]string{"app": "guarded"}},
		Spec:       corev1.PodSpec{NodeName: m.Name, Containers: []corev1.Container{{Name: "main", Image: "none.invalid/none"}}},
	}
	r.create(t, pod)
	pod.Status.Phase = corev1.PodRunning
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	if err := r.Status().Update(t.Context(), pod); err != nil {
		t.Fatal(err)
	}

	return pod
}

// evicted waits until a pod is in deletion.
func (r *rig) evicted(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	if !poll(t, func() bool {
		if err := r.Get(t.Context(), client.ObjectKeyFromObject(pod), pod); err != nil {
			t.Fatal(err)
		}

		return !pod.DeletionTimestamp.IsZero()
	}) {
		t.Fatalf("pod %s is not evicted", pod.Name)
	}
}

// end removes a pod, as its kubelet does when it has ended.
func (r *rig) end(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	if err := r.Delete(t.Context(), pod, client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
}

// budget makes a disruption budget for all pods that pod makes, with the status
// that its controller would give it.
func (r *rig) budget(t *testing.T, status policyv1.PodDisruptionBudgetStatus) {
	t.Helper()
	budget := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "strict"},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "guarded"}}},
	}
	r.create(t, budget)
	status.ObservedGeneration = budget.Generation
	budget.Status = status
	if err := r.Status().Update(t.Context(), budget); err != nil {
		t.Fatal(err)
	}
}

// attach attaches a volume to the machine's Node, without a controller that detaches it.
func (r *rig) attach(t *testing.T, m *v1alpha1.Machine) *storagev1.VolumeAttachment {
	t.Helper()
	a := &storagev1.VolumeAttachment{
		ObjectMeta: metav1.ObjectMeta{Name: m.Name},
		Spec: storagev1.VolumeAttachmentSpec{
			Attacher: "test", NodeName: m.Name, Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: new("volume")},
		},
	}
	r.create(t, a)
	t.Cleanup(func() {
		if err := client.IgnoreNotFound(r.Delete(context.WithoutCancel(t.Context()), a)); err != nil {
			t.Error(err)
		}
	})

	return a
}

func (r *rig) attached(t *testing.T, a *storagev1.VolumeAttachment) bool {
	t.Helper()
	err := r.Get(t.Context(), client.ObjectKeyFromObject(a), a)
	if client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}

	return err == nil
}

// failIfInUse makes it an error to delete an instance whose Node has pods.
func (r *rig) failIfInUse(t *testing.T) {
	t.Helper()
	r.cloud.answer(func(ctx context.Context, task *replica.Task) *driverv1.Result {
		if task.Operation != remove {
			return nil
		}
		name := bus.MachineOf(task.Request).GetName()
		err := r.Get(ctx, client.ObjectKey{Namespace: r.namespace, Name: name}, &corev1.Pod{})
		if !apierrors.IsNotFound(err) {
			t.Errorf("the instance of %s is deleted before its pod is gone (%v)", name, err)
		}

		return nil
	})
}

func TestDrain(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	r.failIfInUse(t)
	m := r.running(t, r.machine("a"))
	pod := r.pod(t, m)
	r.delete(t, m)
	r.evicted(t, pod)
	got := r.until(t, "draining", m, func(m *v1alpha1.Machine) bool {
		return m != nil && strings.Contains(m.Status.LastOperation.Description, "Initiate node drain")
	})
	if last := got.Status.LastOperation; last.Type != "Delete" || last.State != "Processing" {
		t.Errorf("last operation is %+v", last)
	}
	node := r.node(t, m.Name)
	if reason := terminating(node); !node.Spec.Unschedulable || reason != v1alpha1.ReasonScaleDown {
		t.Errorf("unschedulable is %t, condition Terminating has reason %q", node.Spec.Unschedulable, reason)
	}
	r.event(t, m, "Draining", m.Name)
	r.end(t, pod)
	r.gone(t, m)
	r.event(t, m, "Drained", m.Name)
	if there, _ := r.cloud.has(); there != 0 {
		t.Errorf("the cloud has %d instances", there)
	}
}

// terminating returns the reason of a Node's condition Terminating.
func terminating(node *corev1.Node) string {
	i := slices.IndexFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == v1alpha1.NodeTerminating && c.Status == corev1.ConditionTrue
	})
	if i < 0 {
		return ""
	}

	return node.Status.Conditions[i].Reason
}

// A drain that nothing helps any more must not keep the machine for ever, nor
// give way too early.
func TestDrainHeldUp(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		reason      string
		budget      *policyv1.PodDisruptionBudgetStatus
		timeout     time.Duration
		event, text string
		state       v1alpha1.MachineState
	}{
		"refused": {
			"the budget may give way later",
			&policyv1.PodDisruptionBudgetStatus{ExpectedPods: 2, CurrentHealthy: 1, DesiredHealthy: 1}, 0,
			"DrainHeldUp", "disruption budget", v1alpha1.MachineStateProcessing,
		},
		"misconfigured": {
			"the budget never gives way, so it is said to be wrong",
			&policyv1.PodDisruptionBudgetStatus{ExpectedPods: 1, CurrentHealthy: 1, DesiredHealthy: 1}, 0,
			"FailedDrain", "strict is misconfigured", v1alpha1.MachineStateFailed,
		},
		"slow": {
			"no budget refuses, but the pod does not end", nil, 0,
			"Draining", "", v1alpha1.MachineStateProcessing,
		},
		"late": {
			"without anybody's help the time to drain runs out",
			&policyv1.PodDisruptionBudgetStatus{ExpectedPods: 1, CurrentHealthy: 1, DesiredHealthy: 1}, 2 * time.Second,
			"FailedDrain", "strict is misconfigured", v1alpha1.MachineStateFailed,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRunningRig(t)
			r.failIfInUse(t)
			m := r.machine(name)
			if c.timeout != 0 {
				m.Spec.MachineDrainTimeout = &metav1.Duration{Duration: c.timeout}
			}
			m = r.running(t, m)
			pod := r.pod(t, m)
			if c.budget != nil {
				r.budget(t, *c.budget)
			}
			r.delete(t, m)
			r.event(t, m, c.event, c.text)
			if c.timeout == 0 {
				got := r.until(t, "held up", m, func(m *v1alpha1.Machine) bool {
					if m == nil {
						return false
					}
					last := m.Status.LastOperation

					return last.State == c.state && last.Type == v1alpha1.MachineOperationDelete &&
						strings.Contains(last.Description, "Initiate node drain") &&
						(c.budget == nil || strings.Contains(last.Description, pod.Name))
				})
				r.change(t, got, func() { metav1.SetMetaDataLabel(&got.ObjectMeta, v1alpha1.LabelKeyForceDeletion, "true") })
			}
			r.gone(t, m)
			if there, _ := r.cloud.has(); there != 0 {
				t.Errorf("%s: the cloud has %d instances", c.reason, there)
			}
		})
	}
}

// Two hours of tries that all fail alike must not be two hours of writes.
func TestDrainFailsQuietly(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.running(t, r.machine("a"))
	pod := r.pod(t, m)
	r.budget(t, policyv1.PodDisruptionBudgetStatus{ExpectedPods: 1, CurrentHealthy: 1, DesiredHealthy: 1})
	r.delete(t, m)
	failed := func(m *v1alpha1.Machine) bool {
		return m != nil && m.Status.LastOperation.State == v1alpha1.MachineStateFailed
	}
	before := r.until(t, "a failed drain", m, failed)
	const tries, each = 5, 4 // requests of a try: for the node, its pods, the eviction and the budgets
	for sent := r.requests.Load(); !poll(t, func() bool { return r.requests.Load() >= sent+tries*each }); {
		t.Fatal("the drain is not tried again")
	}
	if after := r.get(t, m); after.ResourceVersion != before.ResourceVersion {
		t.Errorf("the machine was written to; last operation was %+v\nand is %+v", before.Status.LastOperation, after.Status.LastOperation)
	}
	r.end(t, pod)
	r.gone(t, m)
}

func TestRestartDuringDrain(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	r.failIfInUse(t)
	m := r.running(t, r.machine("a"))
	pod := r.pod(t, m)
	r.delete(t, m)
	r.evicted(t, pod)
	r.stop()
	r.requests.Store(0)
	r.startManager(t)
	if !poll(t, func() bool { return r.requests.Load() > 2 }) {
		t.Fatal("the new manager does not drain")
	}
	r.end(t, pod)
	r.gone(t, m)
	if there, _ := r.cloud.has(); there != 0 {
		t.Errorf("the cloud has %d instances", there)
	}
	if n := r.cloud.operations(remove); n != 1 {
		t.Errorf("%d different deletes of one machine", n)
	}
}

// Which operation a machine that joined long ago began last is nothing to a manager
// that has not seen it, and no reason to wait for anybody.
func TestDrainAfterRestart(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	stop := r.stoppableDriver(t)
	r.startManager(t)
	m := r.running(t, r.machine("a"))
	pod := r.pod(t, m)
	r.stop()
	stop()
	r.startManager(t)
	r.delete(t, m)
	r.evicted(t, pod)
	forced := r.get(t, m)
	r.change(t, forced, func() { metav1.SetMetaDataLabel(&forced.ObjectMeta, v1alpha1.LabelKeyForceDeletion, "True") })
	r.event(t, m, "Drained", "")
	r.startDriver(t)
	r.gone(t, m)
	for _, text := range r.events(t, m) {
		if strings.HasPrefix(text, "EndingCreation: ") {
			t.Errorf("the machine was running, and is said to be still in the making: %s", text)
		}
	}
}

// A started step is not repeated: a Node whose instance may be gone cannot end
// anything in order.
func TestNoDrainAfterDelete(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.settings.Retry.Short = time.Hour
	r.startDriver(t)
	r.startManager(t)
	r.cloud.failOnce(remove, func(*driverv1.Machine) *driverv1.Result { return failure(driverv1.Code_CODE_UNAVAILABLE) })
	m := r.running(t, r.machine("a"))
	r.delete(t, m)
	r.event(t, m, "FailedDelete", "no luck")
	r.stop()
	pod := r.pod(t, m) // it came although the node is cordoned
	r.settings.Retry.Short = time.Millisecond
	class := r.class()
	r.change(t, class, func() { class.ProviderSpec.Raw = []byte(`{"size":"m"}`) }) // no need to wait
	r.startManager(t)
	r.gone(t, m)
	if err := r.Get(t.Context(), client.ObjectKeyFromObject(pod), pod); err != nil || !pod.DeletionTimestamp.IsZero() {
		t.Errorf("the pod was evicted (%v)", err)
	}
	r.end(t, pod)
}

func TestDrainOfAFailedMachine(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.machine("a")
	m.Spec.MachineHealthTimeout = &metav1.Duration{Duration: 1}
	m = r.running(t, m)
	bad := ready(corev1.ConditionFalse)
	bad.LastTransitionTime = metav1.Now()
	r.condition(t, r.node(t, m.Name), bad)
	r.phase(t, m, v1alpha1.MachineFailed)
	pod := r.pod(t, m)
	r.delete(t, m)
	r.evicted(t, pod)
	if reason := terminating(r.node(t, m.Name)); reason != v1alpha1.ReasonUnhealthy {
		t.Errorf("condition Terminating has reason %q", reason)
	}
	r.end(t, pod)
	r.gone(t, m)
}

// The existing manager keeps no journal; what it left half deleted says by a text
// how far it got.
func TestHalfDeleted(t *testing.T) {
	t.Parallel()
	type left struct {
		reason, text        string
		pod, instance, node bool
	}
	cases := map[string]left{
		"status": {"nothing was done", "Set machine status to termination. Now, getting VM Status", true, true, true},
		"drain":  {"the drain has started", "Initiate node drain", true, true, true},
		"volumes": {
			"pods were ended by force", "Force Drain successful. Delete Volume Attachments", false, true, true,
		},
		"delete": {
			"the node is drained, and a delete failed",
			"machine codes error: code = [Unavailable] message = [try later]. Initiate VM deletion", false, true, true,
		},
		"node":      {"the instance is gone", "VM deletion was successful. Initiate node object deletion", false, false, true},
		"finalizer": {"so is its node", "Initiate machine object finalizer removal", false, false, false},
	}
	r := newRig(t)
	r.failIfInUse(t)
	machines, volumes := map[string]*v1alpha1.Machine{}, map[string]*storagev1.VolumeAttachment{}
	for name, c := range cases {
		m := r.machine(name)
		m.Finalizers, m.Labels = []string{v1alpha1.FinalizerName}, map[string]string{v1alpha1.LabelKeyNode: m.Name}
		m.Spec.ProviderID = "virtual://" + m.Name
		r.create(t, m)
		m.Status.CurrentStatus.Phase = v1alpha1.MachineTerminating
		m.Status.LastOperation = v1alpha1.LastOperation{
			Type: v1alpha1.MachineOperationDelete, State: v1alpha1.MachineStateProcessing, Description: c.text,
		}
		if err := r.Status().Update(t.Context(), m); err != nil {
			t.Fatal(err)
		}
		if c.instance {
			r.cloud.instances[string(m.UID)] = m.Spec.ProviderID
		}
		if c.node {
			volumes[name] = r.attach(t, m)
			node := r.join(t, m)
			r.change(t, node, func() {
				node.Finalizers = []string{v1alpha1.FinalizerNameNode}
				node.Labels = map[string]string{v1alpha1.LabelKeyMachineName: m.Name}
			})
		}
		r.delete(t, m)
		machines[name] = m
	}
	pods := map[string]*corev1.Pod{}
	for name, c := range cases {
		if c.pod {
			pods[name] = r.pod(t, machines[name])
		}
	}
	r.startDriver(t)
	r.startManager(t)
	for _, pod := range pods {
		r.evicted(t, pod)
		r.end(t, pod)
	}
	for name, m := range machines {
		r.gone(t, m)
		if r.node(t, m.Name) != nil {
			t.Errorf("%s (%s): the node is still there", name, cases[name].reason)
		}
	}
	for name, volume := range volumes {
		// What pods let go in order is detached by who attaches.
		if left, want := r.attached(t, volume), name != "volumes"; left != want {
			t.Errorf("%s (%s): it is %t that its volume is attached", name, cases[name].reason, left)
		}
	}
	if there, made := r.cloud.has(); there != 0 || made != 0 {
		t.Errorf("the cloud has %d instances, and made %d", there, made)
	}
	// Who takes over cannot rely on what a text says is gone.
	if n := r.cloud.operations(remove); n != len(cases) {
		t.Errorf("%d different deletes for %d machines", n, len(cases))
	}
}
