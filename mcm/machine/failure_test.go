package machine_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	create     = driverv1.Operation_OPERATION_CREATE
	initialize = driverv1.Operation_OPERATION_INITIALIZE
	remove     = driverv1.Operation_OPERATION_DELETE
)

// failure is a driver's answer with a code.
func failure(code driverv1.Code) *driverv1.Result {
	return &driverv1.Result{Status: &driverv1.Status{Code: code, Message: "no luck"}}
}

// codes are all codes a driver can fail with, by a name that suits a machine.
func codes() map[string]driverv1.Code {
	all := map[string]driverv1.Code{}
	for number := range driverv1.Code_name {
		if number != 0 {
			all[strings.ToLower(bus.CodeName(driverv1.Code(number)))] = driverv1.Code(number)
		}
	}

	return all
}

// failing makes machines whose first operation of a kind fails with the code
// they are named after.
func (r *rig) failing(t *testing.T, op driverv1.Operation) map[string]*v1alpha1.Machine {
	t.Helper()
	r.cloud.failOnce(op, func(m *driverv1.Machine) *driverv1.Result {
		return failure(codes()[strings.TrimPrefix(m.GetName(), r.namespace+"-")])
	})
	machines := map[string]*v1alpha1.Machine{}
	for name := range codes() {
		m := r.machine(name)
		machines[name] = m
		r.create(t, m)
	}

	return machines
}

func TestCreateErrors(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.settings.Retry.Short, r.settings.Retry.Medium, r.settings.Retry.ResourceExhausted = time.Hour, 2*time.Hour, 3*time.Hour
	r.startDriver(t)
	r.startManager(t)
	periods := map[driverv1.Code]time.Duration{
		driverv1.Code_CODE_RESOURCE_EXHAUSTED: r.settings.Retry.ResourceExhausted,
		driverv1.Code_CODE_CANCELED:           r.settings.Retry.Short,
		driverv1.Code_CODE_UNKNOWN:            r.settings.Retry.Short,
		driverv1.Code_CODE_DEADLINE_EXCEEDED:  r.settings.Retry.Short,
		driverv1.Code_CODE_ABORTED:            r.settings.Retry.Short,
		driverv1.Code_CODE_UNAVAILABLE:        r.settings.Retry.Short,
	}
	machines := r.failing(t, create)
	for name, m := range machines {
		got := r.until(t, "a failure", m, func(m *v1alpha1.Machine) bool { return m.Status.LastOperation.ErrorCode != "" })
		code := codes()[name]
		last := got.Status.LastOperation
		want := fmt.Sprintf("Cloud provider message - machine codes error: code = [%s] message = [no luck]", bus.CodeName(code))
		if last.ErrorCode != bus.CodeName(code) || last.Description != want || last.Type != "Create" || last.State != "Failed" {
			t.Errorf("last operation is %+v", last)
		}
		if phase := got.Status.CurrentStatus.Phase; phase != v1alpha1.MachineCrashLoopBackOff {
			t.Errorf("phase is %q", phase)
		}
		period, ok := periods[code]
		if !ok {
			period = r.settings.Retry.Medium
		}
		r.event(t, m, "FailedCreate", fmt.Sprintf("failed with %s (driver replica", bus.CodeName(code)))
		r.event(t, m, "FailedCreate", fmt.Sprintf("next try in %s: no luck", period))
	}
	class := r.class()
	r.change(t, class, func() { class.ProviderSpec.Raw = []byte(`{"size":"m"}`) }) // no need to wait any more
	for _, m := range machines {
		r.phase(t, m, v1alpha1.MachinePending)
	}
	if n := r.cloud.count(create); n != 2*len(codes()) {
		t.Errorf("%d creates for %d machines that failed once", n, len(codes()))
	}
}

func TestRetryAfter(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	r.cloud.failOnce(create, func(*driverv1.Machine) *driverv1.Result {
		err := &bus.Error{Code: driverv1.Code_CODE_INVALID_ARGUMENT, RetryAfter: 10 * time.Millisecond}

		return &driverv1.Result{Status: bus.StatusOf(err)}
	})
	m := r.machine("a")
	r.create(t, m)
	r.event(t, m, "FailedCreate", "next try in 10ms")
	r.phase(t, m, v1alpha1.MachinePending)
}

// change patches an object as it is stored.
func (r *rig) change(t *testing.T, o client.Object, f func()) {
	t.Helper()
	if err := r.Get(t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
		t.Fatal(err)
	}
	before, ok := o.DeepCopyObject().(client.Object)
	if !ok {
		t.Fatalf("%T is no object", o)
	}
	f()
	if err := r.Patch(t.Context(), o, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
}

func TestFailedForGood(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	failing := make(chan struct{})
	r.cloud.answer(func(_ context.Context, task *bus.Task) *driverv1.Result {
		select {
		case <-failing:
			return nil
		default:
			return failure(driverv1.Code_CODE_INTERNAL)
		}
	})
	m := r.machine("a")
	m.Annotations = map[string]string{v1alpha1.AnnotationKeyEffectiveCreationTimeout: "1ms"}
	r.create(t, m)
	got := r.phase(t, m, v1alpha1.MachineFailed)
	if last := got.Status.LastOperation; last.ErrorCode != "Internal" || last.State != "Failed" {
		t.Errorf("last operation is %+v", last)
	}
	// Without a set that replaces it, it is tried further.
	close(failing)
	r.until(t, "an instance", m, func(m *v1alpha1.Machine) bool { return m.Spec.ProviderID != "" })
	r.event(t, m, "FailedToJoin", "failed to join the cluster")
	r.join(t, m)
	r.phase(t, m, v1alpha1.MachineRunning)
}

func TestInitializeErrors(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	for name, m := range r.failing(t, initialize) {
		code := bus.CodeName(codes()[name])
		if code != "Unimplemented" { // which says that there is nothing to do
			r.event(t, m, "FailedInitialize", "failed with "+code)
		}
		got := r.phase(t, m, v1alpha1.MachinePending)
		if got.Spec.ProviderID == "" {
			t.Error("machine has lost its instance")
		}
	}
	if _, made := r.cloud.has(); made != len(codes()) {
		t.Errorf("%d instances made for %d machines", made, len(codes()))
	}
	if n := r.cloud.count(initialize); n != 2*len(codes())-1 {
		t.Errorf("%d initializations for %d machines, of which one needed no second", n, len(codes()))
	}
}

func TestInitializeErrorText(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.settings.Retry.Short = time.Hour
	r.startDriver(t)
	r.startManager(t)
	r.cloud.failOnce(initialize, func(*driverv1.Machine) *driverv1.Result { return failure(driverv1.Code_CODE_NOT_FOUND) })
	m := r.machine("a")
	r.create(t, m)
	got := r.phase(t, m, v1alpha1.MachineCrashLoopBackOff)
	want := "Provider error: machine codes error: code = [NotFound] message = [no luck]. Initialize VM Instance"
	if last := got.Status.LastOperation; last.Description != want || last.ErrorCode != "NotFound" {
		t.Errorf("last operation is %+v", last)
	}
	r.delete(t, m)
	r.gone(t, m)
}

func TestDeleteErrors(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	machines := r.failing(t, remove)
	for _, m := range machines {
		r.phase(t, m, v1alpha1.MachinePending)
	}
	for _, m := range machines {
		r.delete(t, m)
	}
	for name, m := range machines {
		code := codes()[name]
		period := r.settings.Retry.Long
		switch code {
		case driverv1.Code_CODE_CANCELED, driverv1.Code_CODE_UNKNOWN, driverv1.Code_CODE_DEADLINE_EXCEEDED,
			driverv1.Code_CODE_ABORTED, driverv1.Code_CODE_UNAVAILABLE:
			period = r.settings.Retry.Short
		case driverv1.Code_CODE_NOT_FOUND:
			r.gone(t, m) // which is what was wanted

			continue
		}
		r.event(t, m, "FailedDelete", "failed with "+bus.CodeName(code))
		r.event(t, m, "FailedDelete", fmt.Sprintf("next try in %s: no luck", period))
		r.gone(t, m)
	}
	if n := r.cloud.count(remove); n != 2*len(codes())-1 {
		t.Errorf("%d deletes for %d machines, of which one needed no second", n, len(codes()))
	}
}

// What is wrong with the objects is said, costs no cloud call, and is retried as
// soon as it is mended.
func TestInvalid(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		reason, text, code string
		spoil              func(*rig, *v1alpha1.Machine)
		mend               func(*rig)
	}{
		"missing class": {
			"it may be applied after its machines", "MachineClass %[1]s/small does not exist", "NotFound",
			func(r *rig, _ *v1alpha1.Machine) { r.delete(r.t, r.class()) },
			func(r *rig) { r.create(r.t, r.class()) },
		},
		"missing secret": {
			"so may its secret", "Secret %[1]s/boot does not exist", "NotFound",
			func(r *rig, _ *v1alpha1.Machine) { r.delete(r.t, r.secret()) },
			func(r *rig) { r.create(r.t, r.secret()) },
		},
		"missing credentials": {
			"they have a secret of their own", "credentialsSecretRef: Secret %[1]s/keys does not exist", "NotFound",
			func(r *rig, _ *v1alpha1.Machine) {
				class := r.class()
				r.change(r.t, class, func() { class.CredentialsSecretRef = &corev1.SecretReference{Name: "keys"} })
			},
			func(r *rig) {
				secret := r.secret()
				secret.Name = "keys"
				r.create(r.t, secret)
			},
		},
		"secret elsewhere": {
			"who writes classes here may not read Secrets there", "secretRef: Secret elsewhere/boot is in another namespace: put it into %[1]s",
			"InvalidArgument",
			func(r *rig, _ *v1alpha1.Machine) {
				class := r.class()
				r.change(r.t, class, func() { class.SecretRef.Namespace = "elsewhere" })
			},
			func(r *rig) {
				class := r.class()
				r.change(r.t, class, func() { class.SecretRef.Namespace = r.namespace })
			},
		},
		"no user data": {
			"instances could not join", "userdata field not found", "InvalidArgument",
			func(r *rig, _ *v1alpha1.Machine) {
				secret := r.secret()
				r.change(r.t, secret, func() { secret.Data = nil })
			},
			func(r *rig) {
				secret := r.secret()
				r.change(r.t, secret, func() { secret.Data = r.secret().Data })
			},
		},
		"no provider": {
			"and no default", "names no provider", "InvalidArgument",
			func(r *rig, _ *v1alpha1.Machine) {
				class := r.class()
				r.change(r.t, class, func() { class.Provider = "" })
			},
			func(r *rig) {
				class := r.class()
				r.change(r.t, class, func() { class.Provider = "Virtual" })
			},
		},
		"impossible provider": {
			"it would be two tokens of a subject", "my.cloud", "InvalidArgument",
			func(r *rig, _ *v1alpha1.Machine) {
				class := r.class()
				r.change(r.t, class, func() { class.Provider = "my.cloud" })
			},
			func(r *rig) {
				class := r.class()
				r.change(r.t, class, func() { class.Provider = provider })
			},
		},
		"node template": {
			"the autoscaler could not scale up from zero", "nodeTemplate lacks capacity.gpu, capacity.memory, zone: set it", "InvalidArgument",
			func(r *rig, _ *v1alpha1.Machine) {
				class := r.class()
				r.change(r.t, class, func() {
					class.NodeTemplate = &v1alpha1.NodeTemplate{
						Capacity:     corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("2")},
						InstanceType: "s", Region: "r",
					}
				})
			},
			func(r *rig) {
				class := r.class()
				r.change(r.t, class, func() { class.NodeTemplate = nil })
			},
		},
		"other kind": {
			"old classes had a kind for each provider", `kind is "AWSMachineClass"`, "InvalidArgument",
			func(_ *rig, m *v1alpha1.Machine) { m.Spec.Class.Kind = "AWSMachineClass" },
			func(r *rig) {
				m := r.machine("a")
				r.change(r.t, m, func() { m.Spec.Class.Kind = "MachineClass" })
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.settings.Retry.Long = time.Hour
			m := r.machine("a")
			c.spoil(r, m)
			r.startDriver(t)
			r.startManager(t)
			r.create(t, m)
			got := r.phase(t, m, v1alpha1.MachineCrashLoopBackOff)
			text := c.text
			if strings.Contains(text, "%") {
				text = fmt.Sprintf(text, r.namespace)
			}
			if last := got.Status.LastOperation; last.ErrorCode != c.code || !strings.Contains(last.Description, text) {
				t.Errorf("last operation is %+v, want code %s and %q: %s", last, c.code, text, c.reason)
			}
			r.event(t, m, "InvalidMachine", text)
			if len(got.Finalizers) != 0 || r.cloud.count(create) != 0 {
				t.Errorf("something was begun: finalizers %v, %d creates", got.Finalizers, r.cloud.count(create))
			}
			c.mend(r)
			r.phase(t, m, v1alpha1.MachinePending)
		})
	}
}

func TestNoDriver(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.startManager(t)
	m := r.machine("a")
	r.create(t, m)
	r.event(t, m, "WaitingForDriver", "no driver for provider virtual")
	r.until(t, "a description that says so", m, func(m *v1alpha1.Machine) bool {
		return strings.HasPrefix(m.Status.LastOperation.Description, "Waiting: no driver for provider virtual")
	})
	open := make(chan struct{})
	r.cloud.hold(open)
	r.startDriver(t)
	r.until(t, "a description without it", m, func(m *v1alpha1.Machine) bool {
		return m.Status.LastOperation.Description == "Creating machine on cloud provider"
	})
	close(open)
	r.phase(t, m, v1alpha1.MachinePending)
}

// A class that names a driver nobody runs can be corrected.
func TestCorrectedProvider(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	class := r.class()
	r.change(t, class, func() { class.Provider = "virtaul" })
	m := r.machine("a")
	r.create(t, m)
	r.event(t, m, "WaitingForDriver", "no driver for provider virtaul")
	r.change(t, class, func() { class.Provider = provider })
	r.phase(t, m, v1alpha1.MachinePending)
	if _, made := r.cloud.has(); made != 1 {
		t.Errorf("%d instances were made", made)
	}
}
