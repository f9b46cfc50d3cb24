package machine_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/machine"
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
	r.cloud.answer(func(_ context.Context, task *replica.Task) *driverv1.Result {
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
				t.Errorf("an operation has begun: finalizers %v, %d creates", got.Finalizers, r.cloud.count(create))
			}
			c.mend(r)
			r.phase(t, m, v1alpha1.MachinePending)
			if n := r.cloud.count(status); n != 0 {
				t.Errorf("the driver was asked %d times for an operation that had not begun", n)
			}
		})
	}
}

func TestNoDriver(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.startManager(t)
	m := r.machine("a")
	r.create(t, m)
	r.event(t, m, "OperationWaiting", "no driver for provider virtual")
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

// A driver that panics at its cloud has not failed: the same create is tried again, with
// longer and longer pauses, and its machine says what is wrong.
func TestDriverThatPanics(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	requests := make(chan *driverv1.Envelope, 9)
	r.cloud.answer(func(_ context.Context, task *replica.Task) *driverv1.Result {
		if task.Operation != create {
			return nil
		}
		requests <- task.Request
		if task.Request.GetAttempt() > 2 || task.BeginMutation() != nil {
			return nil
		}
		panic("an unexpected error") //nolint:forbidigo // what is tested
	})
	r.startDriver(t)
	r.startManager(t)
	m := r.machine("a")
	r.create(t, m)
	r.until(t, "a description that says so", m, func(m *v1alpha1.Machine) bool {
		return strings.HasPrefix(m.Status.LastOperation.Description, "Waiting: driver panicked in create; the log of replica ")
	})
	r.event(t, m, "OperationWaiting", "The create waits: driver panicked in create")
	r.phase(t, m, v1alpha1.MachinePending)
	for n := range uint32(3) {
		req := bustest.Receive(t, "a request", requests)
		if req.GetOperationId() != string(r.get(t, m).UID)+".create.0" || req.GetAttempt() != n+1 || req.GetRecover() != (n > 0) {
			t.Errorf("request %d is attempt %d at %s, recover %t", n, req.GetAttempt(), req.GetOperationId(), req.GetRecover())
		}
	}
}

// A class that names a driver that does not run can be corrected, whichever manager leads then.
func TestCorrectedProvider(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason          string
		restart, before bool // the manager; and that before the class is corrected
	}{
		"at once":                    {"it knows that no driver was asked", false, false},
		"restarted, corrected":       {"so must the next one", true, true},
		"corrected while no one led": {"it is as good a correction", true, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRunningRig(t)
			class := r.class()
			r.change(t, class, func() { class.Provider = "virtaul" })
			m := r.machine("a")
			r.create(t, m)
			r.event(t, m, "OperationWaiting", "The create waits: no driver for provider virtaul")
			if got := r.get(t, m); len(got.Finalizers) != 0 || got.Annotations[v1alpha1.AnnotationKeyOperation] != "" {
				t.Errorf("an operation has begun: finalizers %v, annotations %v", got.Finalizers, got.Annotations)
			}
			if tc.restart {
				r.stop()
			}
			if tc.before {
				r.startManager(t)
			}
			r.change(t, class, func() { class.Provider = provider })
			if tc.restart && !tc.before {
				r.startManager(t)
			}
			r.phase(t, m, v1alpha1.MachinePending)
			if _, made := r.cloud.has(); made != 1 {
				t.Errorf("%s: %d instances were made", tc.reason, made)
			}
			if n := r.cloud.count(status); n != 0 {
				t.Errorf("the driver was asked %d times for an operation that had not begun", n)
			}
		})
	}
}

// A driver that is away for a while binds no machine either.
func TestDriverAway(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	stop := r.stoppableDriver(t)
	r.startManager(t)
	first := r.machine("first")
	r.create(t, first)
	r.phase(t, first, v1alpha1.MachinePending)
	stop()
	bustest.Eventually(t, "the manager has heard that the driver left", func() bool { return len(r.caller.Replicas()) == 0 })
	m := r.machine("a")
	r.create(t, m)
	r.event(t, m, "OperationWaiting", "no driver for provider virtual")
	if got := r.get(t, m); got.Annotations[v1alpha1.AnnotationKeyOperation] != "" {
		t.Errorf("an operation has begun: %v", got.Annotations)
	}
	r.startDriver(t)
	r.phase(t, m, v1alpha1.MachinePending)
}

// Another instance has the machine's name in the cloud until a person removes it.
func TestNameTaken(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	taken := &atomic.Bool{}
	taken.Store(true)
	r.cloud.answer(func(_ context.Context, task *replica.Task) *driverv1.Result {
		if task.Operation != create || !taken.Load() {
			return nil
		}

		return &driverv1.Result{Status: &driverv1.Status{
			Code: driverv1.Code_CODE_ALREADY_EXISTS, Message: "instance i-7 has this name",
		}}
	})
	m := r.machine("a")
	r.create(t, m)
	r.event(t, m, machine.EventNameTaken, "instance i-7 has this name")
	taken.Store(false)
	r.event(t, m, machine.EventNameFree, "gone")
	r.phase(t, m, v1alpha1.MachinePending)
}
