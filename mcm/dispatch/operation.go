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

// The kinds, as they stand in subjects, metrics and the machine's journal.
const (
	Create     Kind = "create"
	Initialize Kind = "initialize"
	Delete     Kind = "delete"
)

func (k Kind) wire() driverv1.Operation {
	op, _ := bus.ParseVerb(string(k))

	return op
}

// OperationID returns the id of a machine's operation: it is the same for every
// try, by whichever manager, and no other operation ever has it. Number is how
// many operations of the machine were settled before.
func OperationID(uid types.UID, kind Kind, number int64) string {
	return fmt.Sprintf("%s.%s.%d", uid, kind, number)
}

// KindOf returns the kind of the operation with that id; empty when no operation
// can have it.
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
	// Recover says that the operation was begun before, by this manager or
	// another one, in Attempt attempts.
	Recover bool
	Attempt uint32
	// OnlyIfHeld, with Recover, waits for what a replica still holds but begins
	// nothing: without one the operation ends with NotFound.
	OnlyIfHeld bool
	// Told says that its machine tells of a wait already, for an operation that had
	// not begun or for another manager: that a driver has it is news then.
	Told bool
	// Span is the pass's that begins the operation; nil for none.
	Span trace.Span
}

// ID returns the operation's id.
func (o *Operation) ID() string { return OperationID(o.Machine.UID, o.Kind, o.Number) }

// A Phase is how far an operation is.
type Phase int

// The phases of an operation.
const (
	// Waiting: no driver has it, or its driver was lost; Reason says what is
	// waited for.
	Waiting Phase = iota
	// Running: a driver replica has it.
	Running
	// Done: it has ended; Err says how.
	Done
	// Stale: it was settled before; the caller looks at an old object, or at one
	// whose journal somebody has turned back.
	Stale
	// Refused: another operation of the machine has not ended.
	Refused
)

// A State is what is known of an operation.
type State struct {
	Phase Phase
	// ID and Kind name the operation.
	ID   string
	Kind Kind
	// Reason says in one line what a waiting operation waits for; empty before
	// anything is known.
	Reason string
	// Waited says that there was a Reason, or that the operation was Told, whatever has
	// followed.
	Waited bool
	// Settled is, for a Stale one, how many operations were settled in truth.
	Settled int64
	// Replica has it, in its Attempt's try; Progress is the driver's own word. An
	// operation that is Done with Attempt 0 was seen by no driver.
	Replica  string
	Attempt  uint32
	Progress string

	// Err is how a Done operation failed, nil for success.
	Err error
	// Lost says of a Done operation that nobody has it any more and nobody knows
	// what came of it: it may have an effect until its deadline, and that may show
	// SettleTime later.
	Lost       bool
	SettleTime time.Duration
	// Instance is what the driver returned, nil for nothing.
	Instance *Instance
	// LastKnownState is the driver's memory, to be stored when Stated.
	LastKnownState string
	Stated         bool
	// Provider is whose driver it was.
	Provider string
	// ClassGeneration is the version of the class it was sent with; 0 when another
	// manager sent it.
	ClassGeneration int64
	// Took is the time the driver took.
	Took time.Duration
}
