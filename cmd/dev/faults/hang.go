package main

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/machinebus/machinebus/bus/chaos"
	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// deafReplica is the replica of each driver whose creates and deletes ignore their
// deadlines.
const deafReplica = replicas

// deafDrivers are the drivers that ignore their deadlines.
func deafDrivers(w *world) []*target {
	return slices.DeleteFunc(slices.Clone(w.driverSet), func(t *target) bool { return !t.deaf })
}

// hangCall holds back the cloud's answers to a driver that ignores its deadlines, until
// its replica reports the call as stuck. Others have to continue without it.
func hangCall(ctx context.Context, w *world, t *target, e event) error {
	link := w.cloudLinks[t.identity]
	link.busy.Lock()
	defer link.busy.Unlock()
	defer link.link.Mend()
	if err := w.rollout(ctx, t.identity, e, mostReplicas); err != nil {
		return err
	}
	link.link.Hold(chaos.ToClient)
	const givesUp = operationTimeout + 30*time.Second // the operation's start, its deadline and the grace after that
	within, cancel := context.WithTimeout(ctx, givesUp)
	defer cancel()
	err := stack.Poll(within, t.name+" gives a call up", func(context.Context) error {
		if !w.stuckAt(t.unit.replica()) {
			return errMissed
		}
		return nil
	})
	if err != nil {
		return errors.Join(errMissed, err)
	}
	return nil
}

// stuckAt reports whether a replica lists a call that ignores its deadline.
func (w *world) stuckAt(replica string) bool {
	for _, op := range w.tap.Sessions()[replica].GetOperations() {
		if op.GetStuck() {
			return true
		}
	}
	return false
}
