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

// A vacancy is a provider that nobody serves, as far as is known, with the machines
// that wait until somebody does. It is guarded by Dispatcher.mu.
type vacancy struct {
	provider string
	reason   string // empty before anything is known
	waiting  map[types.UID]applicant
}

// An applicant is a machine's operation that has not begun.
type applicant struct {
	op    Operation
	since time.Time
	leave func() // takes it out of the metrics
}

func (a *applicant) name() types.NamespacedName {
	return types.NamespacedName{Namespace: a.op.Machine.Namespace, Name: a.op.Machine.Name}
}

// Serves tells whether anybody serves op's provider: an operation that is begun
// before binds its machine to a provider that may be a typing mistake. If nobody
// does, the machine is notified when that changes, and when the reason does, which is
// what it waits for in one line, empty before anything is known. It never blocks.
//
// Replicas tell that they live. A driver without sessions is asked for op's machine's
// status until it answers, and counts from then on for as long as the process runs.
func (d *Dispatcher) Serves(op Operation) (reason string, served bool) {
	uid := op.Machine.UID
	served = d.lives(op.Provider)
	d.mu.Lock()
	defer d.mu.Unlock()
	if served || d.answered[op.Provider] {
		d.withdraw(uid, "")

		return "", true
	}
	d.withdraw(uid, op.Provider) // it may have waited for another one
	v, ok := d.vacancies[op.Provider]
	if !ok {
		v = &vacancy{provider: op.Provider, waiting: map[types.UID]applicant{}}
		d.vacancies[op.Provider] = v
		d.running.Go(func() { d.await(v) })
	}
	if _, ok := v.waiting[uid]; !ok {
		// What is asked is small, whatever the machine carries.
		op.Machine = &v1alpha1.Machine{
			ObjectMeta: metav1.ObjectMeta{Namespace: op.Machine.Namespace, Name: op.Machine.Name, UID: uid},
			Spec:       v1alpha1.MachineSpec{Class: op.Machine.Spec.Class},
		}
		v.waiting[uid] = applicant{op: op, since: time.Now(), leave: d.metrics.queued(op.Provider, op.Kind)}
	}

	return v.reason, false
}

// Withdraw says that a machine does not wait for a driver any more.
func (d *Dispatcher) Withdraw(uid types.UID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.withdraw(uid, "")
}

// withdraw takes a machine out of all vacancies but one. d.mu is held.
func (d *Dispatcher) withdraw(uid types.UID, but string) {
	for provider, v := range d.vacancies {
		if a, ok := v.waiting[uid]; ok && provider != but {
			a.leave()
			delete(v.waiting, uid)
		}
	}
}

// lives tells whether a replica of a provider is known.
func (d *Dispatcher) lives(provider string) bool {
	_, known := d.spare(provider)

	return known
}

// await looks for somebody who serves a provider for as long as a machine waits for
// that, and tells all that do. Replicas have the time to be heard before anybody
// is asked.
func (d *Dispatcher) await(v *vacancy) {
	again := time.NewTimer(retryWait)
	defer again.Stop()
	for {
		room := d.caller.Room(v.provider)
		if d.lives(v.provider) {
			d.fill(v, false)

			return
		}
		select {
		case <-room:
			continue
		case <-again.C:
			again.Reset(retryWait)
		case <-d.ctx.Done():
			return
		}
		op, ok := d.anyOf(v)
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
			d.fill(v, true)

			return
		case bus.NothingRan(err) && CodeOf(err) == InvalidArgument:
			d.fill(v, false) // nobody can be asked that: the create will say why

			return
		default:
			d.explain(v, err.Error())
		}
	}
}

// anyOf returns an operation that waits; false, and the end of the vacancy, when
// there is none.
func (d *Dispatcher) anyOf(v *vacancy) (Operation, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, a := range v.waiting {
		return a.op, true
	}
	delete(d.vacancies, v.provider)

	return Operation{}, false
}

// probe asks for a machine's status, of which only matters whether anybody answers.
// Silence is no answer: somebody may merely listen in, as people do who want to know why
// nothing happens. It is canceled when a replica has come.
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

// explain notes what a vacancy's machines wait for, and tells them if that is news.
func (d *Dispatcher) explain(v *vacancy, reason string) {
	d.mu.Lock()
	var names []types.NamespacedName
	if v.reason != reason {
		names = v.names()
	}
	v.reason = reason
	d.mu.Unlock()
	d.notifyAll(names)
}

// fill ends a vacancy: somebody serves the provider.
func (d *Dispatcher) fill(v *vacancy, answered bool) {
	d.mu.Lock()
	names := v.names()
	for _, a := range v.waiting {
		a.leave()
	}
	clear(v.waiting)
	delete(d.vacancies, v.provider)
	if answered {
		d.answered[v.provider] = true
	}
	d.mu.Unlock()
	d.notifyAll(names)
}

func (v *vacancy) names() []types.NamespacedName {
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
