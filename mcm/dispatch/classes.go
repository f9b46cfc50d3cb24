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
	// An unanswered question is asked again after firstClassWait. The wait doubles each time,
	// up to longestClassWait. A free slot does not shorten it, because reads need none.
	firstClassWait, longestClassWait = time.Second, 5 * time.Minute
	// mixedTries is the number of tries at a fleet of which only some replicas implement
	// the question.
	mixedTries = 32
)

// A ClassCaller is the part of caller.Caller that asks about classes.
type ClassCaller interface {
	Call(ctx context.Context, req caller.Request) (*caller.Outcome, error)
	Room(provider string) <-chan struct{}
	Replicas() []caller.Replica
}

// Classes asks drivers about classes. Its questions change nothing and may be repeated. Its
// methods wait for the answer, so a reconciler must not call them. They are safe for
// concurrent use.
type Classes struct {
	caller ClassCaller
}

// NewClasses returns a Classes that sends its requests by a caller.
func NewClasses(client ClassCaller) *Classes { return &Classes{caller: client} }

// Validate asks the driver of a provider whether it can use a class. It waits until a replica
// answers or ctx ends. Warnings do not keep the driver from using the class. The error is the
// driver's, with its code; Unimplemented if no live replica validates classes.
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

// ask waits for a driver's answer until ctx ends.
func (c *Classes) ask(ctx context.Context, op driverv1.Operation, req caller.Request) (*driverv1.Result, error) {
	refused := 0
	for wait := firstClassWait; ; wait = min(2*wait, longestClassWait) {
		room := c.caller.Room(req.Provider)
		switch live, able := c.capable(req.Provider, op); {
		case able:
			out, err := c.caller.Call(ctx, req)
			if CodeOf(err) == Unimplemented {
				// The answer of an older replica, while others are newer.
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
			// No replica is live. The first session of one signals room.
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

// capable reports whether the provider has a live replica, and one that implements the
// operation.
func (c *Classes) capable(provider string, op driverv1.Operation) (live, able bool) {
	for _, r := range c.caller.Replicas() {
		if r.Session.GetProvider() == provider {
			live = true
			able = able || slices.Contains(r.Session.GetCapabilities(), op)
		}
	}

	return live, able
}
