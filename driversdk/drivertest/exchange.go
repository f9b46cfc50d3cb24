package drivertest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	headerContentType = "Content-Type"
	contentTypeJSON   = "application/json"
	headerExpected    = "Nats-Expected-Last-Subject-Sequence"
	headerSequence    = "Nats-Sequence"
	headerStatus      = "Status"

	// silence is how long the suite listens for what must not come.
	silence = 300 * time.Millisecond
)

var (
	errOutside = errors.New("reply subject outside of the provider's inbox prefix")
	errNoFrame = errors.New("no frame")
)

// A frame is one reply.
type frame struct {
	*driverv1.Envelope

	contentType string
	nobody      bool // the server says that nobody listens
}

// An exchange is one request and the frames that came to its reply subject.
type exchange struct {
	verb    string
	id      string
	attempt uint32
	mutates bool
	loose   bool // it was malformed: frames need not name the operation
	frames  chan frame
	// patience bounds the wait for what is to come at once.
	patience time.Duration

	// Guarded by suite.mu.
	accepted, results int
	moved             bool // another exchange asked for the same operation
	misnumbered       bool // a frame said another attempt
}

// A request is what to send. The zero value of a field means what the manager
// would send.
type request struct {
	subject string
	env     *driverv1.Envelope
	json    bool
	payload []byte // instead of env
	reply   string
}

// framesKept is more frames than any exchange has.
const framesKept = 256

// send publishes a request and returns where its frames arrive.
func (s *suite) send(r request) (*exchange, error) {
	x := &exchange{
		verb: bus.Verb(bus.OperationOf(r.env)), id: r.env.GetOperationId(), attempt: r.env.GetAttempt(),
		mutates: bus.Mutates(bus.OperationOf(r.env)), loose: r.env == nil, frames: make(chan frame, framesKept), patience: s.cfg.Patience,
	}
	m := &nats.Msg{Subject: r.subject, Data: r.payload, Reply: r.reply}
	if r.json {
		m.Header = nats.Header{headerContentType: {contentTypeJSON}}
	}
	if m.Data == nil {
		var err error
		if m.Data, err = bus.Encode(r.env, m.Header.Get(headerContentType)); err != nil {
			return nil, err
		}
	}
	if m.Reply == "" {
		m.Reply = s.replies + nuid.Next()
	}
	s.mu.Lock()
	if x.mutates {
		for _, other := range s.exchanges {
			other.moved = other.moved || other.id == x.id
		}
	}
	s.exchanges[m.Reply] = x
	s.mu.Unlock()
	if err := s.nc.PublishMsg(m); err != nil {
		return nil, fmt.Errorf("publish on %s: %w", m.Subject, err)
	}

	return x, nil
}

// onReply runs on the subscription's goroutine.
func (s *suite) onReply(m *nats.Msg) {
	s.mu.Lock()
	x := s.exchanges[m.Subject]
	s.mu.Unlock()
	if x == nil {
		return
	}
	f := frame{contentType: m.Header.Get(headerContentType)}
	f.nobody = len(m.Data) == 0 && m.Header.Get(headerStatus) == "503"
	if !f.nobody {
		env, err := bus.Decode(m.Data, f.contentType)
		if err != nil {
			s.blamef("ENV-3", "a frame of %s is no envelope: %v", x.verb, err)

			return
		}
		f.Envelope = env
		s.witness(x, m, f)
	}
	select {
	case x.frames <- f:
	default: // a driver that sends hundreds of frames has been seen enough
	}
}

// next returns the next frame.
func (x *exchange) next(ctx context.Context, limit time.Duration) (frame, error) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case f := <-x.frames:
		if f.nobody {
			return f, fmt.Errorf("%s: nobody listens on its subject", x.verb)
		}

		return f, nil
	case <-timer.C:
		return frame{}, fmt.Errorf("%s: %w within %s", x.verb, errNoFrame, limit)
	case <-ctx.Done():
		return frame{}, context.Cause(ctx)
	}
}

// first is next without progress.
func (x *exchange) first(ctx context.Context, limit time.Duration) (frame, error) {
	for {
		f, err := x.next(ctx, limit)
		if err != nil || f.GetProgress() == nil {
			return f, err
		}
	}
}

// busyError is a request that was refused with nothing done.
type busyError struct {
	verb   string
	reason driverv1.BusyReason
}

func (e *busyError) Error() string { return e.verb + " was answered busy (" + e.reason.String() + ")" }

// result waits for the exchange's result.
func (x *exchange) result(ctx context.Context, limit time.Duration) (*driverv1.Result, error) {
	for {
		f, err := x.first(ctx, limit)
		switch {
		case errors.Is(err, errNoFrame):
			return nil, fmt.Errorf("no result of %s within %s", x.verb, limit)
		case err != nil:
			return nil, err
		case f.GetResult() != nil:
			return f.GetResult(), nil
		case f.GetBusy() != nil:
			return nil, &busyError{x.verb, f.GetBusy().GetReason()}
		}
	}
}

// acceptedFrame waits for the word that the replica has the request.
func (x *exchange) acceptedFrame(ctx context.Context) error {
	f, err := x.first(ctx, x.patience)
	switch {
	case err != nil:
		return err
	case f.GetBusy() != nil:
		return &busyError{x.verb, f.GetBusy().GetReason()}
	case f.GetAccepted() == nil:
		return fmt.Errorf("%s was answered %s instead of accepted", x.verb, describe(f))
	}

	return nil
}

func describe(f frame) string {
	switch {
	case f.GetAccepted() != nil:
		return "accepted"
	case f.GetProgress() != nil:
		return "progress"
	case f.GetBusy() != nil:
		return "busy (" + f.GetBusy().GetReason().String() + ")"
	case f.GetResult() != nil:
		return said(f.GetResult())
	default:
		return "a frame of another kind"
	}
}

// said describes a result.
func said(r *driverv1.Result) string {
	text := bus.CodeName(r.GetStatus().GetCode())
	if r.GetOutcomeUnknown() {
		text += " (outcome unknown)"
	}

	return text + quoted(r.GetStatus())
}

func saidStatus(st *driverv1.Status) string { return bus.CodeName(st.GetCode()) + quoted(st) }

func quoted(st *driverv1.Status) string {
	if st.GetMessage() == "" {
		return ""
	}

	return fmt.Sprintf(": %q", st.GetMessage())
}

// envelope addresses a body to the driver, as the manager does.
func (s *suite) envelope(id string, body *driverv1.Envelope) *driverv1.Envelope {
	body.OperationId, body.Attempt, body.Epoch, body.Owner = id, 1, s.epoch, ownerUID
	body.AcceptBy = acceptBy()
	body.Timeout = durationpb.New(s.cfg.Timeout)

	return body
}

// acceptBy is when a request gets stale: as the manager and the gateway have it.
func acceptBy() *timestamppb.Timestamp {
	const within = 2 * time.Second

	return timestamppb.New(time.Now().Add(within))
}

// subject is where a request about a machine goes: to the one replica that is
// looked at, or to a plain driver.
func (s *suite) subject(verb, name string) string {
	tree := "replica." + s.cfg.Provider + "." + s.target
	if s.plain {
		tree = "plain." + s.cfg.Provider
	}

	return s.below(tree + "." + verb + "." + s.cfg.Class.Namespace + "." + name)
}

func (s *suite) below(rest string) string { return "mcm.v1." + s.cfg.Cluster + "." + rest }

// mutation is a request for a mutation of a machine, with the terms of its claim.
func (s *suite) mutation(ctx context.Context, m *machine, id string, body *driverv1.Envelope) (request, error) {
	env := s.envelope(id, body)
	if !s.plain {
		sequence, _, err := s.record(ctx, s.claimSubject(m))
		if err != nil {
			return request{}, err
		}
		env.ClaimTerms = &driverv1.ClaimTerms{Sequence: &sequence}
	}

	return request{subject: s.subject(bus.Verb(bus.OperationOf(env)), m.GetName()), env: env}, nil
}

// late is how long a result is waited for: the replica's clock starts later.
func (s *suite) late() time.Duration { return s.cfg.Timeout + s.cfg.Patience }

// run has a mutation done and acknowledges it.
func (s *suite) run(ctx context.Context, m *machine, id string, body *driverv1.Envelope) (*driverv1.Result, error) {
	return s.attempt(ctx, m, id, body, func(*driverv1.Envelope) {})
}

// attempt is run with a changed envelope.
func (s *suite) attempt(
	ctx context.Context, m *machine, id string, body *driverv1.Envelope, change func(*driverv1.Envelope),
) (*driverv1.Result, error) {
	result, err := s.try(ctx, m, id, body, change)
	if err == nil {
		s.acknowledge(id)
	}

	return result, err
}

// try is attempt that does not acknowledge. A replica that is busy is asked again for a
// while: the operations stream may not answer at once.
func (s *suite) try(
	ctx context.Context, m *machine, id string, body *driverv1.Envelope, change func(*driverv1.Envelope),
) (*driverv1.Result, error) {
	var result *driverv1.Result
	err := s.eventually(ctx, "the replica takes a "+bus.Verb(bus.OperationOf(body)), func() (bool, error) {
		r, err := s.mutation(ctx, m, id, body)
		if err != nil {
			return false, err
		}
		change(r.env)
		x, err := s.send(r)
		if err != nil {
			return false, err
		}
		result, err = x.result(ctx, s.late())
		if _, busy := errors.AsType[*busyError](err); busy {
			return false, nil
		}

		return true, err
	})

	return result, err
}

// acknowledge lets the replica forget a result.
func (s *suite) acknowledge(id string) {
	s.control("ack", &driverv1.Envelope{
		OperationId: id, Epoch: s.epoch, Body: &driverv1.Envelope_Acknowledge{Acknowledge: &driverv1.Acknowledge{OperationId: id}},
	})
}

// control says something to the replica that is not answered.
func (s *suite) control(verb string, env *driverv1.Envelope) {
	if s.plain {
		return
	}
	if payload, err := bus.Encode(env, ""); err == nil {
		_ = s.nc.Publish(s.below("replica."+s.cfg.Provider+"."+s.target+"."+verb), payload) // a check sees what did not come
	}
}

// ops asks the replica what it holds of an operation.
func (s *suite) ops(ctx context.Context, id string, attempt uint32) (*driverv1.OpsResponse, error) {
	env := &driverv1.Envelope{
		OperationId: id, Attempt: attempt, Epoch: s.epoch,
		Body: &driverv1.Envelope_Ops{Ops: &driverv1.OpsRequest{OperationId: id}},
	}
	x, err := s.send(request{subject: s.below("replica." + s.cfg.Provider + "." + s.target + ".ops"), env: env})
	if err != nil {
		return nil, err
	}
	f, err := x.next(ctx, s.cfg.Patience)
	if err != nil {
		return nil, fmt.Errorf("ops: %w", err)
	}
	if f.GetOpsHeld() == nil {
		return nil, fmt.Errorf("ops was answered %s", describe(f))
	}

	return f.GetOpsHeld(), nil
}

// read has a read done.
func (s *suite) read(ctx context.Context, name string, body *driverv1.Envelope) (*driverv1.Result, error) {
	x, err := s.send(request{
		subject: s.subject(bus.Verb(bus.OperationOf(body)), name), env: s.envelope("read-"+nuid.Next(), body),
	})
	if err != nil {
		return nil, err
	}

	return x.result(ctx, s.late())
}
