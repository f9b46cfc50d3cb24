package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus/chaos"
	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// slowCreates makes the cloud take so long for an instance, which is there only
// at the end: until then no list shows it.
func (e *env) slowCreates(latency time.Duration) {
	e.Helper()
	knob, effect := cloudapi.Duration(latency), cloudapi.EffectEnd
	_, err := e.cloud.Admin.Patch(e.ctx(), cloudapi.KnobsPatch{CreateLatency: &knob, CreateEffect: &effect})
	e.must(err)
}

// waitCreating waits until one of the drivers lists running creates, and
// returns it and their ids.
func (e *env) waitCreating(tap *stack.Tap, drivers []*stack.Driver) (d *stack.Driver, ids []string) {
	e.Helper()
	e.eventually("a replica lists running creates", func(ctx context.Context) error {
		stats, err := e.cloud.Admin.Stats(ctx)
		if err != nil {
			return err
		}
		for _, d = range drivers {
			if ids = tap.Running(d.Replica, create); len(ids) > 0 && stats.ConcurrentCreates > 0 {
				return nil
			}
		}
		return fmt.Errorf("none does; the cloud has %d at work", stats.ConcurrentCreates)
	})
	return d, ids
}

// TestDeleteDuringCreate deletes a machine whose instance is being made. What the
// cloud makes of it must go as well.
func TestDeleteDuringCreate(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	drivers := e.startDrivers(1, manager.NATSURL, tap)
	e.createClass()
	e.slowCreates(2 * time.Second)
	names := e.createMachines(1, className)
	e.waitCreating(tap, drivers)
	e.deleteMachine(names[0])

	// Only when the cloud is done with the create can nothing come any more.
	e.eventually("the cloud has no create at work", func(ctx context.Context) error {
		stats, err := e.cloud.Admin.Stats(ctx)
		if err == nil && stats.ConcurrentCreates > 0 {
			err = fmt.Errorf("%d are", stats.ConcurrentCreates)
		}
		return err
	})
	e.waitGone(names...)
	stats, err := e.cloud.Admin.Stats(e.ctx())
	e.must(err)
	if stats.Created != 1 || stats.Deleted != stats.Created || stats.Live != 0 {
		t.Errorf("the cloud created %d, deleted %d, and %d live; want 1, 1, 0", stats.Created, stats.Deleted, stats.Live)
	}
}

// TestRollingRestart replaces a replica that may not wait for its creates to end.
func TestRollingRestart(t *testing.T) {
	t.Parallel()
	for _, identity := range identities {
		t.Run(identity, func(t *testing.T) {
			e := newEnv(t)
			// Where nothing identifies a create, the next waits for the lost one's deadline.
			manager, tap := e.startManager("", "--machine-operation-timeout=6s")
			args := []string{"--identity=" + identity, "--drain-timeout=1s"}
			drivers := e.startDrivers(2, manager.NATSURL, tap, args...)
			e.createClass()
			const machines = 6
			e.slowCreates(4 * time.Second)
			names := e.createMachines(machines, className)
			victim, cut := e.waitCreating(tap, drivers)
			e.must(victim.Stop())
			_, err := e.site.StartDriver(e.ctx(), tap, stack.DriverOptions{
				Name: "driver-virtual-new", NATSURL: manager.NATSURL, Clusters: []string{e.name}, Args: args,
			})
			e.must(err)
			e.waitRunning(names...)
			e.wantInstances(machines)
			e.wantNoDuplicates()
			// A new operation would come with another token.
			ended := e.waitSucceeded(tap, cut)
			for _, audit := range ended {
				if audit.GetReplica() == victim.Replica {
					t.Errorf("operation %s ended on the stopped replica: its drain timeout cut nothing off", audit.GetOperationId())
				}
			}
			e.deleteAll(names...)
			e.wantInstances(machines)
		})
	}
}

// TestManagerFailover kills the leading manager in the middle of creates.
func TestManagerFailover(t *testing.T) {
	e := newEnv(t)
	nats, err := e.site.StartNATS(e.ctx())
	e.must(err)
	election := []string{
		"--leader-elect=true", "--leader-elect-lease-duration=2s",
		"--leader-elect-renew-deadline=1500ms", "--leader-elect-retry-period=500ms",
	}
	leader, tap := e.startManager(nats.URL, election...)
	drivers := e.startDrivers(2, nats.URL, tap)
	e.createClass()
	witness := e.name + "-witness"
	e.createMachine(witness, className)
	e.waitRunning(witness) // so the first manager leads before there is another
	_, err = e.site.StartManager(e.ctx(), stack.ManagerOptions{
		Name: "mcm-2", Control: e.cluster.Kubeconfig, Namespace: e.name, Cluster: e.name, NATSURL: nats.URL,
		Args: append([]string{"-v=2"}, election...),
	})
	e.must(err)

	const machines = 10
	e.slowCreates(2 * time.Second)
	names := append(e.createMachines(machines, className), witness)
	e.waitCreating(tap, drivers)
	before := e.waitEpoch(tap, drivers, 1)
	e.must(leader.Kill())
	e.waitEpoch(tap, drivers, before+1)
	e.waitRunning(names...)
	e.wantInstances(len(names))
	e.wantNoDuplicates()
	e.deleteAll(names...)
	e.wantInstances(len(names))
}

// TestLostLead lets another process take the lead during an operation:
// the manager must not stay until that has ended.
func TestLostLead(t *testing.T) {
	e := newEnv(t)
	nats, err := e.site.StartNATS(e.ctx())
	e.must(err)
	manager, tap := e.startManager(nats.URL, "--leader-elect=true", "--leader-elect-lease-duration=2s",
		"--leader-elect-renew-deadline=1500ms", "--leader-elect-retry-period=500ms")
	drivers := e.startDrivers(1, nats.URL, tap)
	e.createClass()
	e.must(e.cloud.Hold(e.ctx(), "*"))
	name := e.createMachines(1, className)[0]
	e.waitHeld(1, tap, drivers)

	e.eventually("the lead is taken", func(ctx context.Context) error {
		var lease coordinationv1.Lease
		if err := e.kube.Get(ctx, client.ObjectKey{Namespace: e.name, Name: "machine-controller-manager"}, &lease); err != nil {
			return err
		}
		now := metav1.NowMicro()
		lease.Spec.HolderIdentity, lease.Spec.RenewTime = new("other"), &now
		return e.kube.Update(ctx, &lease)
	})
	select {
	case <-manager.Done():
	case <-time.After(time.Minute):
		e.Fatal("the manager that has lost the lead still waits for its operation")
	}
	e.must(manager.Restart(e.ctx()))
	e.must(e.cloud.Hold(e.ctx()))
	e.waitRunning(name)
	e.wantInstances(1)
}

// waitEpoch waits until all drivers have heard of at least this epoch, and returns
// the lowest of theirs.
func (e *env) waitEpoch(tap *stack.Tap, drivers []*stack.Driver, least uint64) (lowest uint64) {
	e.Helper()
	e.eventually("the drivers know the epoch", func(context.Context) error {
		sessions := tap.Sessions()
		lowest = sessions[drivers[0].Replica].GetEpoch()
		for _, d := range drivers {
			lowest = min(lowest, sessions[d.Replica].GetEpoch())
		}
		if lowest < least {
			return fmt.Errorf("one has heard of epoch %d only, want %d", lowest, least)
		}
		return nil
	})
	return lowest
}

// frozen is how long a replica stands still: longer than it takes mcm to give
// its operations to another one.
const frozen = 8 * time.Second

// TestFrozenReplica stops a replica in the middle of creates and lets it go on
// when others have done its work.
func TestFrozenReplica(t *testing.T) {
	t.Parallel()
	for _, identity := range identities {
		t.Run(identity, func(t *testing.T) {
			e := newEnv(t)
			// Where nothing identifies a create, the next waits for the lost one's deadline.
			manager, tap := e.startManager("", "--machine-operation-timeout=15s")
			drivers := e.startDrivers(2, manager.NATSURL, tap, "--identity="+identity)
			e.createClass()
			const machines = 6
			e.slowCreates(2 * time.Second)
			names := e.createMachines(machines, className)
			victim, _ := e.waitCreating(tap, drivers)
			e.freeze(tap, victim, func() { e.waitRunning(names...) })
			e.wantInstances(machines)
			e.wantNoDuplicates()
			e.deleteAll(names...)
			e.wantInstances(machines)
		})
	}
}

// freeze stops a replica, and resumes it long after it was considered dead and others have
// taken over. It returns once its earlier operations have ended.
func (e *env) freeze(tap *stack.Tap, victim *stack.Driver, meanwhile func()) {
	e.Helper()
	sequence := tap.Sessions()[victim.Replica].GetSequence()
	e.must(victim.Pause())
	thaw := time.NewTimer(frozen) // its length is what is tested
	meanwhile()
	select {
	case <-thaw.C:
	case <-e.ctx().Done():
		e.Fatal("the test was ended")
	}
	e.must(victim.Resume())
	e.eventually("the replica is back, and what it was at has ended", func(context.Context) error {
		s := tap.Sessions()[victim.Replica]
		// Two further ones: the first may have been on its way when it was stopped.
		if running := tap.Running(victim.Replica, create); s.GetSequence() < sequence+2 || len(running) > 0 {
			return fmt.Errorf("session %d, after %d; running: %q", s.GetSequence(), sequence, running)
		}
		return nil
	})
}

// TestFrozenReplica_BeforeItsCall stops a replica that has looked for an instance and
// not found it. The cloud's answer waits in its socket. When it wakes up, the machines
// have come and gone: with it not fenced, it would make instances for them, of drivers
// whose cloud takes no token. (Built with the tag unfenced, that is what it does.)
func TestFrozenReplica_BeforeItsCall(t *testing.T) {
	t.Parallel()
	for _, identity := range identities {
		t.Run(identity, func(t *testing.T) {
			e := newEnv(t)
			manager, tap := e.startManager("", "--machine-operation-timeout=15s")
			drivers := e.startDrivers(2, manager.NATSURL, tap, "--identity="+identity)
			link, err := chaos.OpenLink(e.ctx(), strings.TrimPrefix(e.cloud.Endpoint, "http://"))
			e.must(err)
			e.atEnd = append(e.atEnd, link.Close)
			e.must(e.kube.Create(e.ctx(), e.newSecret(className)))
			e.must(e.kube.Create(e.ctx(), e.newClass(className, map[string]any{"endpoint": "http://" + link.Address()})))
			link.Hold(chaos.ToClient)
			const machines = 6
			names := e.createMachines(machines, className)
			var victim *stack.Driver
			e.eventually("the cloud has been asked for all instances, and has not been heard", func(ctx context.Context) error {
				stats, err := e.cloud.Admin.Stats(ctx)
				if err != nil {
					return err
				}
				running := 0
				for _, d := range drivers {
					if ids := tap.Running(d.Replica, create); len(ids) > 0 {
						running, victim = running+len(ids), d
					}
				}
				if looks := stats.Requests[cloudapi.OpList]; running < machines || looks < machines {
					return fmt.Errorf("%d creates run, and the cloud was asked %d times", running, looks)
				}
				return nil
			})
			e.freeze(tap, victim, func() {
				link.Mend()
				e.waitRunning(names...)
				e.deleteAll(names...)
			})
			e.wantInstances(machines)
			e.wantNoDuplicates()
			e.waitGone(names...)
		})
	}
}

// wantNoDuplicates expects that no machine ever had two instances.
func (e *env) wantNoDuplicates() {
	e.Helper()
	stats, err := e.cloud.Admin.Stats(e.ctx())
	e.must(err)
	if stats.DuplicatesEver != 0 {
		e.Errorf("the cloud had %d duplicates", stats.DuplicatesEver)
	}
}

// waitSucceeded waits for audit messages that these operations succeeded.
func (e *env) waitSucceeded(tap *stack.Tap, ids []string) map[string]*driverv1.Audit {
	e.Helper()
	succeeded := map[string]*driverv1.Audit{}
	e.eventually("the operations succeeded under their first ids", func(context.Context) error {
		last := map[string]driverv1.Code{}
		for _, audit := range tap.Audits() {
			id, code := audit.GetOperationId(), audit.GetStatus().GetCode()
			last[id] = code
			if code == driverv1.Code_CODE_OK {
				succeeded[id] = audit
			}
		}
		for _, id := range ids {
			if succeeded[id] == nil {
				return fmt.Errorf("%s has not, its last code is %s", id, last[id])
			}
		}
		return nil
	})
	return succeeded
}
