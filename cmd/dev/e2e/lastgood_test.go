package e2e

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestLastGoodClass spoils a class under its machines, then takes it away by
// force. They must all be deleted as if nothing had happened to it.
func TestLastGoodClass(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	e.startDrivers(2, manager.NATSURL, tap)
	e.createClass()
	machines := e.createMachines(2, className)
	e.waitRunning(machines...)

	class := e.newClass(className, nil)
	e.must(e.kube.Get(e.ctx(), client.ObjectKeyFromObject(class), class))
	class.ProviderSpec.Raw = []byte(`{"machineTyp": 7}`)
	e.must(e.kube.Update(e.ctx(), class))
	e.deleteAll(machines[0])
	e.waitEvent(machines[0], corev1.EventTypeWarning, "next try at once with MachineClass "+className+" as its driver last accepted it")

	// Deleting alone waits for the machines; taking the finalizers does not.
	noFinalizers := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
	for _, o := range []client.Object{e.newSecret(className), &v1alpha1.MachineClass{ObjectMeta: e.newClass(className, nil).ObjectMeta}} {
		e.must(e.kube.Delete(e.ctx(), o))
		e.must(e.kube.Patch(e.ctx(), o, noFinalizers))
	}
	e.deleteAll(machines[1])
	e.wantInstances(len(machines))
}
