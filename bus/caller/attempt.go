package caller

import (
	"sync"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// doubtAfter is how many sessions in a row may contradict an attempt's state before its
// holder is asked. One may have been sent before the state changed.
const doubtAfter = 2

// An attempt collects the frames of one try at an operation. Frames only overwrite its
// fields, so a replica that floods delays only itself.
type attempt struct {
	id     string
	number uint32
	tree   bus.Tree
	target string // the only replica that may answer; empty for any
	notify chan struct{}

	mu sync.Mutex
	attemptState
	doubts int // sessions in a row that contradict the state
}

func newAttempt(id string, number uint32, tree bus.Tree, target string) *attempt {
	return &attempt{id: id, number: number, tree: tree, target: target, notify: make(chan struct{}, 1)}
}

// An attemptState is what is known of an attempt.
type attemptState struct {
	holder      string
	progress    string
	result      *driverv1.Result
	busy        *driverv1.Busy
	busyAt      string // the replica that sent busy
	noResponder bool
	doubted     bool // its holder is to be asked; only a snapshot says so
}

func (a *attempt) snapshot() attemptState {
	a.mu.Lock()
	defer a.mu.Unlock()
	h := a.attemptState
	h.doubted = a.doubts >= doubtAfter && a.result == nil
	if h.doubted {
		a.doubts = 0 // the holder is asked now
	}

	return h
}

// onMessage handles a message on the attempt's reply subject. It returns why it dropped
// the message, or "".
func (a *attempt) onMessage(m *nats.Msg) (dropped string) {
	defer signal(a.notify)
	if bus.IsNoResponders(m) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.noResponder = true

		return ""
	}
	env, err := bus.DecodeMessage(m)
	if err != nil {
		return err.Error()
	}

	return a.onFrame(env)
}

// onFrame drops a frame that is not of this operation, this attempt and its holder.
func (a *attempt) onFrame(env *driverv1.Envelope) (dropped string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case env.GetOperationId() != a.id:
		return "frame of another operation"
	case env.GetAttempt() != a.number:
		return "frame of another attempt"
	case a.tree != bus.TreePlain && env.GetReplica() == "":
		return "frame without a replica"
	case a.target != "" && env.GetReplica() != a.target:
		return "frame of a replica that was not asked"
	case a.holder != "" && env.GetReplica() != a.holder:
		return "frame of a replica that does not hold the operation"
	case a.result != nil:
		return "frame after the result"
	}
	switch body := env.GetBody().(type) {
	case *driverv1.Envelope_Accepted:
		a.holder = env.GetReplica()
	case *driverv1.Envelope_Progress:
		a.holder, a.progress = env.GetReplica(), bus.OneLine(body.Progress.GetMessage())
	case *driverv1.Envelope_Result:
		a.holder, a.result = env.GetReplica(), body.Result
	case *driverv1.Envelope_Busy:
		a.busy, a.busyAt = body.Busy, env.GetReplica()
	default:
		return "frame of an unknown kind"
	}

	return ""
}

// onState handles the operation's state in a session of the holder; nil if the session
// does not list it.
func (a *attempt) onState(st *driverv1.OperationState) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if st != nil && !st.GetSettled() {
		a.doubts = 0
	} else {
		a.doubts++
	}
	if a.doubts >= doubtAfter {
		signal(a.notify)
	}
}
