package dispatch

import (
	"errors"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

const (
	// tellAfter: a machine whose operation waits for its turn or for a slot says so in
	// its status when that takes longer. A thousand machines wait for the same, and each
	// would cost two writes to the API server.
	tellAfter = time.Minute
	// tellEvery is the time after which the reason is looked at again.
	tellEvery = 10 * time.Minute
	// noteEvery is the least time between two log lines about the same cause.
	noteEvery = time.Minute
)

func newTurn(op *Operation) *turn {
	t := &turn{provider: op.Provider, owner: ownerOf(op.Machine), kind: op.Kind}
	switch {
	case op.Class.Credentials != nil:
		t.secret = nameOf(op.Class.Credentials)
	case op.Class.Secret != nil:
		t.secret = nameOf(op.Class.Secret)
	}

	return t
}

// ownerOf says with whom a machine shares its turns: the machines of its
// MachineDeployment or MachineSet, or else those of its class without any.
func ownerOf(m *v1alpha1.Machine) string {
	owner := metav1.GetControllerOfNoCopy(m)
	if owner == nil {
		return m.Namespace + "/class/" + m.Spec.Class.Name
	}
	// Sets of one deployment, as in a rollout, are named by it and by the template.
	name := owner.Name
	if hash := m.Labels[v1alpha1.LabelKeyMachineTemplateHash]; hash != "" {
		name = strings.TrimSuffix(name, "-"+hash)
	}

	return m.Namespace + "/" + name
}

func nameOf(o metav1.Object) string { return o.GetNamespace() + "/" + o.GetName() }

// noRoom tells that an operation reached no driver, for a reason that it has in
// common with all others of its provider.
func noRoom(err error) bool {
	e, ok := errors.AsType[*bus.Error](err)

	return ok && (e.NoRoom || e.Origin == bus.OriginBus && CodeOf(err) == Unavailable)
}

// full tells that an operation came back because no replica has a slot for it, and not
// because there is none.
func (d *Dispatcher) full(provider string, err error) bool {
	e, ok := errors.AsType[*bus.Error](err)
	if !ok || !e.NoRoom {
		return false
	}
	_, known := d.spare(provider)

	return known
}

// awaitTurn waits until an operation may be sent. One that is given up before goes on
// at once, to end as it may. False means that it has ended, or that the dispatcher
// ends.
func (d *Dispatcher) awaitTurn(e *entry, req *caller.Request) bool {
	select {
	case <-e.turn.granted:
		return true
	default:
	}
	defer d.metrics.queued(e.provider, e.kind)()
	d.causes.note(d.ctx, e.provider, d.queue.why(e.turn))
	entered := time.Now()
	tell := time.NewTimer(time.Until(e.tellAt))
	defer tell.Stop()
	for {
		select {
		case <-e.turn.granted:
			d.metrics.turns.WithLabelValues(e.provider, string(e.kind)).Observe(time.Since(entered).Seconds())

			return true
		case <-e.quit:
			if req.Recover {
				d.queue.skip(e.turn)

				return true
			}
			d.finish(e, &caller.Outcome{Waited: time.Since(e.started)},
				Errorf(Canceled, "given up while waiting: %s", d.queue.why(e.turn)))

			return false
		case <-tell.C:
			d.waiting(e, Errorf(Unavailable, "%s", d.queue.why(e.turn)), req.Attempt)
			e.tellAt = time.Now().Add(tellEvery)
			tell.Reset(tellEvery)
		case <-d.ctx.Done():
			return false
		}
	}
}

// giveBack puts an operation back into the queue that its provider's drivers had
// no room for. The first one sees to it that somebody waits for room, for all.
func (d *Dispatcher) giveBack(e *entry, err error) {
	if d.queue.refuse(e.turn, err.Error()) {
		d.running.Go(func() { d.awaitRoom(e.provider) })
	}
}

// awaitRoom tells the queue what room a provider's drivers have, for as long as
// something waits for it.
func (d *Dispatcher) awaitRoom(provider string) {
	again := time.NewTimer(retryWait)
	defer again.Stop()
	for {
		select {
		case <-d.caller.Room(provider):
		case <-again.C:
		case <-d.ctx.Done():
			return
		}
		n, known := d.spare(provider)
		if !d.queue.refill(provider, n, known) {
			return
		}
		again.Reset(retryWait)
	}
}

// spare is how many more operations the drivers of a provider have room for, by
// their slots; known is false when none is known: there may yet be one that does not
// say.
func (d *Dispatcher) spare(provider string) (n spare, known bool) {
	for _, r := range d.caller.Replicas() {
		s := r.Session
		if s.GetProvider() != provider {
			continue
		}
		known = true
		for _, kind := range []Kind{Create, Delete} {
			n[slotsOf(kind)] += max(0, caller.SlotsFree(s, kind.wire()))
		}
	}

	return n, known
}
