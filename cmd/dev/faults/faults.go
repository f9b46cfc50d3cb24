package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus/chaos"
	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// errMissed means that a fault had no effect; it does not count.
var errMissed = errors.New("the fault had no effect")

// A fault is a kind of fault. do returns when it is undone.
type fault struct {
	name string
	// targets returns what it can hit; none means that it cannot happen in this world.
	targets func(*world) []*target
	do      func(context.Context, *world, *target, event) error
}

// alone are the faults that are made while no other is active. freeze-create needs a
// create, and then a machine that comes and goes within seconds, which others mostly
// prevent. A backup is restored while everything that uses it is down.
var alone = []string{"freeze-create", "etcd-restore"}

// listLag is how long the cloud's lists may lag, which is the drivers' settle time.
const listLag = time.Second

// faults lists all kinds. Names are part of the command line.
var faults = []fault{
	{"kill-driver", drivers, func(_ context.Context, _ *world, t *target, e event) error { return t.unit.kill(e.length / 2) }},
	{"freeze-driver", drivers, freeze},
	{"freeze-create", lookers, freezeCreate},
	{"hung-call", deafDrivers, hangCall},
	{"freeze-mcm", managers, freeze},
	{"freeze-nats", natsServers, freeze},
	{"lose-nats", natsServers, loseServer},
	{"disk-full", disks, diskFull},
	{"name-reuse", namesOf, reuseName},
	{"roll-back-store", stores, rollBackStore},
	{"fail-over", theLead, failOver},
	{"epoch-back", theLead, epochBack},
	{"stray-manager", strays, strayManager},
	{"namesake", namesakes, meetNamesake},
	{"etcd-restore", func(w *world) []*target { return []*target{w.api} }, restoreEtcd},
	{"restart-api", func(w *world) []*target { return []*target{w.api} }, restartAPI},
	{"cut-driver-nats", between("driver-nats"), cut},
	{"cut-mcm-nats", between("mcm-nats"), cut},
	{"cut-nats-nats", between("nats-nats"), cut},
	{"cut-mcm-api", between("mcm-api"), cut},
	{"cut-driver-cloud", between("driver-cloud"), cut},
	{"one-way", between("driver-nats", "mcm-nats", "nats-nats", "mcm-api", "driver-cloud"), oneWay},
	{"delay", between("driver-nats", "mcm-nats", "nats-nats", "mcm-api", "driver-cloud"), delay},
	{"cloud-errors", knob("errors"), cloudErrors},
	{"cloud-latency", knob("latency"), cloudLatency},
	{"cloud-rate", knob("rate"), cloudRate},
	{"cloud-lists", knob("errors"), cloudLists},
}

func kindNames() []string {
	var names []string
	for _, f := range faults {
		names = append(names, f.name)
	}
	return names
}

func drivers(w *world) []*target { return w.driverSet }

// lookers returns the drivers that list instances and then create one. For others the
// cloud recognizes a repeated create, or nothing does.
func lookers(w *world) []*target {
	return slices.DeleteFunc(slices.Clone(w.driverSet), func(t *target) bool { return t.identity != uniqueName })
}

func managers(w *world) []*target    { return w.managerSet }
func natsServers(w *world) []*target { return w.serverSet }
func theLead(w *world) []*target     { return []*target{w.lead} }

// knob returns the target for a knob of the cloud, so that several knobs can be changed
// at once.
func knob(name string) func(*world) []*target {
	return func(w *world) []*target { return []*target{w.knobs[name]} }
}

func between(what ...string) func(*world) []*target {
	return func(w *world) []*target {
		var all []*target
		for _, each := range what {
			all = append(all, w.links[each]...)
		}
		return all
	}
}

func freeze(ctx context.Context, _ *world, t *target, e event) error {
	return t.unit.freeze(ctx, e.length)
}

// freezeCreate freezes a replica that has accepted a create but not sent one to the cloud:
// the answer to its first list is held back until it is frozen. When it resumes, another
// replica has done its work, and the machine has come and gone.
func freezeCreate(ctx context.Context, w *world, t *target, e event) error {
	link := w.cloudLinks[t.identity]
	link.busy.Lock()
	defer link.busy.Unlock()
	defer link.link.Mend()
	link.link.Hold(chaos.ToClient)
	if err := w.rollout(ctx, t.identity, e, mostReplicas); err != nil {
		return err
	}
	const patience = 15 * time.Second
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var ids []string
	err := stack.Poll(within, t.name+" creates", func(context.Context) error {
		if ids = w.tap.Running(t.unit.replica(), driverv1.Operation_OPERATION_CREATE); len(ids) == 0 {
			return errMissed
		}
		return nil
	})
	if err != nil {
		return errors.Join(errMissed, err)
	}
	return t.unit.frozen(func() error {
		link.link.Mend()
		return w.comeAndGo(ctx, ids[0])
	})
}

// rollout changes a pool so that machines are created. It returns [errMissed] if the API
// server does not answer soon.
func (w *world) rollout(ctx context.Context, identity string, e event, least int32) error {
	const patience = 10 * time.Second
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := stack.Poll(within, "the pool can be changed", func(ctx context.Context) error {
		return w.setPool(ctx, identity, func(d *v1alpha1.MachineDeployment) {
			d.Spec.Replicas = max(d.Spec.Replicas, least)
			d.Spec.Template.Labels[revisionLabel] = fmt.Sprintf("%s-%d", e.kind, e.way)
		})
	})
	if err != nil {
		return errors.Join(errMissed, err)
	}
	return nil
}

// soon calls do until it succeeds. It returns [errMissed] if that takes too long, mostly
// because the API server is down.
func (w *world) soon(ctx context.Context, what string, do func(context.Context) error) error {
	const patience = 10 * time.Second
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := stack.Poll(within, what, do); err != nil {
		return errors.Join(errMissed, err)
	}
	return nil
}

// comeAndGo waits until the machine of a frozen replica's create is gone. It deletes the
// machine once another replica has created the instance. If that takes too long because
// of other faults, it returns [errMissed].
func (w *world) comeAndGo(ctx context.Context, createID string) error {
	uid, _, _ := strings.Cut(createID, ".")
	const patience = operationTimeout - 4*time.Second // later the replica would give up by itself when it resumes
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := stack.Poll(within, "machine "+uid+" comes and goes", func(ctx context.Context) error {
		s, err := w.look(ctx)
		if err != nil {
			return err
		}
		m, made := s.machines[types.UID(uid)], len(s.instances[types.UID(uid)]) > 0
		if m == nil && !made {
			return nil
		}
		if m != nil && made && m.DeletionTimestamp == nil {
			err = client.IgnoreNotFound(w.kube.Delete(ctx, m, client.Preconditions{UID: &m.UID}))
		}
		return errors.Join(errMissed, err) // so far
	})
	if err != nil {
		return errors.Join(errMissed, err)
	}
	return nil
}

func loseServer(ctx context.Context, _ *world, t *target, e event) error {
	if err := t.unit.kill(e.length); err != nil {
		return err
	}
	return wait(ctx, e.length)
}

// failOver kills the leader.
func failOver(ctx context.Context, w *world, _ *target, e event) error {
	return w.hitLeader(ctx, func(u *unit) error { return u.kill(e.length) })
}

// hitLeader calls do with the leader. It waits if there is none, or if another fault hits
// it.
func (w *world) hitLeader(ctx context.Context, do func(*unit) error) error {
	const patience = 10 * time.Second
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var done error
	err := stack.Poll(within, "an mcm leads", func(ctx context.Context) error {
		if done = w.tryLeader(ctx, do); errors.Is(done, errMissed) {
			return done
		}
		return nil
	})
	return errors.Join(done, err)
}

func (w *world) tryLeader(ctx context.Context, do func(*unit) error) error {
	for i, m := range w.managers {
		t := w.managerSet[i]
		if !t.busy.TryLock() {
			continue
		}
		err := errMissed
		if w.inCharge(ctx, m) {
			err = do(t.unit)
		}
		t.busy.Unlock()
		if !errors.Is(err, errMissed) {
			return err
		}
	}
	return errMissed
}

// inCharge reports whether a manager runs and leads.
func (w *world) inCharge(ctx context.Context, m *stack.Manager) bool {
	if w.kind == busEmbedded {
		return m.Ready(ctx) == nil
	}
	lead, err := leads(ctx, m)
	return err == nil && lead // an error means that it is down or starting
}

func restartAPI(ctx context.Context, w *world, _ *target, e event) error {
	if err := w.cluster.Failure(); err != nil {
		return err
	}
	if err := w.cluster.Kill(); err != nil {
		return err
	}
	const most = 5 * time.Second
	if err := wait(ctx, min(e.length, most)); err != nil {
		return errors.Join(err, w.cluster.Restart(context.WithoutCancel(ctx)))
	}
	return w.cluster.Restart(ctx)
}

func cut(ctx context.Context, _ *world, t *target, e event) error {
	return t.broken(ctx, e, (*chaos.Link).Cut)
}

func oneWay(ctx context.Context, _ *world, t *target, e event) error {
	d := chaos.ToClient
	if !t.noLateArrivals && e.way%2 == 0 {
		d = chaos.ToServer
	}
	defer t.each((*chaos.Link).Mend)
	t.hold(d)
	return errors.Join(wait(ctx, e.length), t.hits())
}

// mostDelay is the longest delay of a link.
const mostDelay = 1500 * time.Millisecond

func delay(ctx context.Context, _ *world, t *target, e event) error {
	const least = 50 * time.Millisecond
	late := least + time.Duration(e.way)*time.Millisecond%(mostDelay-least)
	return t.broken(ctx, e, func(l *chaos.Link) { l.Delay(late) })
}

// broken calls how for the target's links, and mends them after a while.
func (t *target) broken(ctx context.Context, e event, how func(*chaos.Link)) error {
	defer t.each((*chaos.Link).Mend)
	t.each(how)
	return errors.Join(wait(ctx, e.length), t.hits())
}

// lanes is how many faults are active at once.
const lanes = 3

// enter waits until a fault may be made: beside others, or alone. It is called before a
// target is locked, so that faults which hold one can end.
func (w *world) enter(f fault) (leave func()) {
	if slices.Contains(alone, f.name) {
		w.atWork.Lock()
		return w.atWork.Unlock
	}
	w.atWork.RLock()
	return w.atWork.RUnlock
}

// inject makes one fault of the plan after the other until ctx ends.
func (w *world) inject(ctx context.Context, plan *plan, sayf func(string, ...any)) error {
	byName := map[string]fault{}
	for _, f := range faults {
		byName[f.name] = f
	}
	for {
		e := plan.next()
		pause := time.NewTimer(e.gap)
		select {
		case <-ctx.Done():
			pause.Stop()

			return nil
		case <-pause.C:
		}
		f := byName[e.kind]
		all := f.targets(w)
		t := aim(all, e.pick)
		leave := w.enter(f)
		t.busy.Lock()
		sayf("%s at %s for %s", e.kind, t.name, e.length.Round(time.Millisecond))
		err := f.do(ctx, w, t, e)
		t.busy.Unlock()
		leave()
		switch missed := errors.Is(err, errMissed); {
		case ctx.Err() != nil: // the run is over, and may have interrupted the fault
		case err != nil && !missed:
			return fmt.Errorf("fault %s at %s: %w", e.kind, t.name, err)
		default:
			w.tally.count(e.kind, !missed)
			sayf("%s at %s is over: %v", e.kind, t.name, err)
		}
	}
}
