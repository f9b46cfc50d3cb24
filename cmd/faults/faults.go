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

	"github.com/machinebus/machinebus/cmd/internal/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// errMissed says that there was nothing for a fault to hit; it does not count.
var errMissed = errors.New("there was nothing to hit")

// A fault is one way to break things. It returns when what it broke is whole again.
type fault struct {
	name string
	// targets are what it can hit; none means that it is not for this world.
	targets func(*world) []*target
	do      func(context.Context, *world, *target, event) error
}

// listLag is how long the cloud's lists may lag behind, which drivers know.
const listLag = time.Second

// faults are all there are. Names are part of the command line.
var faults = []fault{
	{"kill-driver", drivers, func(_ context.Context, _ *world, t *target, e event) error { return t.unit.kill(e.length / 2) }},
	{"freeze-driver", drivers, freeze},
	{"freeze-create", lookers, freezeCreate},
	{"freeze-mcm", managers, freeze},
	{"freeze-nats", natsServers, freeze},
	{"lose-nats", natsServers, loseServer},
	{"fail-over", managers, failOver},
	{"restart-api", func(w *world) []*target { return []*target{w.api} }, restartAPI},
	{"cut-driver-nats", between("driver-nats"), cut},
	{"cut-mcm-nats", between("mcm-nats"), cut},
	{"cut-nats-nats", between("nats-nats"), cut},
	{"cut-mcm-api", between("mcm-api"), cut},
	{"cut-driver-cloud", between("driver-cloud"), cut},
	{"one-way", between("driver-nats", "mcm-nats", "nats-nats", "mcm-api", "driver-cloud"), oneWay},
	{"delay", between("driver-nats", "mcm-nats", "nats-nats", "mcm-api", "driver-cloud"), delay},
	{"cloud-errors", theCloud, cloudErrors},
	{"cloud-latency", theCloud, cloudLatency},
	{"cloud-rate", theCloud, cloudRate},
	{"cloud-lists", theCloud, cloudLists},
}

func kindNames() []string {
	var names []string
	for _, f := range faults {
		names = append(names, f.name)
	}
	return names
}

func drivers(w *world) []*target { return w.driverSet }

// lookers are the drivers that look for an instance and then make it: for others the
// cloud tells a repeated create apart, or nobody can.
func lookers(w *world) []*target {
	return slices.DeleteFunc(slices.Clone(w.driverSet), func(t *target) bool { return identityOf(w, t) != uniqueName })
}

func managers(w *world) []*target    { return w.managerSet }
func natsServers(w *world) []*target { return w.serverSet }
func theCloud(w *world) []*target    { return []*target{w.knobs} }

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

// freezeCreate freezes a replica that has accepted a create and not yet asked the
// cloud for anything: the answer to its first look is held up until it is frozen.
// When it wakes up others have done its work, and the machine has come and gone.
func freezeCreate(ctx context.Context, w *world, t *target, e event) error {
	link := w.cloudLinks[identityOf(w, t)]
	link.one.Lock()
	defer link.one.Unlock()
	defer link.link.Mend()
	link.link.Hold(stack.ToClient)
	// A rollout makes sure that there is something to create.
	err := w.setPool(ctx, identityOf(w, t), func(d *v1alpha1.MachineDeployment) {
		d.Spec.Replicas = mostReplicas
		d.Spec.Template.Labels[revisionLabel] = fmt.Sprintf("frozen-%d", e.way)
	})
	if err != nil {
		return errMissed // the API server is away
	}
	const patience = 8 * time.Second
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var ids []string
	err = stack.Poll(within, t.name+" creates", func(context.Context) error {
		if ids = w.tap.Running(t.unit.replica(), driverv1.Operation_OPERATION_CREATE); len(ids) == 0 {
			return errMissed
		}
		return nil
	})
	if err != nil {
		return errors.Join(errMissed, err)
	}
	p := t.unit.current()
	if err := p.Pause(); err != nil {
		return err
	}
	link.link.Mend()
	err = w.comeAndGo(ctx, ids[0])
	return errors.Join(p.Resume(), err)
}

// comeAndGo waits until the instance of a create is there, which a replica that lives
// has made, and has its machine deleted, until the instance is gone. Other faults may
// be in the way of that for too long; then it is left.
func (w *world) comeAndGo(ctx context.Context, createID string) error {
	uid, _, _ := strings.Cut(createID, ".")
	const patience = 20 * time.Second
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	deleted := false
	_ = stack.Poll(within, "machine "+uid+" comes and goes", func(ctx context.Context) error {
		s, err := w.look(ctx)
		if err != nil {
			return err
		}
		made := len(s.instances[types.UID(uid)]) > 0
		if m := s.machines[types.UID(uid)]; m != nil && made && !deleted {
			deleted = client.IgnoreNotFound(w.kube.Delete(ctx, m, client.Preconditions{UID: &m.UID})) == nil
		}
		if made || !deleted {
			return errMissed // so far
		}
		return nil
	})
	return ctx.Err()
}

// identityOf returns what tells the creates of a driver apart.
func identityOf(w *world, t *target) string {
	for i, d := range w.driverSet {
		if d == t {
			return identities[i/replicas]
		}
	}
	return ""
}

func loseServer(ctx context.Context, _ *world, t *target, e event) error {
	if err := t.unit.kill(e.length); err != nil {
		return err
	}
	return wait(ctx, e.length)
}

// failOver kills the manager that leads, whichever it is.
func failOver(ctx context.Context, w *world, _ *target, e event) error {
	for i, m := range w.managers {
		lead := w.kind == busEmbedded
		if !lead {
			var err error
			if lead, err = leads(ctx, m); err != nil {
				continue // it is down, or starts
			}
		}
		if lead {
			return w.managerSet[i].unit.kill(e.length)
		}
	}
	return errMissed
}

func restartAPI(ctx context.Context, w *world, _ *target, e event) error {
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
	defer t.each((*stack.Link).Mend)
	t.each((*stack.Link).Cut)
	return wait(ctx, e.length)
}

func oneWay(ctx context.Context, _ *world, t *target, e event) error {
	defer t.each((*stack.Link).Mend)
	d := stack.ToClient
	if !t.lossless && e.way%2 == 0 {
		d = stack.ToServer
	}
	t.hold(d)
	return wait(ctx, e.length)
}

func delay(ctx context.Context, _ *world, t *target, e event) error {
	defer t.each((*stack.Link).Mend)
	const most = 1500
	t.each(func(l *stack.Link) { l.Delay(time.Duration(e.way%most) * time.Millisecond) })
	return wait(ctx, e.length)
}

// turn sets knobs of the cloud for a while.
func turn(ctx context.Context, w *world, e event, there, back cloudapi.KnobsPatch) error {
	if _, err := w.cloud.Admin.Patch(ctx, there); err != nil {
		return err
	}
	err := wait(ctx, e.length)
	_, undone := w.cloud.Admin.Patch(context.WithoutCancel(ctx), back)
	return errors.Join(err, undone)
}

func cloudErrors(ctx context.Context, w *world, _ *target, e event) error {
	const sometimes = 0.4
	rules := []cloudapi.Fault{{Operation: "*", Probability: sometimes, After: e.way&1 == 0, Drop: e.way&2 == 0}}
	return turn(ctx, w, e, cloudapi.KnobsPatch{Faults: &rules}, cloudapi.KnobsPatch{Faults: &[]cloudapi.Fault{}})
}

func cloudLatency(ctx context.Context, w *world, _ *target, e event) error {
	slow, usual, usualDelete := cloudapi.Duration(3*time.Second), cloudapi.Duration(createLatency), cloudapi.Duration(deleteLatency)
	effect, end := cloudapi.EffectStart, cloudapi.EffectEnd
	if e.way%2 == 0 {
		effect = end
	}
	return turn(ctx, w, e, cloudapi.KnobsPatch{CreateLatency: &slow, DeleteLatency: &slow, CreateEffect: &effect},
		cloudapi.KnobsPatch{CreateLatency: &usual, DeleteLatency: &usualDelete, CreateEffect: &end})
}

func cloudRate(ctx context.Context, w *world, _ *target, e event) error {
	few, unlimited := 4.0, 0.0
	return turn(ctx, w, e, cloudapi.KnobsPatch{RequestsPerSecond: &few}, cloudapi.KnobsPatch{RequestsPerSecond: &unlimited})
}

// cloudLists has lists show new instances late. An instance keeps the lag that it
// began with, so nothing is hidden longer than drivers were told.
func cloudLists(ctx context.Context, w *world, _ *target, e event) error {
	lag, none := cloudapi.Duration(listLag), cloudapi.Duration(0)
	return turn(ctx, w, e, cloudapi.KnobsPatch{ListLag: &lag}, cloudapi.KnobsPatch{ListLag: &none})
}

// lanes is how many faults are at work at once.
const lanes = 3

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
		t := all[e.pick%len(all)]
		t.one.Lock()
		sayf("%s at %s for %s", e.kind, t.name, e.length.Round(time.Millisecond))
		err := f.do(ctx, w, t, e)
		t.one.Unlock()
		switch {
		case ctx.Err() != nil: // it is over, whatever that did to the fault
		case errors.Is(err, errMissed):
		case err != nil:
			return fmt.Errorf("fault %s at %s: %w", e.kind, t.name, err)
		default:
			w.tally.count(e.kind)
		}
	}
}
