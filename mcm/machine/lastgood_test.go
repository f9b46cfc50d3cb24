package machine_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/lastgood"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// pending makes a machine that has its instance.
func (r *rig) pending(t *testing.T, name string) *v1alpha1.Machine {
	t.Helper()
	m := r.machine(name)
	r.create(t, m)

	return r.phase(t, m, v1alpha1.MachinePending)
}

// deletedWith returns the class that the last delete of a machine came with.
func (r *rig) deletedWith(t *testing.T, m *v1alpha1.Machine) *driverv1.ClassReference {
	t.Helper()
	r.cloud.mu.Lock()
	defer r.cloud.mu.Unlock()
	for _, task := range slices.Backward(r.cloud.tasks) {
		if task.Operation == remove && bus.MachineOf(task.Request).GetName() == m.Name {
			return bus.ClassOf(task.Request)
		}
	}
	t.Fatalf("no delete of machine %s came", m.Name)

	return nil
}

// acceptedClass waits until the class says that instances were made of it as it
// stands.
func (r *rig) acceptedClass(t *testing.T) *v1alpha1.MachineClass {
	t.Helper()
	class := r.class()
	if !poll(t, func() bool {
		if err := r.Get(t.Context(), client.ObjectKeyFromObject(class), class); err != nil {
			t.Fatal(err)
		}
		former, err := lastgood.LastAccepted(class)
		if err != nil {
			t.Fatal(err)
		}

		return former == nil && class.Annotations[v1alpha1.AnnotationKeyAccepted] != ""
	}) {
		t.Fatalf("class is not noted as accepted: %v", class.Annotations)
	}

	return class
}

// A class or a secret may be removed by force, finalizer and all. Its
// machines must not be left with instances that cannot be deleted.
func TestRemovedByForce(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		reason string
		remove func(*rig)
	}{
		"class":  {"the driver needs it", func(r *rig) { r.delete(r.t, r.class()) }},
		"secret": {"the cloud wants credentials", func(r *rig) { r.delete(r.t, r.secret()) }},
		"both":   {"a whole namespace was cleared", func(r *rig) { r.delete(r.t, r.secret()); r.delete(r.t, r.class()) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRunningRig(t)
			m := r.pending(t, "a")
			secret := r.secret()
			if err := r.Get(t.Context(), client.ObjectKeyFromObject(secret), secret); err != nil {
				t.Fatal(err)
			}
			c.remove(r)
			// A machine made now says when the manager has seen it.
			late := r.machine("late")
			r.create(t, late)
			r.event(t, late, "InvalidMachine", "does not exist")
			r.delete(t, m)
			r.gone(t, m)
			if ref := r.deletedWith(t, m).GetSecret(); ref.GetUid() != string(secret.UID) {
				t.Errorf("delete came with secret %v, want the one removed: %s", ref, c.reason)
			}
			r.delete(t, late)
			r.gone(t, late) // its create may have begun before the manager saw the removal
			if there, _ := r.cloud.has(); there != 0 {
				t.Errorf("the cloud has %d instances: %s", there, c.reason)
			}
		})
	}
}

// When the manager was away as well, nothing is left, and that is said.
func TestNothingLeftOfAClass(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.pending(t, "a")
	r.stop()
	r.delete(t, r.class())
	r.delete(t, m)
	r.startManager(t)
	r.event(t, m, "CannotDelete", "small does not exist: create it")
	got := r.get(t, m)
	if last := got.Status.LastOperation; last.ErrorCode != "NotFound" || last.State != "Failed" || last.Type != "Delete" {
		t.Errorf("last operation is %+v", last)
	}
	r.create(t, r.class())
	r.gone(t, m)
	if there, _ := r.cloud.has(); there != 0 {
		t.Errorf("the cloud has %d instances", there)
	}
}

// Some drivers have credentials of their own: the deletion goes on without.
func TestNothingLeftOfASecret(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.pending(t, "a")
	r.stop()
	r.delete(t, r.secret())
	r.delete(t, m)
	r.startManager(t)
	r.gone(t, m)
	r.event(t, m, "MissingSecret", "boot does not exist: create it")
	if ref := r.deletedWith(t, m).GetSecret(); ref != nil {
		t.Errorf("delete came with secret %v", ref)
	}
}

// A class may be edited into what its driver refuses. What its machines were made
// from deletes them.
func TestClassEditedIntoNonsense(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		reason  string
		restart bool
	}{
		"at once":         {"the class remembers", false},
		"after a restart": {"not the manager alone", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRunningRig(t)
			m := r.pending(t, "a")
			class := r.acceptedClass(t)
			r.change(t, class, func() { class.ProviderSpec.Raw = []byte(`{"size":7}`) })
			r.cloud.answer(func(_ context.Context, task *replica.Task) *driverv1.Result {
				if strings.HasPrefix(bus.ClassOf(task.Request).GetClass().GetResourceVersion(), "accepted.") {
					return nil
				}

				return failure(driverv1.Code_CODE_INVALID_ARGUMENT)
			})
			if c.restart {
				r.stop()
				r.startManager(t)
			}
			r.delete(t, m)
			r.gone(t, m)
			r.event(t, m, "FailedDelete", "next try at once with MachineClass small as its driver last accepted it: no luck")
			if there, _ := r.cloud.has(); there != 0 {
				t.Errorf("the cloud has %d instances: %s", there, c.reason)
			}
			if n := r.cloud.operations(remove); n != 2 {
				t.Errorf("%d deletes, want one with each version of the class", n)
			}
		})
	}
}

// Rotated credentials and whatever else an edit mends must be used: the class as
// it stands comes first, and again after the former one was refused too.
func TestEditedClassComesFirst(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.pending(t, "a")
	class := r.acceptedClass(t)
	r.change(t, class, func() { class.ProviderSpec.Raw = []byte(`{"size":"m"}`) })
	r.cloud.answer(func(_ context.Context, task *replica.Task) *driverv1.Result {
		if task.Operation == remove && r.cloud.operations(remove) < 3 {
			return failure(driverv1.Code_CODE_FAILED_PRECONDITION)
		}

		return nil
	})
	r.delete(t, m)
	r.gone(t, m)
	var versions []bool
	r.cloud.mu.Lock()
	for _, task := range r.cloud.tasks {
		if task.Operation == remove {
			versions = append(versions, strings.HasPrefix(bus.ClassOf(task.Request).GetClass().GetResourceVersion(), "accepted."))
		}
	}
	r.cloud.mu.Unlock()
	if diff := cmp.Diff([]bool{false, true, false}, versions); diff != "" {
		t.Errorf("deletes with the former version (-want +got):\n%s", diff)
	}
}

// Another provider would find nothing to delete, and the machine would go and
// leave its instance behind.
func TestClassMovesToAnotherProvider(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.pending(t, "a")
	class := r.acceptedClass(t)
	r.change(t, class, func() { class.Provider = "other" })
	r.delete(t, m)
	r.gone(t, m)
	if there, _ := r.cloud.has(); there != 0 {
		t.Errorf("the cloud has %d instances", there)
	}

	class = r.class()
	r.change(t, class, func() { class.Provider = provider })
	m = r.pending(t, "none")
	r.change(t, class, func() { class.Provider = "" }) // without a provider it is no better
	r.delete(t, m)
	r.gone(t, m)

	r.change(t, class, func() { class.Provider = provider })
	m = r.pending(t, "b")
	r.change(t, class, func() { class.Provider = "other"; delete(class.Annotations, v1alpha1.AnnotationKeyAccepted) })
	r.delete(t, m)
	r.event(t, m, "CannotDelete", `field provider is "other", but "virtual" has been asked for the machine's instance: set it back until`)
	r.change(t, class, func() { class.Provider = provider })
	r.gone(t, m)
	if there, _ := r.cloud.has(); there != 0 {
		t.Errorf("the cloud has %d instances", there)
	}
}

// A provider may have created what it was asked for, whether that is known or not.
func TestClassMovesDuringCreate(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		// begin has an instance made without the manager knowing, and moves the class.
		begin func(*rig, *v1alpha1.Machine, func())
		set   bool // back before the machine is deleted
	}{
		"restart":            {"a driver is still at it", (*rig).beginAndRestart, true},
		"restart, deleted":   {"the same", (*rig).beginAndRestart, false},
		"half made":          {"it has an instance, and says nothing of it", (*rig).beginAndFail, true},
		"half made, deleted": {"the same", (*rig).beginAndFail, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRunningRig(t)
			r.settings.Retry.Short, r.settings.Retry.Medium = time.Hour, time.Hour // a change of the class ends the wait
			r.stop()
			r.startManager(t)
			other := newCloud()
			r.startDriverOf(t, "other", other, r.nats.URL())
			m, class := r.machine("a"), r.class()
			tc.begin(r, m, func() { r.change(t, class, func() { class.Provider = "other" }) })
			r.event(t, m, "InvalidMachine", `field provider is "other", but "virtual" has been asked for the machine's instance: set it back or delete`)
			back := func() { r.change(t, class, func() { class.Provider = provider }) }
			if tc.set {
				back()
				r.phase(t, m, v1alpha1.MachinePending)
			}
			r.delete(t, m)
			if !tc.set {
				r.event(t, m, "CannotDelete", `set it back until the machine is gone`)
				back()
			}
			r.gone(t, m)
			if there, made := r.cloud.has(); there != 0 || made != 1 {
				t.Errorf("%s: the cloud has %d instances of %d", tc.reason, there, made)
			}
			if n := len(other.history()); n != 0 {
				t.Errorf("%s: the other provider was asked %d times", tc.reason, n)
			}
		})
	}
}

func (r *rig) beginAndRestart(m *v1alpha1.Machine, move func()) {
	r.t.Helper()
	open := make(chan struct{})
	r.cloud.hold(open)
	r.create(r.t, m)
	bustest.Receive(r.t, "the driver to get the create", r.cloud.entered)
	r.stop()
	move()
	r.startManager(r.t)
	close(open)
}

func (r *rig) beginAndFail(m *v1alpha1.Machine, move func()) {
	r.t.Helper()
	r.cloud.failLate(driverv1.Code_CODE_INTERNAL)
	r.create(r.t, m)
	r.event(r.t, m, "FailedCreate", "failed with Internal")
	move()
}

// A provider without a driver has no instances.
func TestClassNamesUnservedProvidersTwice(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	class := r.class()
	move := func(to string) { r.change(t, class, func() { class.Provider = to }) }
	move("nobody")
	m, gone := r.machine("a"), r.machine("b")
	r.create(t, m)
	r.create(t, gone)
	for _, to := range []string{"noone", "none"} {
		r.event(t, m, "OperationWaiting", class.Provider)
		r.event(t, gone, "OperationWaiting", class.Provider)
		move(to)
	}
	r.event(t, gone, "OperationWaiting", class.Provider)
	r.delete(t, gone)
	r.gone(t, gone)
	move(provider)
	r.phase(t, m, v1alpha1.MachinePending)
}

// Nor has one whose driver had no room so far, as long as this manager lives.
func TestClassMovesWhileQueued(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.limits = dispatch.Limits{Provider: dispatch.Limit{InFlight: 1}}
	other := newCloud()
	r.startDriver(t)
	r.startDriverOf(t, "other", other, r.nats.URL())
	r.startManager(t)
	open := make(chan struct{})
	defer close(open)
	r.cloud.hold(open)
	r.create(t, r.machine("first"))
	bustest.Receive(t, "the driver to get the first create", r.cloud.entered)
	m, gone := r.machine("a"), r.machine("b")
	r.create(t, m)
	r.create(t, gone)
	for _, m := range []*v1alpha1.Machine{m, gone} {
		r.until(t, "its create to begin", m, func(m *v1alpha1.Machine) bool {
			return strings.Contains(m.Annotations[v1alpha1.AnnotationKeyOperation], `"operation":"create"`)
		})
	}
	r.delete(t, gone)
	r.gone(t, gone)
	class := r.class()
	r.change(t, class, func() { class.Provider = "other" })
	r.phase(t, m, v1alpha1.MachinePending)
	if n := r.cloud.of(create, m) + r.cloud.of(remove, gone) + r.cloud.of(create, gone); n != 0 {
		t.Errorf("the first provider was asked %d times", n)
	}
	if there, _ := other.has(); there != 1 {
		t.Errorf("the other cloud has %d instances", there)
	}
}

// Credentials and user data may be in either of a class's two secrets.
func TestUserDataInCredentialsSecret(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		reason string
		setUp  func(*rig, *v1alpha1.MachineClass)
	}{
		"only secret": {"a class need not have another", func(_ *rig, class *v1alpha1.MachineClass) {
			class.CredentialsSecretRef, class.SecretRef = class.SecretRef, nil
		}},
		"other lacks it": {"the keys of both are merged", func(r *rig, class *v1alpha1.MachineClass) {
			keys := r.secret()
			keys.Name, keys.Data = "keys", map[string][]byte{"key": []byte("x")}
			r.create(r.t, keys)
			class.CredentialsSecretRef = class.SecretRef
			class.SecretRef = &corev1.SecretReference{Name: "keys"}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRunningRig(t)
			class := r.class()
			r.change(t, class, func() { c.setUp(r, class) })
			m := r.machine("a")
			r.create(t, m)
			got := r.phase(t, m, v1alpha1.MachinePending)
			if got.Status.LastOperation.ErrorCode != "" {
				t.Errorf("last operation is %+v: %s", got.Status.LastOperation, c.reason)
			}
		})
	}
}
