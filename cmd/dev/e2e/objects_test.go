package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// className is the name of a test's usual class and of its secret.
const className = "small"

// createClass makes the class and the secret of deploy/examples, for the env's
// cloud.
func (e *env) createClass() {
	e.Helper()
	e.must(e.kube.Create(e.ctx(), e.newSecret(className)))
	e.must(e.kube.Create(e.ctx(), e.newClass(className, nil)))
}

func (e *env) newSecret(name string) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: e.name},
		StringData: map[string]string{
			"userData": "#cloud-config\n# " + secretMark + "\nhostname: <<MACHINE_NAME>>\n",
			"apiToken": e.cloud.APIToken,
		},
	}
}

// newClass returns the class of deploy/examples under another name, for the
// env's cloud, with a secret of the class's name. Fields, where there are any,
// are added to the provider spec.
func (e *env) newClass(name string, fields map[string]any) *v1alpha1.MachineClass {
	e.Helper()
	objects, err := stack.LoadYAML("../../../deploy/examples/machineclass.yaml")
	e.must(err)
	class := &v1alpha1.MachineClass{}
	e.must(runtime.DefaultUnstructuredConverter.FromUnstructured(objects[0].Object, class))
	class.ObjectMeta = metav1.ObjectMeta{Name: name, Namespace: e.name}
	class.SecretRef = &corev1.SecretReference{Name: name, Namespace: e.name}
	var spec map[string]any
	e.must(json.Unmarshal(class.ProviderSpec.Raw, &spec))
	spec["endpoint"] = e.cloud.Endpoint
	maps.Copy(spec, fields)
	class.ProviderSpec.Raw, err = json.Marshal(spec)
	e.must(err)
	return class
}

// createMachines makes n machines of a class and returns their names, which are
// unique in the cluster because Nodes are not in a namespace.
func (e *env) createMachines(n int, class string) []string {
	e.Helper()
	var names []string
	for i := range n {
		name := fmt.Sprintf("%s-%s-%02d", e.name, class, i+1)
		e.createMachine(name, class)
		names = append(names, name)
	}
	return names
}

func (e *env) createMachine(name, class string) {
	e.Helper()
	e.must(e.kube.Create(e.ctx(), e.newMachine(name, class)))
}

func (e *env) newMachine(name, class string) *v1alpha1.Machine {
	return &v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: e.name},
		Spec:       v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: v1alpha1.KindMachineClass, Name: class}},
	}
}

func (e *env) machine(ctx context.Context, name string) (*v1alpha1.Machine, error) {
	m := &v1alpha1.Machine{}
	return m, e.kube.Get(ctx, client.ObjectKey{Namespace: e.name, Name: name}, m)
}

// machines returns all machines of the namespace by name.
func (e *env) machines(ctx context.Context) (map[string]*v1alpha1.Machine, error) {
	var list v1alpha1.MachineList
	if err := e.kube.List(ctx, &list, client.InNamespace(e.name)); err != nil {
		return nil, err
	}
	machines := map[string]*v1alpha1.Machine{}
	for i := range list.Items {
		machines[list.Items[i].Name] = &list.Items[i]
	}
	return machines, nil
}

// waitRunning waits until all of these machines are Running.
func (e *env) waitRunning(names ...string) {
	e.Helper()
	e.eventually("all machines are Running", func(ctx context.Context) error {
		for _, name := range names {
			if err := e.inPhase(ctx, name, v1alpha1.MachineRunning); err != nil {
				return err
			}
		}
		return nil
	})
}

func (e *env) inPhase(ctx context.Context, name string, phase v1alpha1.MachinePhase) error {
	m, err := e.machine(ctx, name)
	if err != nil {
		return err
	}
	if got := m.Status.CurrentStatus.Phase; got != phase {
		return fmt.Errorf("%s is %q, last operation: %s", name, got, m.Status.LastOperation.Description)
	}
	return nil
}

// deleteAll deletes these machines and waits until nothing is left of them:
// neither objects, nor Nodes, nor instances.
func (e *env) deleteAll(names ...string) {
	e.Helper()
	for _, name := range names {
		e.deleteMachine(name)
	}
	e.waitGone(names...)
}

// deleteMachine asks for a deletion.
func (e *env) deleteMachine(name string) {
	e.Helper()
	e.must(e.kube.Delete(e.ctx(), &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: e.name}}))
}

// waitGone waits until nothing is left of deleted machines.
func (e *env) waitGone(names ...string) {
	e.Helper()
	e.eventually("all machines, Nodes and instances are gone", func(ctx context.Context) error {
		for _, name := range names {
			m, err := e.machine(ctx, name)
			if client.IgnoreNotFound(err) != nil {
				return err
			}
			if err == nil {
				return fmt.Errorf("machine %s is there, last operation: %s", name, m.Status.LastOperation.Description)
			}
			if err := e.kube.Get(ctx, client.ObjectKey{Name: name}, &corev1.Node{}); client.IgnoreNotFound(err) != nil || err == nil {
				return errors.Join(fmt.Errorf("node %s is there", name), err)
			}
		}
		instances, err := e.cloud.Instances(ctx)
		for _, instance := range instances {
			for _, name := range names {
				if instance.Name == name {
					return fmt.Errorf("instance %s (%s) is there", instance.ID, name)
				}
			}
		}
		return err
	})
}

// waitEvent waits for an Event about a machine whose message contains a text,
// and returns it. No Event may hold a secret.
func (e *env) waitEvent(machine, eventType, text string) *corev1.Event {
	e.Helper()
	return e.waitEventOf(v1alpha1.KindMachine, machine, eventType, text)
}

// waitEventOf is waitEvent for an object of any kind.
func (e *env) waitEventOf(kind, name, eventType, text string) *corev1.Event {
	e.Helper()
	var found *corev1.Event
	e.eventually(fmt.Sprintf("a %s Event on %s %s says %q", eventType, kind, name, text), func(ctx context.Context) error {
		events, err := e.eventsOf(ctx, kind, name)
		if err != nil {
			return err
		}
		var seen []string
		for i := range events {
			if events[i].Type == eventType && strings.Contains(events[i].Message, text) {
				found = &events[i]
				return nil
			}
			seen = append(seen, fmt.Sprintf("%s %s: %s", events[i].Type, events[i].Reason, events[i].Message))
		}
		return fmt.Errorf("its events: %q", seen)
	})
	for what, secret := range e.secrets() {
		if strings.Contains(found.Message, secret) {
			e.Errorf("the Event %s on %s contains the %s", found.Reason, name, what)
		}
	}
	return found
}

func (e *env) events(ctx context.Context, machine string) ([]corev1.Event, error) {
	return e.eventsOf(ctx, v1alpha1.KindMachine, machine)
}

func (e *env) eventsOf(ctx context.Context, kind, name string) ([]corev1.Event, error) {
	var all corev1.EventList
	if err := e.kube.List(ctx, &all, client.InNamespace(e.name)); err != nil {
		return nil, err
	}
	var events []corev1.Event
	for _, event := range all.Items {
		if event.InvolvedObject.Kind == kind && event.InvolvedObject.Name == name {
			events = append(events, event)
		}
	}
	return events, nil
}

// wantInstances expects that the cloud has made exactly n instances in its life,
// each for another machine.
func (e *env) wantInstances(n int) {
	e.Helper()
	created, err := e.cloud.Created(e.ctx())
	e.must(err)
	machines := map[string]bool{}
	for _, entry := range created {
		machines[entry.MachineUID] = true
	}
	if len(created) != n || len(machines) != n {
		e.Errorf("the cloud made %d instances for %d machines, want one for each of %d", len(created), len(machines), n)
	}
}
