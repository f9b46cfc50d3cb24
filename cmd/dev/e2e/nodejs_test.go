package e2e

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/cmd/dev/stack"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// nodeProvider is what the example drivers in Node.js serve.
	nodeProvider = "nodejs"
	nodeDrivers  = "../../../.out/nodejs"
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
	sequence := tap.Sessions()[victim.Replica].GetSequence()
	e.must(victim.Pause())
	close(look.letGo) // it will read that there is no instance, when it can
	e.waitRunning(name)
	e.must(victim.Resume())
	e.eventually("the replica is back", func(context.Context) error {
		if s := tap.Sessions()[victim.Replica]; s.GetSequence() < sequence+2 {
			return fmt.Errorf("session %d, after %d", s.GetSequence(), sequence)
		}
		return nil
	})
	e.eventually("its fence has refused the call", func(ctx context.Context) error {
		stats, err := e.cloud.Admin.Stats(ctx)
		e.must(err)
		if calls := stats.Requests["create"]; calls != 1 {
			e.Fatalf("the cloud was asked %d times for an instance, want once", calls)
		}
		output, err := os.ReadFile(victim.Output)
		if err == nil && !strings.Contains(string(output), "\nfenced ") {
			err = errors.New("it does not say so")
		}
		return err
	})
	e.wantInstances(1)
	e.deleteAll(name)
}

// TestNodeOutcome takes away the manager while the full driver makes an instance,
// and then the driver: what came of it must be read from where it was stored.
func TestNodeOutcome(t *testing.T) {
	e := newEnv(t)
	nats, err := e.site.StartNATS(e.ctx())
	e.must(err)
	manager, tap := e.startManager(nats.URL)
	drivers := e.startNodes(1, nats.URL, tap)
	e.createNodeClass(e.cloud.Endpoint)
	e.must(e.cloud.Hold(e.ctx(), "*"))
	name := e.createMachines(1, className)[0]
	e.waitHeld(1, tap, drivers)
	e.waitCloudHolds(1)
	ids := tap.Running(drivers[0].Replica, create)
	claims := e.claims(nats.URL)
	e.must(manager.Kill())
	e.must(e.cloud.Hold(e.ctx()))
	e.eventually("the outcome is stored", func(context.Context) error {
		if state := claims.state(ids[0]); state != driverv1.Claim_STATE_SETTLED {
			return fmt.Errorf("the claim of %s is %s", ids[0], state)
		}
		return nil
	})
	e.must(drivers[0].Kill())
	e.must(manager.Restart(e.ctx()))
	ended := e.waitEnded(tap, ids)[ids[0]]
	if ended.GetStatus().GetCode() != driverv1.Code_CODE_OK || ended.GetAttempts() != 1 || ended.GetReplica() != drivers[0].Replica {
		t.Errorf("create: %s at replica %s, attempt %d; want OK at %s, attempt 1",
			ended.GetStatus(), ended.GetReplica(), ended.GetAttempts(), drivers[0].Replica)
	}
	_, err = e.site.StartNode(e.ctx(), tap, e.nodeOptions("driver-nodejs-full-next", nats.URL))
	e.must(err)
	e.waitRunning(name)
	e.wantInstances(1)
	e.deleteAll(name)
}

// TestNodeGolden has the packages of the full driver read and write the bytes
// that ours do.
func TestNodeGolden(t *testing.T) {
	t.Parallel()
	const testdata = "../../../bus/testdata"
	files, err := filepath.Glob(filepath.Join(testdata, "wire", "*.json"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden frames: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	output, err := exec.CommandContext(ctx, "node", filepath.Join(nodeDrivers, "driver-nodejs-full", "golden.mjs"), testdata).CombinedOutput()
	if want := fmt.Sprintf("%d frames and a seal\n", len(files)); err != nil || string(output) != want {
		t.Errorf("node: %v, said %q, want %q", err, output, want)
	}
}

// A claimTap listens to the claims of an env's control plane.
type claimTap struct {
	mu     sync.Mutex
	states map[string]driverv1.Claim_State // by operation id
}

// claims starts to listen for what is claimed.
func (e *env) claims(natsURL string) *claimTap {
	e.Helper()
	c := &claimTap{states: map[string]driverv1.Claim_State{}}
	conn, err := bus.Connect(e.ctx(), bus.Config{URLs: []string{natsURL}, FailFast: true, Logger: slog.New(slog.DiscardHandler)})
	e.must(err)
	e.Cleanup(conn.Close)
	stop, err := bus.Watch(conn, "mcm.v1."+e.name+"."+string(bus.TreeClaim)+".>", func(_, _ string, _ map[string][]string, payload []byte) {
		env, err := bus.Decode(payload, "")
		if err != nil {
			return // then what is waited for does not come
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.states[env.GetClaim().GetOperationId()] = env.GetClaim().GetState()
	})
	e.must(err)
	e.Cleanup(stop)
	return c
}

func (c *claimTap) state(operationID string) driverv1.Claim_State {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.states[operationID]
}

// startNodes starts n replicas of the full driver.
func (e *env) startNodes(n int, natsURL string, tap *stack.Tap) []*stack.Driver {
	e.Helper()
	var drivers []*stack.Driver
	for i := range n {
		driver, err := e.site.StartNode(e.ctx(), tap, e.nodeOptions(fmt.Sprintf("driver-nodejs-full-%d", i+1), natsURL))
		e.must(err)
		drivers = append(drivers, driver)
	}
	return drivers
}

func (e *env) nodeOptions(name, natsURL string) stack.NodeOptions {
	return stack.NodeOptions{Name: name, Dir: filepath.Join(nodeDrivers, "driver-nodejs-full"), NATSURL: natsURL, Cluster: e.name}
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

// waitCloudHolds waits until the cloud has created n instances and holds back the answers.
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
