package dispatch

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// An unserved is a provider without a known driver, with the machines that wait for one.
// Dispatcher.mu guards it.
type unserved struct {
	provider string
	reason   string // empty at first
	waiting  map[types.UID]waitingMachine
}

// A waitingMachine is a machine whose operation has not begun.
type waitingMachine struct {
	op    Operation
	since time.Time
	leave func() // takes it out of the metrics
}

func (a *waitingMachine) name() types.NamespacedName {
	return types.NamespacedName{Namespace: a.op.Machine.Namespace, Name: a.op.Machine.Name}
}

// Serves reports whether a driver serves op's provider. Before that no operation may begin:
// it would bind its machine to a provider that may be a typing mistake. The reason says in
// one line what the machine waits for; it is empty at first. If no driver serves the
// provider, the Dispatcher notifies when that or the reason changes. Serves never blocks.
//
// A driver with sessions serves the provider while a replica is live. A driver without
// sessions is asked for the status of op's machine until it answers, and then counts as
// serving until this process ends.
func (d *Dispatcher) Serves(op Operation) (reason string, served bool) {
	uid := op.Machine.UID
	served = d.hasReplica(op.Provider)
	d.mu.Lock()
	defer d.mu.Unlock()
	if served || d.answered[op.Provider] {
		d.withdrawLocked(uid, "")

		return "", true
	}
	d.withdrawLocked(uid, op.Provider) // it may have waited for another provider
	v, ok := d.unserved[op.Provider]
	if !ok {
		v = &unserved{provider: op.Provider, waiting: map[types.UID]waitingMachine{}}
		d.unserved[op.Provider] = v
		d.running.Go(func() { d.awaitDriver(v) })
	}
	if _, ok := v.waiting[uid]; !ok {
		// Only what the probe needs, so that it is small.
		op.Machine = &v1alpha1.Machine{
			ObjectMeta: metav1.ObjectMeta{Namespace: op.Machine.Namespace, Name: op.Machine.Name, UID: uid},
			Spec:       v1alpha1.MachineSpec{Class: op.Machine.Spec.Class},
		}
		v.waiting[uid] = waitingMachine{op: op, since: time.Now(), leave: d.metrics.queued(op.Provider, op.Kind)}
	}

	return v.reason, false
}

// Withdraw says that a machine no longer waits for a driver.
func (d *Dispatcher) Withdraw(uid types.UID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.withdrawLocked(uid, "")
}

// withdrawLocked removes a machine from all unserved providers but one. The caller holds d.mu.
func (d *Dispatcher) withdrawLocked(uid types.UID, but string) {
	for provider, v := range d.unserved {
		if a, ok := v.waiting[uid]; ok && provider != but {
			a.leave()
			delete(v.waiting, uid)
		}
	}
}

// hasReplica reports whether a live replica of a provider is known.
func (d *Dispatcher) hasReplica(provider string) bool {
	_, known := d.spare(provider)

	return known
}

// awaitDriver looks for a driver of a provider for as long as machines wait for one, and
// notifies them. Before the first probe it gives replicas the time to show their sessions.
func (d *Dispatcher) awaitDriver(v *unserved) {
	probeDue := time.NewTimer(retryWait)
	defer probeDue.Stop()
	for {
		room := d.caller.Room(v.provider)
		if d.hasReplica(v.provider) {
			d.setServed(v, false)

			return
		}
		select {
		case <-room:
			continue
		case <-probeDue.C:
			probeDue.Reset(retryWait)
		case <-d.ctx.Done():
			return
		}
		op, ok := d.anyWaiting(v)
		if !ok {
			return
		}
		out, err := d.probe(op, room)
		switch {
		case d.ctx.Err() != nil:
			return
		case errors.Is(err, context.Canceled):
			continue // a replica has come
		case out.Result != nil:
			d.setServed(v, true)

			return
		case bus.NothingRan(err) && CodeOf(err) == InvalidArgument:
			d.setServed(v, false) // the probe cannot be sent: the create will return why

			return
		default:
			d.setReason(v, err.Error())
		}
	}
}

// anyWaiting returns an operation that waits for a driver. If there is none, it drops v and
// returns false.
func (d *Dispatcher) anyWaiting(v *unserved) (Operation, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, a := range v.waiting {
		return a.op, true
	}
	delete(d.unserved, v.provider)

	return Operation{}, false
}

// probe asks for a machine's status, to see whether a driver answers. Silence does not count:
// the only subscriber may be a person who debugs. It is cancelled when a replica has come.
func (d *Dispatcher) probe(op Operation, room <-chan struct{}) (*caller.Outcome, error) {
	ctx, end := context.WithCancel(d.ctx)
	defer end()
	go func() {
		select {
		case <-room:
			end()
		case <-ctx.Done():
		}
	}()
	op.Kind = Status

	return d.caller.Call(ctx, caller.Request{
		Provider: op.Provider, Namespace: op.Machine.Namespace, Name: op.Machine.Name, Timeout: op.Timeout,
		OperationID: fmt.Sprintf("%s.%s.%x", op.Machine.UID, Status, rand.Uint64()), Body: request(&op),
	})
}

// setReason stores what machines wait for, and notifies if that has changed.
func (d *Dispatcher) setReason(v *unserved, reason string) {
	d.mu.Lock()
	var names []types.NamespacedName
	if v.reason != reason {
		names = v.names()
	}
	v.reason = reason
	d.mu.Unlock()
	d.notifyAll(names)
}

// setServed drops v because a driver serves the provider, and notifies the machines.
func (d *Dispatcher) setServed(v *unserved, answered bool) {
	d.mu.Lock()
	names := v.names()
	for _, a := range v.waiting {
		a.leave()
	}
	clear(v.waiting)
	delete(d.unserved, v.provider)
	if answered {
		d.answered[v.provider] = true
	}
	d.mu.Unlock()
	d.notifyAll(names)
}

func (v *unserved) names() []types.NamespacedName {
	names := make([]types.NamespacedName, 0, len(v.waiting))
	for _, a := range v.waiting {
		names = append(names, a.name())
	}

	return names
}

func (d *Dispatcher) notifyAll(names []types.NamespacedName) {
	for _, name := range names {
		d.notify(name)
	}
}
