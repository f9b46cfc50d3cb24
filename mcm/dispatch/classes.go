package dispatch

import (
	"context"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// classTimeout is how long a driver may take to answer about a class.
	classTimeout = time.Minute
	// A question that was not answered is asked again after this long, then half
	// as often each time. A read needs no slot that a replica would show as free, so
	// room is no reason to ask sooner.
	firstClassWait, longestClassWait = time.Second, 5 * time.Minute
	// mixedTries is how often a question goes to any replica of a fleet of which
	// only some can answer it.
	mixedTries = 32
)

// A ClassCaller is the part of caller.Caller that asks about classes.
type ClassCaller interface {
	Call(ctx context.Context, req caller.Request) (*caller.Outcome, error)
	Room(provider string) <-chan struct{}
	Replicas() []caller.Replica
}

// Classes asks drivers about classes: questions that change nothing and may be
// asked any number of times. Its methods wait for the answer, so no reconciler
// calls them itself. They are safe for concurrent use.
type Classes struct {
	caller ClassCaller
}

// NewClasses returns a Classes that asks through a caller.
func NewClasses(client ClassCaller) *Classes { return &Classes{caller: client} }

// Validate asks the driver of a provider whether a class could be used. It waits
// for as long as no replica answers, until ctx ends. Warnings are faults that do
// not keep the class from being used. The error is the driver's own, with its code;
// Unimplemented when replicas live and none of them validates classes.
func (c *Classes) Validate(ctx context.Context, provider string, class Class) (warnings []string, err error) {
	result, err := c.ask(ctx, driverv1.Operation_OPERATION_VALIDATE, caller.Request{
		Provider: provider, Namespace: class.Object.Namespace, Name: class.Object.Name, Timeout: classTimeout,
		OperationID: string(class.Object.UID) + ".validate." + string(uuid.NewUUID()),
		Body: &driverv1.Envelope{Body: &driverv1.Envelope_Validate{
			Validate: &driverv1.ValidateRequest{Class: classMessage(class)},
		}},
	})

	return result.GetValidate().GetWarnings(), err
}

// ask returns a driver's answer, however long it takes to get one.
func (c *Classes) ask(ctx context.Context, op driverv1.Operation, req caller.Request) (*driverv1.Result, error) {
	refused := 0
	for wait := firstClassWait; ; wait = min(2*wait, longestClassWait) {
		room := c.caller.Room(req.Provider)
		switch live, able := c.offered(req.Provider, op); {
		case able:
			out, err := c.caller.Call(ctx, req)
			if CodeOf(err) == Unimplemented {
				// Said by a replica of an older version, while others are of a newer one.
				refused++
				if refused < mixedTries {
					continue
				}
			}
			if ctx.Err() != nil || ended(err) {
				return out.Result, err
			}
		case live:
			return nil, Errorf(Unimplemented, "no replica of provider %s implements %s", req.Provider, bus.Verb(op))
		default:
			// Nobody lives: the first session of a replica is a sign of room.
			select {
			case <-room:
				continue
			case <-ctx.Done():
				return nil, ctx.Err() //nolint:wrapcheck // the caller's own
			}
		}
		pause := time.NewTimer(wait)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()

			return nil, ctx.Err() //nolint:wrapcheck // the caller's own
		}
	}
}

// offered tells whether a replica of the provider lives, and whether one does
// the operation.
func (c *Classes) offered(provider string, op driverv1.Operation) (live, able bool) {
	for _, r := range c.caller.Replicas() {
		if r.Session.GetProvider() == provider {
			live = true
			able = able || slices.Contains(r.Session.GetCapabilities(), op)
		}
	}

	return live, able
}
