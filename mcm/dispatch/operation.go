package dispatch

import (
	"fmt"
	"strings"
	"time"

	"go.opentelemetry.io/otel/trace"
	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Kind is what an operation does.
type Kind string

// The kinds, as in subjects, metrics and the machine's journal.
const (
	Create     Kind = "create"
	Initialize Kind = "initialize"
	Delete     Kind = "delete"
)

func (k Kind) wire() driverv1.Operation {
	op, _ := bus.ParseVerb(string(k))

	return op
}

// OperationID returns the id of a machine's operation. It is the same for every attempt of
// any manager, and unique. Number is how many operations of the machine were settled before.
func OperationID(uid types.UID, kind Kind, number int64) string {
	return fmt.Sprintf("%s.%s.%d", uid, kind, number)
}

// KindOf returns the kind of the operation with that id; empty if the id is not valid.
func KindOf(operationID string) Kind {
	if parts := strings.Split(operationID, "."); len(parts) == 3 {
		return Kind(parts[1])
	}

	return ""
}

// An Operation is one mutation of one machine.
type Operation struct {
	Kind Kind
	// Number is how many operations of the machine were settled before this one.
	Number int64
	// Machine and Class are read when the operation starts and never changed.
	Machine *v1alpha1.Machine
	Class   Class
	// Provider is the driver's name on the bus.
	Provider string
	// Timeout is how long one attempt may take.
	Timeout time.Duration
	// Recover says that this or another manager has begun the operation before, in Attempt
	// attempts.
	Recover bool
	Attempt uint32
	// OnlyIfHeld, with Recover, waits for a replica that still holds the operation but begins
	// nothing: if no replica holds it, the operation ends with NotFound.
	OnlyIfHeld bool
	// WaitReported says that the machine's status already reports a wait. Then the
	// Dispatcher notifies when a driver has the operation.
	WaitReported bool
	// Span is the span of the pass that begins the operation; nil for none.
	Span trace.Span
}

// ID returns the operation's id.
func (o *Operation) ID() string { return OperationID(o.Machine.UID, o.Kind, o.Number) }

// A Phase is the progress of an operation.
type Phase int

// The phases of an operation.
const (
	// Waiting: no driver has it, or its driver was lost; Reason says what it waits for.
	Waiting Phase = iota
	// Running: a driver replica has it.
	Running
	// Done: it has ended; Err is nil if it succeeded.
	Done
	// Stale: it was settled before. The caller has an old object, or one whose journal was
	// restored.
	Stale
	// Refused: another operation of the machine has not ended.
	Refused
)

// A State is the state of an operation.
type State struct {
	Phase Phase
	// ID and Kind name the operation.
	ID   string
	Kind Kind
	// Reason says in one line what a waiting operation waits for; empty at first.
	Reason string
	// Waited says that there was a Reason at any time, or that WaitReported was set.
	Waited bool
	// Settled is the true number of settled operations, if the operation is Stale.
	Settled int64
	// Replica has it in attempt number Attempt; Progress is the driver's text. An operation
	// that is Done with Attempt 0 reached no driver.
	Replica  string
	Attempt  uint32
	Progress string

	// Err is why a Done operation failed; nil if it succeeded.
	Err error
	// Lost says that the outcome of a Done operation is unknown and no replica has it any
	// more. It may take effect until its deadline, and lists may show that SettleTime later.
	Lost       bool
	SettleTime time.Duration
	// Instance is the instance that the driver returned; may be nil.
	Instance *Instance
	// LastKnownState is the driver's state for the machine. It is to be stored if Stated.
	LastKnownState string
	Stated         bool
	// Provider is the provider of the driver.
	Provider string
	// ClassGeneration is the generation of the class in the request; 0 if another manager
	// sent it.
	ClassGeneration int64
	// Took is the time the driver took.
	Took time.Duration
}
