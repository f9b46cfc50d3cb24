package e2e

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestBridge has machines made and removed by two drivers of the gRPC protocol of 2018, one for
// each published form, through the bridge. One is killed while the cloud is at its create: the
// other one finds what it made.
func TestBridge(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	address := e.startBridge(manager.NATSURL)
	drivers := e.startOldClients(address, tap)
	e.must(e.kube.Create(e.ctx(), e.newSecret(className)))
	class := e.newClass(className, map[string]any{"tags": map[string]string{"cluster": e.name}})
	metav1.SetMetaDataAnnotation(&class.ObjectMeta, v1alpha1.AnnotationKeyOperationTimeout, "20s")
	e.must(e.kube.Create(e.ctx(), class))
	e.must(e.cloud.Hold(e.ctx(), "*"))
	names := e.createMachines(len(drivers), className) // each driver takes one at a time
	e.waitHeld(len(drivers), tap, drivers)
	e.waitCloudHolds(len(drivers))

	victim, survivor := drivers[0], drivers[1]
	killed := tap.Running(victim.Replica, create)
	e.must(victim.Kill())
	e.must(e.cloud.Hold(e.ctx()))
	e.waitRunning(names...)
	e.wantOneEach(names)
	e.wantMoved(tap, killed, survivor)
	for _, name := range names {
		e.wantJoined(name)
	}
	e.deleteAll(names...)
	e.wantOneEach(names)
}

// startBridge starts the bridge for the kind of class of the old clients.
func (e *env) startBridge(natsURL string) (address string) {
	e.Helper()
	port, err := stack.FreePort()
	e.must(err)
	address = stack.Loopback(port)
	_, err = e.site.Start("mcm-grpc-bridge", "mcm-grpc-bridge", "--nats-url", natsURL, "--clusters", e.name,
		"--grpc-listen", address, "--kind=VirtualMachineClass=virtual", "--drain-timeout=2s")
	e.must(err)
	e.eventually("the bridge takes drivers", func(ctx context.Context) error {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err == nil {
			err = conn.Close()
		}
		return err
	})
	return address
}

// startOldClients starts one client of each published form: they are the tests' own program of the
// bridge, in two roles.
func (e *env) startOldClients(address string, tap *stack.Tap) (drivers []*stack.Driver) {
	e.Helper()
	program := filepath.Join(e.TempDir(), "clients")
	build := exec.CommandContext(e.ctx(), "go", "test", "-c", "-o", program, "../../mcm-grpc-bridge")
	if out, err := build.CombinedOutput(); err != nil {
		e.Fatalf("%v: %v\n%s", build, err, out)
	}
	for _, form := range []string{"infra", "service"} {
		driver, err := e.site.StartDriver(e.ctx(), tap, stack.DriverOptions{
			Name: fmt.Sprintf("old-%s", form), Program: program,
			Env: []string{"BRIDGE_TEST_ROLE=" + form, "BRIDGE_TEST_ADDRESS=" + address, "BRIDGE_TEST_KIND=VirtualMachineClass"},
		})
		e.must(err)
		drivers = append(drivers, driver)
	}
	return drivers
}
