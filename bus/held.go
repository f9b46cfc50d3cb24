package bus

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// held is an operation in a replica's hands: running, or settled and not yet
// acknowledged. Its mutable fields are guarded by Server.mu.
type held struct {
	cluster   string
	id        string
	operation driverv1.Operation
	machine   string // uid; empty for operations on a class
	namespace string
	name      string
	request   *driverv1.Envelope
	started   time.Time
	deadline  time.Time

	traceParent string
	cancel      context.CancelFunc

	// Where frames go: to whoever asked last.
	reply       string
	contentType string
	attempt     uint32

	accepted bool
	returned bool // the handler has
	stuck    bool // it was given up; machine and slot stay taken until the handler returns
	begun    bool // a call that changes something may be at the provider
	// A call of an attempt before this one may be there, too: who asked for this one,
	// or for a later one that was attached to it, says so.
	earlierMayRun bool
	progress      string
	result        *driverv1.Result // set once settled
	ended         time.Time

	// Of mutations, which are claimed.
	claiming          bool       // the operations stream has not answered yet
	firstClaim, claim uint64     // stream sequences of what we wrote first and last
	beginning         sync.Mutex // held while a record is written that a call begins
	fenced            bool       // another attempt has taken the claim's place
	refused           bool       // a call to the provider was refused for it
	stored            bool       // the outcome was, or never will be
	storedAt          time.Time
	known             bool // mcm has acknowledged the result
	// It was asked for again: another attempt may have been sent, to take its claim's
	// place. Its result counts once it is stored there.
	askedAgain bool
	// answered: who asked last has the result, or gets it behind the word that we have
	// the operation.
	answered bool
}

// counts tells that the result, once there is one, is what came of the operation, or
// leaves that open. Server.mu is held.
func (h *held) counts() bool { return !h.askedAgain || h.stored || h.result.GetOutcomeUnknown() }

func (h *held) key() string { return h.cluster + "/" + h.id }

func (h *held) machineKey() string { return h.cluster + "/" + h.machine }

func (h *held) state(now time.Time) *driverv1.OperationState {
	st := &driverv1.OperationState{
		OperationId: h.id, Attempt: h.attempt, Operation: h.operation,
		Namespace: h.namespace, Name: h.name, LastProgress: h.progress, Fenced: h.fenced,
	}
	end := now
	if h.result != nil {
		st.LastProgress = "" // thousands of these must fit one session
		st.Settled, st.Code, end = true, h.result.GetStatus().GetCode(), h.ended
	}
	st.Elapsed = durationpb.New(end.Sub(h.started))

	return st
}

// begin counts an operation as running and returns its context. Server.mu is
// held, so that neither a cancel nor a drain can slip in between.
func (s *Server) begin(h *held) context.Context {
	timeout := defaultTimeout
	if t := h.request.GetTimeout(); t.IsValid() && t.AsDuration() > 0 {
		timeout = t.AsDuration()
	}
	h.deadline = time.Now().Add(timeout)
	ctx, cancel := context.WithDeadline(context.Background(), h.deadline) //nolint:forbidigo // an operation outlives the Run that took it: drain decides
	h.cancel = cancel
	s.tasks.Add(1)

	return ctx
}

// run has the handler do an operation that has begun, and settles it.
func (s *Server) run(ctx context.Context, h *held) {
	defer h.cancel()
	task := &Task{
		Cluster: h.cluster, Operation: h.operation, Request: h.request, TraceParent: h.traceParent,
		server: s, held: h, ctx: ctx,
	}
	result, told := s.handleNamed(ctx, task)
	if s.unstick(h, result) {
		return
	}
	defer s.tasks.Done()
	if err := s.fits(h, result); err != nil {
		// Found out ahead of all who are to hear of it, and of the stream.
		result, told = unsendable(err), false
	}
	s.settle(h, result, ctx.Err() != nil || !told)
}

// doubt says of a failure, whatever the driver says of it, what is not known. CutOff
// tells that the driver could not say what it has done: its call was cut off, or it
// gave no answer that can be passed on. Server.mu is held.
func (h *held) doubt(result *driverv1.Result, cutOff bool) {
	// Its call was cut off halfway, or one of several was refused [RESULT-3].
	own := result.GetOutcomeUnknown() || h.begun && (cutOff || h.refused)
	// This attempt has ended before it could tell what an earlier one has done, or
	// that one is not over yet [RESULT-5]; what was refused is to be tried again
	// under this id, and not as another operation.
	earlier := h.refused || cutOff && Mutates(h.operation) && h.request.GetRecover() ||
		h.recovers() && !h.begun || h.operation == driverv1.Operation_OPERATION_CREATE && h.earlierMayRun
	result.OutcomeUnknown, result.NoEffect = own || earlier, earlier && !own
}

// recovers tells that an earlier attempt may have made, or may yet make, an
// instance: nothing but a look for it makes a failure of this one an outcome. A lost
// delete or initialize leaves nothing behind that the next one would not find.
func (h *held) recovers() bool {
	return h.operation == driverv1.Operation_OPERATION_CREATE && h.request.GetRecover()
}

// handle calls the handler and makes a result of whatever comes of it [RESULT-1]. Told
// is false for one that is not the handler's.
func (s *Server) handle(ctx context.Context, task *Task) (result *driverv1.Result, told bool) {
	defer func() {
		if r := recover(); r != nil {
			// The value may hold anything, credentials included: it stays in the
			// replica's own log.
			s.log.Error("driver panicked", "operation", Verb(task.Operation),
				"operation_id", task.Request.GetOperationId(), "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
			result, told = failure(driverv1.Code_CODE_INTERNAL,
				"driver panicked in "+Verb(task.Operation)+"; the log of replica "+s.cfg.Replica+" has the stack"), false
		}
	}()
	result = s.handler.Handle(ctx, task)
	if result == nil {
		return failure(driverv1.Code_CODE_INTERNAL, "driver returned nothing from "+Verb(task.Operation)), false
	}
	if text := result.GetStatus().GetMessage(); len(text) > maxText || !utf8.ValidString(text) {
		// Clouds send such. Protobuf does not carry it, or mcm would not take more of it.
		result.Status.Message = short(strings.ToValidUTF8(text, "\uFFFD"))
	}

	return result, true
}

func failure(code driverv1.Code, message string) *driverv1.Result {
	return &driverv1.Result{Status: &driverv1.Status{Code: code, Message: message}}
}

// settle records the result, of which doubt judges, and sends it. A mutation's is kept
// until mcm has stored it.
func (s *Server) settle(h *held, result *driverv1.Result, cutOff bool) {
	s.mu.Lock()
	s.note(h, result, cutOff)
	s.free(h)
	s.mu.Unlock()
	s.tell(h, result)
}

// free gives back what an operation occupies. Server.mu is held.
func (s *Server) free(h *held) {
	if !Mutates(h.operation) {
		delete(s.reads, h)

		return
	}
	s.occupy(h.operation, -1)
	delete(s.machines, h.machineKey())
}

// note records the result. Server.mu is held.
func (s *Server) note(h *held, result *driverv1.Result, cutOff bool) {
	now := time.Now()
	if result.GetStatus().GetCode() != driverv1.Code_CODE_OK {
		h.doubt(result, cutOff)
	}
	h.result, h.ended = result, now
	if Mutates(h.operation) {
		if result.GetOutcomeUnknown() {
			delete(s.held, h.key()) // to be tried again under this very id [RESULT-4]
		}
		s.forgetOld(now)
	}
}

// tell lets everybody know of the result that note has recorded.
func (s *Server) tell(h *held, result *driverv1.Result) {
	code, took := result.GetStatus().GetCode(), h.ended.Sub(h.started)
	s.stats.settled(endpoint{h.cluster, h.operation}, result.GetStatus(), took)
	if s.cfg.OnSettled != nil {
		s.cfg.OnSettled(h.operation, code, took)
	}
	if Mutates(h.operation) {
		// Ahead of the result: whoever has that finds the claim ended.
		s.storeOutcome(h, result)
	}
	s.send(h, resultFrame(result))
	if Mutates(h.operation) {
		s.renewNow() // reads are in no session
	}
}

// forgetOld bounds what is kept for an mcm that never acknowledges.
func (s *Server) forgetOld(now time.Time) {
	var oldest *held
	settled := 0
	for key, h := range s.held {
		switch {
		case h.result == nil:
			continue
		case now.Sub(h.ended) > keptFor:
			delete(s.held, key)

			continue
		}
		settled++
		if oldest == nil || h.ended.Before(oldest.ended) {
			oldest = h
		}
	}
	if settled > keptResults {
		s.log.Warn("too many results that mcm did not acknowledge; forgetting the oldest", "operation_id", oldest.id)
		delete(s.held, oldest.key())
	}
}

func (s *Server) report(h *held, message string) {
	message = headerText(message) // each session repeats it
	s.mu.Lock()
	changed := h.progress != message && h.result == nil
	if changed {
		h.progress = message
	}
	s.mu.Unlock()
	if changed {
		s.send(h, &driverv1.Envelope{Body: &driverv1.Envelope_Progress{Progress: &driverv1.Progress{Message: message}}})
	}
}

func acceptedFrame() *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Accepted{Accepted: &driverv1.Accepted{}}}
}

func resultFrame(r *driverv1.Result) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: r}}
}

// send publishes a frame of a held operation to whoever asked last; a result that does
// not count yet waits until it is stored. A frame that cannot be sent is not lost: mcm
// sees the operation in the next session and asks.
func (s *Server) send(h *held, frame *driverv1.Envelope) {
	s.mu.Lock()
	reply, contentType, attempt := h.reply, h.contentType, h.attempt
	waits := frame.GetResult() != nil && (h.answered || !h.counts())
	h.answered = h.answered || frame.GetResult() != nil && !waits
	s.mu.Unlock()
	if waits {
		return
	}
	err := s.sendTo(reply, contentType, h.id, attempt, frame)
	if frame.GetResult() == nil || !errors.Is(err, errTooLarge) && !errors.Is(err, errEncode) {
		return
	}
	// Nobody will ever get this result: mcm must not wait and ask for it in vain. Of a
	// mutation that is so only where the server takes less than it did before.
	instead := unsendable(err)
	s.mu.Lock()
	h.doubt(instead, true)
	if h.result != nil {
		h.result = instead
	}
	if instead.GetOutcomeUnknown() && s.held[h.key()] == h {
		delete(s.held, h.key()) // [RESULT-4]
	}
	s.mu.Unlock()
	_ = s.sendTo(reply, contentType, h.id, attempt, resultFrame(instead)) // it is logged
}

func (s *Server) sendTo(reply, contentType, id string, attempt uint32, frame *driverv1.Envelope) error {
	frame.OperationId, frame.Attempt, frame.Replica = id, attempt, s.cfg.Replica
	payload, err := Encode(frame, contentType)
	if err != nil {
		s.log.Error("cannot encode a reply", "operation_id", id, "err", err)

		return err
	}
	m := &nats.Msg{Subject: reply, Data: payload}
	if contentType != "" {
		m.Header = nats.Header{headerContentType: {contentType}}
	}
	if st := frame.GetResult().GetStatus(); st.GetCode() != driverv1.Code_CODE_OK {
		if m.Header == nil {
			m.Header = nats.Header{}
		}
		m.Header[headerErrorCode] = []string{fmt.Sprint(int32(st.GetCode()))}
		m.Header[headerError] = []string{headerText(st.GetMessage())}
	}
	if err := s.conn.publish(m); err != nil {
		s.log.Warn("reply not sent; mcm will ask for it", "operation_id", id, "err", err)

		return err
	}

	return nil
}

// headerText makes one line of an error text, short enough for a header.
func headerText(text string) string {
	const limit = 256
	line := make([]rune, 0, min(len(text), limit))
	for _, r := range text {
		if len(line) == limit {
			break
		}
		if r < ' ' {
			r = ' '
		}
		line = append(line, r)
	}

	return string(line)
}
