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
	// reportAfter is how long an operation waits for its turn or a slot before its machine's
	// status says so. For thousands of machines two earlier writes each would be too much.
	reportAfter = time.Minute
	// reportEvery is the time after which the reason is updated.
	reportEvery = 10 * time.Minute
	// logEvery is the least time between two log lines about the same reason.
	logEvery = time.Minute
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

// ownerOf returns the name under which machines share turns: of their MachineDeployment or
// MachineSet, or else of their class.
func ownerOf(m *v1alpha1.Machine) string {
	owner := metav1.GetControllerOfNoCopy(m)
	if owner == nil {
		return m.Namespace + "/class/" + m.Spec.Class.Name
	}
	// The name of a deployment's set is that of the deployment and the template's hash.
	name := owner.Name
	if hash := m.Labels[v1alpha1.LabelKeyMachineTemplateHash]; hash != "" {
		name = strings.TrimSuffix(name, "-"+hash)
	}

	return m.Namespace + "/" + name
}

func nameOf(o metav1.Object) string { return o.GetNamespace() + "/" + o.GetName() }

// noRoom reports whether an operation reached no driver for a reason that all operations of
// its provider share.
func noRoom(err error) bool {
	e, ok := errors.AsType[*bus.Error](err)

	return ok && (e.NoRoom || e.Origin == bus.OriginBus && CodeOf(err) == Unavailable)
}

// noFreeSlot reports whether an operation came back because no replica has a free slot, and
// not because there is no replica.
func (d *Dispatcher) noFreeSlot(provider string, err error) bool {
	e, ok := errors.AsType[*bus.Error](err)
	if !ok || !e.NoRoom {
		return false
	}
	_, known := d.spare(provider)

	return known
}

// awaitTurn waits until an operation has its turn or is cancelled. It returns false if the
// operation has ended or the dispatcher ends.
func (d *Dispatcher) awaitTurn(e *entry, req *caller.Request) bool {
	select {
	case <-e.turn.granted:
		return true
	default:
	}
	defer d.metrics.queued(e.provider, e.kind)()
	d.waitLog.log(d.ctx, e.provider, d.queue.reason(e.turn))
	entered := time.Now()
	report := time.NewTimer(time.Until(e.reportAt))
	defer report.Stop()
	for {
		select {
		case <-e.turn.granted:
			d.metrics.turns.WithLabelValues(e.provider, string(e.kind)).Observe(time.Since(entered).Seconds())

			return true
		case <-e.quit:
			if req.Recover {
				d.queue.bypass(e.turn)

				return true
			}
			d.finish(e, &caller.Outcome{Waited: time.Since(e.started)},
				Errorf(Canceled, "cancelled while it waited: %s", d.queue.reason(e.turn)))

			return false
		case <-report.C:
			d.setWaiting(e, Errorf(Unavailable, "%s", d.queue.reason(e.turn)), req.Attempt)
			e.reportAt = time.Now().Add(reportEvery)
			report.Reset(reportEvery)
		case <-d.ctx.Done():
			return false
		}
	}
}

// requeue puts an operation back into the queue because its provider's drivers had no room.
// The first one starts to wait for room, for all of the provider.
func (d *Dispatcher) requeue(e *entry, err error) {
	if d.queue.putBack(e.turn, err.Error()) {
		d.running.Go(func() { d.awaitRoom(e.provider) })
	}
}

// awaitRoom updates the queue's knowledge of free slots at a provider's drivers, for as long
// as operations wait for them.
func (d *Dispatcher) awaitRoom(provider string) {
	check := time.NewTimer(retryWait)
	defer check.Stop()
	for {
		select {
		case <-d.caller.Room(provider):
		case <-check.C:
		case <-d.ctx.Done():
			return
		}
		n, known := d.spare(provider)
		if !d.queue.refill(provider, n, known) {
			return
		}
		check.Reset(retryWait)
	}
}

// spare returns the number of free slots at a provider's drivers; known is false if no replica
// is known. There may be a driver without sessions then.
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
