package dispatch

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// listTimeout is how long a driver may take to list a class.
const listTimeout = time.Minute

// listKind is the kind of a list in metrics. Lists are not journaled.
const listKind Kind = "list"

// A Listed is an instance in a driver's list.
type Listed struct {
	ProviderID string
	// MachineName and MachineUID are recorded with the instance; the uid is empty if the
	// cloud cannot store it.
	MachineName string
	MachineUID  types.UID
	// Owner is the uid of the control cluster that created it; empty if none was recorded.
	Owner string
}

// List returns the instances that a driver lists for a class. It waits for the answer for at
// most a minute, and does not retry.
func (d *Dispatcher) List(ctx context.Context, provider string, class Class) ([]Listed, error) {
	out, err := d.caller.Call(ctx, caller.Request{
		Provider: provider, Namespace: class.Object.Namespace, Name: class.Object.Name, Timeout: listTimeout,
		OperationID: string(class.Object.UID) + ".list." + rand.Text(),
		Body: &driverv1.Envelope{Body: &driverv1.Envelope_List{
			List: &driverv1.ListRequest{Class: classMessage(class)},
		}},
	})
	if ctx.Err() == nil {
		d.metrics.asked(provider, listKind, err, out)
	}
	if err != nil {
		return nil, err
	}
	if out.Result.GetList() == nil {
		return nil, Errorf(Internal, "the driver of provider %s answered the list request for class %s without a list: the driver has a bug",
			provider, class.Object.Name)
	}
	var list []Listed
	for _, i := range out.Result.GetList().GetInstances() {
		list = append(list, Listed{
			ProviderID: i.GetProviderId(), MachineName: i.GetMachineName(), MachineUID: types.UID(i.GetMachineUid()),
			Owner: i.GetOwner(),
		})
	}

	return list, nil
}

// An Orphan is an instance that belongs to no machine.
type Orphan struct {
	Listed

	Namespace string
	Provider  string
	// Class is a class whose driver lists it.
	Class Class
}

// Remove deletes an orphan's instance when it has its turn, and waits for the end. It tries
// once; the next list shows whether the instance is gone. The driver finds the instance by
// its provider id. The request has a uid derived from that, so the delete has its own claim
// and numbers, and the machine keeps its numbers if it comes back from a backup. Remove calls
// still once it has its turn, and returns its error if the instance is no orphan any more.
func (d *Dispatcher) Remove(
	ctx context.Context, orphan *Orphan, timeout time.Duration, still func(context.Context) error,
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(d.ctx, cancel)()
	sum := sha256.Sum256([]byte(orphan.ProviderID))
	m := &v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: orphan.Namespace, Name: orphan.MachineName, UID: types.UID("orphan-" + hex.EncodeToString(sum[:16])),
		},
		Spec: v1alpha1.MachineSpec{
			ProviderID: orphan.ProviderID, Class: v1alpha1.ClassSpec{Name: orphan.Class.Object.Name},
		},
	}
	started := time.Now()
	op := &Operation{
		Kind: Delete, Number: started.UnixMilli(), Machine: m, Class: orphan.Class, Provider: orphan.Provider, Timeout: timeout,
	}
	e := &entry{
		id: op.ID(), kind: Delete, uid: m.UID, provider: orphan.Provider,
		machine: types.NamespacedName{Namespace: m.Namespace, Name: m.Name}, started: started, turn: newTurn(op),
	}
	defer d.metrics.started(e.provider, e.kind)()
	d.queue.enter(e.turn, false)
	defer d.queue.leave(e.turn)
	select {
	case <-e.turn.granted:
	case <-ctx.Done():
		return ctx.Err() //nolint:wrapcheck // the caller's own
	}
	if err := still(ctx); err != nil {
		return err
	}
	out, err := d.call(ctx, e, op)
	if later := LaterOf(err); later > 0 { // an earlier try was numbered by a clock that is ahead
		op.Number = later + 1
		e.id = op.ID()
		out, err = d.call(ctx, e, op)
	}
	if ctx.Err() != nil {
		return ctx.Err() //nolint:wrapcheck // the caller's own
	}
	state := &State{Err: err, Replica: out.Replica, Attempt: out.Attempts, Provider: e.provider}
	if !out.Plain && out.Replica != "" && out.Result != nil {
		if err := d.caller.Acknowledge(e.provider, out.Replica, e.id); err != nil {
			d.log(e, state).V(1).Info("cannot acknowledge the result; its replica keeps it for a day", "err", err.Error())
		}
	}
	d.metrics.finished(e.provider, e.kind, err, out)
	d.audit(e, state, out)

	return err
}

// call sends an operation once.
func (d *Dispatcher) call(ctx context.Context, e *entry, op *Operation) (*caller.Outcome, error) {
	return d.caller.Call(ctx, caller.Request{
		Provider: e.provider, Namespace: op.Machine.Namespace, Name: op.Machine.Name, OperationID: e.id, Body: request(op),
		Timeout: op.Timeout,
	})
}
