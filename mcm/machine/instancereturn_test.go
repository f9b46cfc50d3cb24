package machine_test

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// addressNamed has the cloud name Nodes after their addresses, all of them the
// same until free is closed.
func (r *rig) addressNamed(name string, free <-chan struct{}) {
	r.cloud.answer(func(_ context.Context, task *replica.Task) *driverv1.Result {
		m := bus.MachineOf(task.Request)
		if task.Operation != create {
			return nil
		}
		select {
		case <-free:
			return nil
		default:
		}
		r.cloud.mu.Lock()
		defer r.cloud.mu.Unlock()
		if _, there := r.cloud.instances[m.GetUid()]; !there {
			r.cloud.instances[m.GetUid()] = "virtual://" + m.GetName()
			r.cloud.made++
		}

		return &driverv1.Result{Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{
			Instance: &driverv1.Instance{ProviderId: "virtual://" + m.GetName(), NodeName: name},
		}}}
	})
}

func TestOldNode(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		reason string
		spec   corev1.NodeSpec
		late   bool // the Node is made after the machine
		own    bool
	}{
		"another instance":       {"it would take over its Node", corev1.NodeSpec{ProviderID: "virtual://before"}, false, false},
		"of before, without id":  {"it was there before the machine was wanted", corev1.NodeSpec{}, false, false},
		"a namesake's":           {"the id says more than the name", corev1.NodeSpec{ProviderID: "virtual://before"}, false, false},
		"another instance, late": {"the id says more than the age", corev1.NodeSpec{ProviderID: "virtual://before"}, true, false},
		"its own": {
			"it joined before the answer came; the cloud puts the zone where the driver puts nothing",
			corev1.NodeSpec{ProviderID: "virtual://zone/%s"},
			false, true,
		},
		"late, without id": {"nothing speaks against it", corev1.NodeSpec{}, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.settings.Retry.Medium = time.Hour
			m := r.machine("a")
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: r.namespace + "-ip-10-0-0-1"}, Spec: c.spec}
			if name == "a namesake's" {
				node.Labels = map[string]string{v1alpha1.LabelKeyMachineName: m.Name}
			}
			if c.own && c.spec.ProviderID != "" {
				node.Spec.ProviderID = "virtual://zone/" + m.Name
			}
			t.Cleanup(func() { r.forceDelete(t, node) })
			free := make(chan struct{})
			r.addressNamed(node.Name, free)
			if c.late {
				r.create(t, m)
			}
			r.create(t, node)
			if !c.late {
				untilLater(t, node.CreationTimestamp)
				r.create(t, m)
			}
			r.startDriver(t)
			r.startManager(t)
			if c.own {
				got := r.phase(t, m, v1alpha1.MachinePending)
				if got.Labels[v1alpha1.LabelKeyNode] != node.Name {
					t.Errorf("node is %q, want %q: %s", got.Labels[v1alpha1.LabelKeyNode], node.Name, c.reason)
				}

				return
			}
			r.event(t, m, "OldNode", "it would join as node "+node.Name)
			r.event(t, m, "InstanceDeleted", "virtual://"+m.Name)
			got := r.get(t, m)
			if s := got.Status; s.CurrentStatus.Phase != v1alpha1.MachineFailed || s.LastOperation.Description != "VM using old node obj" ||
				s.LastOperation.Type != "Create" || s.LastOperation.State != "Failed" {
				t.Errorf("status is %+v: %s", s, c.reason)
			}
			if got.Spec.ProviderID != "" || got.Labels[v1alpha1.LabelKeyNode] != "" {
				t.Errorf("machine still has instance %q as node %q", got.Spec.ProviderID, got.Labels[v1alpha1.LabelKeyNode])
			}
			if there, made := r.cloud.has(); there != 0 || made != 1 {
				t.Errorf("the cloud has %d instances of %d", there, made)
			}
			if stored := r.node(t, node.Name); stored == nil || len(stored.Finalizers) != 0 {
				t.Errorf("the node of before was touched: %+v", stored)
			}
			// A change of the class ends the wait; by then the name may be free.
			close(free)
			class := r.class()
			r.change(t, class, func() { class.ProviderSpec.Raw = []byte(`{"size":"m"}`) })
			r.phase(t, m, v1alpha1.MachinePending)
		})
	}
}

// untilLater waits until what is made from now on is younger than t: timestamps of
// objects are whole seconds.
func untilLater(t *testing.T, stamp metav1.Time) {
	t.Helper()
	if !poll(t, func() bool { return time.Now().Truncate(time.Second).After(stamp.Time) }) {
		t.Fatal("time stands still")
	}
}

// A machine that is deleted in the middle of giving its instance back gives it
// back once, and so does one whose manager is restarted.
func TestOldNodeInterrupted(t *testing.T) {
	t.Parallel()
	for name, interrupt := range map[string]func(*testing.T, *rig, *v1alpha1.Machine){
		"deleted": func(t *testing.T, r *rig, m *v1alpha1.Machine) {
			t.Helper()
			r.delete(t, m)
		},
		"restarted": func(t *testing.T, r *rig, _ *v1alpha1.Machine) {
			t.Helper()
			r.stop()
			r.startManager(t)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			node := &corev1.Node{
				ObjectMeta: metav1.ObjectMeta{Name: r.namespace + "-ip-10-0-0-1"}, Spec: corev1.NodeSpec{ProviderID: "virtual://before"},
			}
			t.Cleanup(func() { r.forceDelete(t, node) })
			r.create(t, node)
			open := make(chan struct{})
			r.cloud.answer(func(ctx context.Context, task *replica.Task) *driverv1.Result {
				m := bus.MachineOf(task.Request)
				switch {
				case task.Operation == create && r.cloud.operations(create) == 1:
					return &driverv1.Result{Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{
						Instance: &driverv1.Instance{ProviderId: "virtual://" + m.GetName(), NodeName: node.Name},
					}}}
				case task.Operation == remove:
					r.cloud.entered <- task
					select {
					case <-open:
					case <-ctx.Done():
					}
				}

				return nil
			})
			r.startDriver(t)
			r.startManager(t)
			m := r.machine("a")
			r.create(t, m)
			<-r.cloud.entered
			interrupt(t, r, m)
			close(open)
			if name == "deleted" {
				r.gone(t, m)
			} else {
				r.phase(t, m, v1alpha1.MachinePending) // with its second instance
			}
			if n := r.cloud.operations(remove); n != 1 {
				t.Errorf("%d deletes, want 1", n)
			}
		})
	}
}

// A journal may come from a backup that was made while its machine was deleted.
func TestJournalOfADeletion(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.machine("a")
	m.Annotations = map[string]string{v1alpha1.AnnotationKeyOperation: `{"settled":2,"operation":"delete"}`}
	m.Spec.ProviderID, m.Labels = "virtual://"+m.Name, map[string]string{v1alpha1.LabelKeyNode: m.Name}
	r.create(t, m)
	r.join(t, m)
	r.phase(t, m, v1alpha1.MachineRunning)
	if n := r.cloud.count(remove); n != 0 {
		t.Errorf("%d deletes for a machine that is not in deletion", n)
	}
}
