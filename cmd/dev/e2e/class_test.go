package e2e

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestClassChanges edits and deletes a class, and its secret, under live machines.
func TestClassChanges(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	e.startDrivers(2, manager.NATSURL, tap)
	e.createClass()
	old := e.createMachines(2, className)
	e.waitRunning(old...)

	e.editClass(className, map[string]any{"machineType": "large"})
	edited := e.name + "-edited"
	e.createMachine(edited, className)
	e.waitRunning(edited)
	if got := e.waitInstance(edited).MachineType; got != "large" {
		t.Errorf("a machine made after the edit is of type %q, want large", got)
	}
	e.deleteAll(old[0]) // its instance is of the class as it was

	key := client.ObjectKey{Namespace: e.name, Name: className}
	class, secret := &v1alpha1.MachineClass{}, &corev1.Secret{}
	for _, object := range []client.Object{class, secret} {
		e.must(e.kube.Get(e.ctx(), key, object))
		e.must(e.kube.Delete(e.ctx(), object))
	}
	e.waitBlocked(v1alpha1.KindMachineClass, className)
	e.waitBlocked("Secret", className)
	late := e.name + "-late"
	e.createMachine(late, className) // as with the machine controller manager, the class is there
	e.waitRunning(late)
	e.deleteAll(old[1], edited)
	for _, object := range []client.Object{class, secret} {
		e.must(e.kube.Get(e.ctx(), key, object)) // one machine still needs it
	}
	e.deleteAll(late)
	for _, object := range []client.Object{class, secret} {
		e.eventually("unused objects are gone", func(ctx context.Context) error {
			err := e.kube.Get(ctx, key, object)
			if apierrors.IsNotFound(err) {
				return nil
			}
			return errors.Join(fmt.Errorf("%T %s is there", object, className), err)
		})
	}
	e.wantInstances(4)
}

// TestSecretRotation takes the cloud's token away and gives a new one. Nothing is
// restarted.
func TestSecretRotation(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	e.startDrivers(2, manager.NATSURL, tap)
	e.createClass()
	names := e.createMachines(4, className)
	e.waitRunning(names...)

	rotated := rand.Text()
	e.secret["rotated API token"] = rotated
	e.must(e.cloud.Admin.SetTokens(e.ctx(), rotated))
	refused := e.name + "-refused"
	e.createMachine(refused, className)
	e.waitEvent(refused, corev1.EventTypeWarning, "Unauthenticated")

	secret := &corev1.Secret{}
	e.must(e.kube.Get(e.ctx(), client.ObjectKey{Namespace: e.name, Name: className}, secret))
	secret.Data["apiToken"] = []byte(rotated)
	e.must(e.kube.Update(e.ctx(), secret))
	e.cloud.APIToken = rotated
	next := e.name + "-next"
	e.createMachine(next, className)
	e.waitRunning(next, refused) // the one without waiting for its next try
	e.deleteAll(append(names, next, refused)...)
	for _, audit := range tap.Audits() {
		machines := []string{next, refused}
		if slices.Contains(append(machines, names...), audit.GetName()) && audit.GetAttempts() > 1 {
			t.Errorf("operation %s took %d attempts", audit.GetOperationId(), audit.GetAttempts())
		}
	}
}

// editClass changes fields of a class's provider spec.
func (e *env) editClass(name string, fields map[string]any) {
	e.Helper()
	class := &v1alpha1.MachineClass{}
	e.must(e.kube.Get(e.ctx(), client.ObjectKey{Namespace: e.name, Name: name}, class))
	before := client.MergeFrom(class.DeepCopy())
	var spec map[string]any
	e.must(json.Unmarshal(class.ProviderSpec.Raw, &spec))
	maps.Copy(spec, fields)
	var err error
	class.ProviderSpec.Raw, err = json.Marshal(spec)
	e.must(err)
	e.must(e.kube.Patch(e.ctx(), class, before))
}

// waitBlocked waits until an Event says why a deleted object stays.
func (e *env) waitBlocked(kind, name string) {
	e.Helper()
	e.eventually(fmt.Sprintf("an Event says what keeps %s %s", kind, name), func(ctx context.Context) error {
		events, err := e.eventsOf(ctx, kind, name)
		for i := range events {
			if events[i].Reason == "DeletionBlocked" {
				return nil
			}
		}
		return errors.Join(errors.New("there is none"), err)
	})
}
