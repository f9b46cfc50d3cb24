package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/machinebus/machinebus/cmd/internal/stack"
)

const (
	// nodeProvider is what the example drivers in Node.js serve.
	nodeProvider = "nodejs"
	nodeDrivers  = "../../.out/nodejs"
)

// TestNodePlain has machines made and removed by the plain driver of
// deploy/examples, which shares no code with us.
func TestNodePlain(t *testing.T) {
	e := newEnv(t)
	manager, _ := e.startManager("")
	_, err := e.site.StartPlainNode(e.ctx(), stack.NodeOptions{
		Name: "driver-nodejs", Dir: filepath.Join(nodeDrivers, "driver-nodejs"), NATSURL: manager.NATSURL, Cluster: e.name,
		Env: []string{"CLOUD_TOKEN_FILE=" + filepath.Join(e.site.Dir(), "private", "virtual-cloud.token")},
	})
	e.must(err)
	e.createNodeClass(e.cloud.Endpoint)
	names := e.createMachines(2, className)
	e.waitRunning(names...)
	for _, name := range names {
		e.wantJoined(name)
	}
	e.wantInstances(len(names))
	e.deleteAll(names...)
	e.wantInstances(len(names))
}

// TestNodeKilled kills a replica of the full driver while the cloud is at its
// creates. The other one must find what was made.
func TestNodeKilled(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	drivers := e.startNodes(2, manager.NATSURL, tap)
	e.createNodeClass(e.cloud.Endpoint)
	e.must(e.cloud.Hold(e.ctx(), "*"))
	const machines = 4
	names := e.createMachines(machines, className)
	e.waitHeld(machines, tap, drivers)
	e.waitCloudHolds(machines)
	victim, survivor := drivers[0], drivers[1]
	ids := tap.Running(victim.Replica, create)
	if len(ids) == 0 {
		victim, survivor = survivor, victim
		ids = tap.Running(victim.Replica, create)
	}
	e.must(victim.Kill())
	e.must(e.cloud.Hold(e.ctx()))
	e.waitRunning(names...)
	e.wantMoved(tap, ids, survivor)
	e.wantInstances(machines)
	e.wantNoDuplicates()
	e.deleteAll(names...)
	e.wantInstances(machines)
}

// TestNodeFenced stops a replica of the full driver right before it would call
// the cloud, and lets it go on when another one has done its work: it must not
// call then.
func TestNodeFenced(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	drivers := e.startNodes(2, manager.NATSURL, tap)
	g := e.openGate(e.cloud.Endpoint, nil)
	e.createNodeClass(g.url)
	look := g.arm(stopAt{method: http.MethodGet, path: "/v1/instances", answered: true})
	name := e.createMachines(1, className)[0]
	e.await(look, "is there", look.reached)
	e.waitHeld(1, tap, drivers)
	victim := drivers[0]
	if len(tap.Running(victim.Replica, create)) == 0 {
		victim = drivers[1]
	}
	session := tap.Sessions()[victim.Replica].GetSessionId()
	e.must(victim.Pause())
	close(look.letGo) // it will read that there is no instance, when it can
	e.waitRunning(name)
	e.must(victim.Resume())
	e.eventually("the replica is back under a new session", func(context.Context) error {
		if s := tap.Sessions()[victim.Replica]; s.GetSessionId() == session || !s.GetLeased() {
			return fmt.Errorf("session %s, leased: %t", s.GetSessionId(), s.GetLeased())
		}
		return nil
	})
	e.eventually("its fence has refused the call", func(context.Context) error {
		output, err := os.ReadFile(victim.Output)
		if err == nil && !strings.Contains(string(output), "\nfenced ") {
			err = errors.New("it does not say so")
		}
		return err
	})
	stats, err := e.cloud.Admin.Stats(e.ctx())
	e.must(err)
	if calls := stats.Requests["create"]; calls != 1 {
		t.Errorf("the cloud was asked %d times for an instance, want once", calls)
	}
	e.wantInstances(1)
	e.deleteAll(name)
}

// startNodes starts n replicas of the full driver.
func (e *env) startNodes(n int, natsURL string, tap *stack.Tap) []*stack.Driver {
	e.Helper()
	var drivers []*stack.Driver
	for i := range n {
		driver, err := e.site.StartNode(e.ctx(), tap, stack.NodeOptions{
			Name: fmt.Sprintf("driver-nodejs-full-%d", i+1), Dir: filepath.Join(nodeDrivers, "driver-nodejs-full"),
			NATSURL: natsURL, Cluster: e.name,
		})
		e.must(err)
		drivers = append(drivers, driver)
	}
	return drivers
}

// createNodeClass makes the class and secret of deploy/examples for the drivers
// in Node.js.
func (e *env) createNodeClass(endpoint string) {
	e.Helper()
	e.must(e.kube.Create(e.ctx(), e.newSecret(className)))
	class := e.newClass(className, map[string]any{"endpoint": endpoint})
	class.Provider = nodeProvider
	e.must(e.kube.Create(e.ctx(), class))
}

// waitCloudHolds waits until the cloud has made n instances and tells nobody.
func (e *env) waitCloudHolds(n int) {
	e.Helper()
	e.eventually("the cloud holds all creates", func(ctx context.Context) error {
		stats, err := e.cloud.Admin.Stats(ctx)
		if err == nil && stats.Held != n {
			err = fmt.Errorf("it holds %d, want %d", stats.Held, n)
		}
		return err
	})
}
