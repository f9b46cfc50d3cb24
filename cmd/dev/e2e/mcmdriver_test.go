package e2e

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// mcmDrivers is the module of drivers that were written for the machine controller manager.
const mcmDrivers = "../../../driversdk/mcmdriver"

// TestMCMDriver has twenty machines made by two replicas of a driver that knows the machine
// controller manager's interface only. One replica is killed while the cloud is at its
// creates, and each machine gets one instance.
func TestMCMDriver(t *testing.T) {
	e := newEnv(t)
	program := e.buildMCMDriver()
	manager, tap := e.startManager("")
	var drivers []*stack.Driver
	for i := range 2 {
		driver, err := e.site.StartDriver(e.ctx(), tap, stack.DriverOptions{
			Name: fmt.Sprintf("sample-%d", i+1), Program: program, NATSURL: manager.NATSURL, Clusters: []string{e.name},
		})
		e.must(err)
		drivers = append(drivers, driver)
	}
	e.createSampleClass()
	e.must(e.cloud.Hold(e.ctx(), "*"))
	const machines = 20
	names := e.createMachines(machines, className)
	e.waitHeld(machines, tap, drivers)
	e.waitCloudHolds(machines)

	victim, survivor := drivers[0], drivers[1]
	if len(tap.Running(victim.Replica, create)) == 0 {
		victim, survivor = survivor, victim
	}
	e.must(victim.Kill())
	killed := tap.Running(victim.Replica, create)
	if len(killed) == 0 {
		t.Fatalf("the last session of replica %s lists no running create", victim.Replica)
	}
	e.must(e.cloud.Hold(e.ctx()))
	e.waitRunning(names...)

	e.wantOneEach(names)
	e.wantMoved(tap, killed, survivor)
	e.wantTagged(names)
	for _, name := range names {
		e.wantJoined(name)
	}
	e.deleteAll(names...)
	e.wantOneEach(names) // none was made again meanwhile
}

// wantOneEach wants the cloud to have made one instance for each name: this driver's carry no
// tag by which the cloud counts them.
func (e *env) wantOneEach(names []string) {
	e.Helper()
	entries, err := e.cloud.Created(e.ctx())
	e.must(err)
	made := map[string]int{}
	for _, entry := range entries {
		made[entry.Name]++
	}
	want := map[string]int{}
	for _, name := range names {
		want[name] = 1
	}
	if diff := cmp.Diff(want, made); diff != "" {
		e.Errorf("instances made, by name (-want +got):\n%s", diff)
	}
}

// buildMCMDriver builds the sample of its module, which has Kubernetes libraries of its own.
func (e *env) buildMCMDriver() (program string) {
	e.Helper()
	program = filepath.Join(e.TempDir(), "sample")
	build := exec.CommandContext(e.ctx(), "go", "build", "-C", mcmDrivers, "-o", program, "./sample")
	if out, err := build.CombinedOutput(); err != nil {
		e.Fatalf("%v: %v\n%s", build, err, out)
	}
	return program
}

// createSampleClass makes a class as the machine controller manager's users write them. A lost
// create of such a driver is tried again after its deadline only, which is short here.
func (e *env) createSampleClass() {
	e.Helper()
	e.must(e.kube.Create(e.ctx(), e.newSecret(className)))
	class := e.newClass(className, map[string]any{"tags": map[string]string{"kubernetes.io/cluster/" + e.name: "1"}})
	class.Provider = "Sample"
	metav1.SetMetaDataAnnotation(&class.ObjectMeta, v1alpha1.AnnotationKeyOperationTimeout, "20s")
	e.must(e.kube.Create(e.ctx(), class))
}

// wantTagged wants each machine's uid in the tags of its instance.
func (e *env) wantTagged(names []string) {
	e.Helper()
	instances, err := e.cloud.Instances(e.ctx())
	e.must(err)
	uids := map[string]string{}
	for _, i := range instances {
		uids[i.Name] = i.Tags["machinebus-machine-uid"]
	}
	machines, err := e.machines(e.ctx())
	e.must(err)
	for _, name := range names {
		if uids[name] != string(machines[name].UID) {
			e.Errorf("machine %s has uid %s, the tags of instances say %v", name, machines[name].UID, uids)
		}
	}
}
