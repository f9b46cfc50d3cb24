package bench

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Change changes a request from what the manager would send.
type Change func(*driverv1.Envelope)

// A Frame is one reply.
type Frame struct {
	*driverv1.Envelope

	ContentType string
	// Empty: it has no payload.
	Empty        bool
	noResponders bool // the server says so: no subscriber is there
}

// An Exchange is one request and the frames that came to its reply subject.
type Exchange struct {
	// Attempt is the one that the request says.
	Attempt uint32

	c       *Check
	verb    string
	id      string
	mutates bool
	loose   bool // it was malformed: frames need not name the operation
	frames  chan Frame

	// Guarded by Bench.mu.
	came              int
	accepted, results int
	moved             bool // its result may go elsewhere
	misnumbered       bool // a frame said another attempt
}

// A Request is what to send. The zero value of a field means what the manager would send.
type Request struct {
	Subject string
	Env     *driverv1.Envelope
	JSON    bool
	Payload []byte // instead of Env
	Reply   string
}

// framesKept is more frames than any exchange has.
const framesKept = 256

// Send publishes a request.
func (c *Check) Send(r Request) *Exchange {
	op := bus.OperationOf(r.Env)
	x := &Exchange{
		c: c, verb: bus.Verb(op), id: r.Env.GetOperationId(), Attempt: r.Env.GetAttempt(),
		mutates: bus.Mutates(op), loose: r.Env == nil, frames: make(chan Frame, framesKept),
	}
	m := &nats.Msg{Subject: r.Subject, Data: r.Payload, Reply: r.Reply}
	if r.JSON {
		m.Header = nats.Header{bus.HeaderContentType: {bus.ContentTypeJSON}}
	}
	if m.Data == nil {
		m.Data = c.Encode(r.Env, m.Header.Get(bus.HeaderContentType))
	}
	if m.Reply == "" {
		m.Reply = c.NewReply()
	}
	c.mu.Lock()
	if x.mutates {
		for _, other := range c.exchanges {
			other.moved = other.moved || other.id == x.id
		}
	}
	c.exchanges[m.Reply] = x
	if op == Create && c.Plain { // it does not say that it has taken it
		c.unclear[attempt{x.id, x.Attempt}] = true
	}
	c.mu.Unlock()
	c.Publish(m)

	return x
}

// NewReply makes up a reply subject.
func (b *Bench) NewReply() string { return b.replies + nuid.Next() }

// Encode returns an envelope as it is sent with a content type.
func (c *Check) Encode(env *driverv1.Envelope, contentType string) []byte {
	data, err := bus.Encode(env, contentType)
	c.Must(err)

	return data
}

// onReply runs on the subscription's goroutine.
func (b *Bench) onReply(m *nats.Msg) {
	b.mu.Lock()
	x := b.exchanges[m.Subject]
	b.mu.Unlock()
	if x == nil {
		return
	}
	f := Frame{ContentType: m.Header.Get(bus.HeaderContentType), Empty: len(m.Data) == 0, noResponders: bus.IsNoResponders(m)}
	if !f.noResponders {
		env, err := bus.Decode(m.Data, f.ContentType)
		if err != nil {
			b.Blamef("ENV-3", "a frame of %s is not an envelope: %v", x.verb, err)

			return
		}
		f.Envelope = env
		b.examine(x, m, f)
	}
	select {
	case x.frames <- f:
	default: // a driver that sends hundreds of frames has been seen enough
	}
}

// Next waits for the next frame, and reports whether one came within the limit.
func (x *Exchange) Next(limit time.Duration) (Frame, bool) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case f := <-x.frames:
		if f.noResponders {
			x.c.Failf("%s: no subscriber is on its subject", x.verb)
		}

		return f, true
	case <-timer.C:
	case <-x.c.ctx.Done():
		x.c.Must(context.Cause(x.c.ctx))
	}

	return Frame{}, false
}

// Until returns the first frame that is wanted. It fails if no frame comes within the limit after the one before.
func (x *Exchange) Until(limit time.Duration, wanted func(Frame) bool) Frame {
	for {
		f, ok := x.Next(limit)
		if !ok {
			x.c.Failf("%s: no frame within %s", x.verb, limit)
		}
		if wanted(f) {
			return f
		}
	}
}

func ends(f Frame) bool { return f.GetResult() != nil || f.GetBusy() != nil }

// First returns the first frame that is no progress, and reports whether it came within the limit.
func (x *Exchange) First(limit time.Duration) (Frame, bool) {
	for {
		if f, ok := x.Next(limit); !ok || f.GetProgress() == nil {
			return f, ok
		}
	}
}

// Answer is the first frame that is no progress, which has to come at once.
func (x *Exchange) Answer() Frame {
	return x.Until(x.c.Patience, func(f Frame) bool { return f.GetProgress() == nil })
}

// Result waits for the result, and fails if the replica is busy.
func (x *Exchange) Result() *driverv1.Result { return x.ResultWithin(x.c.Late()) }

// ResultWithin is Result with another limit than the operation's timeout.
func (x *Exchange) ResultWithin(limit time.Duration) *driverv1.Result {
	f := x.Until(limit, ends)
	if f.GetResult() == nil {
		x.c.Failf("%s was answered %s", x.verb, f)
	}

	return f.GetResult()
}

// Settled is Result, but returns nil if the replica is busy.
func (x *Exchange) Settled() *driverv1.Result { return x.Until(x.c.Late(), ends).GetResult() }

// Taken reports whether the request was accepted; false means busy. It fails if the first frame is another.
func (x *Exchange) Taken() bool {
	f := x.Answer()
	if f.GetAccepted() == nil && f.GetBusy() == nil {
		x.c.Failf("%s was answered %s instead of accepted", x.verb, f)
	}

	return f.GetBusy() == nil
}

// A Want is what a frame has to be.
type Want struct {
	text string
	is   func(Frame) bool
}

// Accepted wants a frame that says so.
var Accepted = Want{"accepted", func(f Frame) bool { return f.GetAccepted() != nil }}

// Busy wants a frame that says busy, for any of these reasons; none means any.
func Busy(reasons ...driverv1.BusyReason) Want {
	return Want{fmt.Sprintf("busy %v", reasons), func(f Frame) bool {
		return f.GetBusy() != nil && (len(reasons) == 0 || slices.Contains(reasons, f.GetBusy().GetReason()))
	}}
}

// Code wants a result with this code.
func Code(code driverv1.Code) Want {
	return Want{bus.CodeName(code), func(f Frame) bool { return f.GetResult() != nil && f.GetResult().GetStatus().GetCode() == code }}
}

// Want fails unless the first frame is as wanted; what describes the request.
func (x *Exchange) Want(what string, want Want) {
	if f := x.Answer(); !want.is(f) {
		x.c.Failf("%s was answered %s, not %s", what, f, want.text)
	}
}

// NeedsNone has no result demanded of the exchange.
func (x *Exchange) NeedsNone() {
	x.c.mu.Lock()
	defer x.c.mu.Unlock()
	x.moved = true
}

// Tally returns how many frames and results have come, and whether a frame said another attempt.
func (x *Exchange) Tally() (frames, results int, misnumbered bool) {
	x.c.mu.Lock()
	defer x.c.mu.Unlock()

	return x.came, x.results, x.misnumbered
}

// Waiting returns how many frames have come that were not read.
func (x *Exchange) Waiting() int { return len(x.frames) }

// Unfinished names the accepted requests that got no result.
func (b *Bench) Unfinished() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var all []string
	for _, x := range b.exchanges {
		if x.accepted > 0 && x.results == 0 && !x.moved {
			all = append(all, x.verb+" ("+x.id+")")
		}
	}

	return all
}

// String describes a frame.
func (f Frame) String() string {
	switch {
	case f.GetAccepted() != nil:
		return "accepted"
	case f.GetProgress() != nil:
		return "progress"
	case f.GetBusy() != nil:
		return "busy (" + f.GetBusy().GetReason().String() + ")"
	case f.GetResult() != nil:
		return Said(f.GetResult())
	default:
		return "a frame of another kind"
	}
}

// Said describes a result.
func Said(r *driverv1.Result) string {
	text := SaidStatus(r.GetStatus())
	if r.GetOutcomeUnknown() {
		text = "outcome unknown, " + text
	}

	return text
}

// SaidStatus describes a status.
func SaidStatus(st *driverv1.Status) string {
	if st.GetMessage() == "" {
		return bus.CodeName(st.GetCode())
	}

	return fmt.Sprintf("%s: %q", bus.CodeName(st.GetCode()), st.GetMessage())
}

// Envelope addresses a body to the driver, as the manager does.
func (b *Bench) Envelope(id string, body *driverv1.Envelope) *driverv1.Envelope {
	body.OperationId, body.Attempt, body.Epoch, body.Owner = id, 1, b.Epoch, OwnerUID
	body.AcceptBy, body.Timeout = timestamppb.New(time.Now().Add(bus.AcceptBy)), durationpb.New(b.Timeout)

	return body
}

// Late is how long a result is waited for: the replica's clock starts later.
func (b *Bench) Late() time.Duration { return b.Timeout + b.Patience }

// ListRequest asks for the instances of the class.
func (b *Bench) ListRequest() Request {
	return b.readRequest(b.Class.Name, &driverv1.Envelope{
		Body: &driverv1.Envelope_List{List: &driverv1.ListRequest{Class: b.Fetches.Refs()}},
	})
}

func (b *Bench) readRequest(name string, body *driverv1.Envelope) Request {
	return Request{Subject: b.Subject(bus.Verb(bus.OperationOf(body)), name), Env: b.Envelope("read-"+nuid.Next(), body)}
}

// Read has a read about the class done. A driver that does not implement it ends the check.
func (c *Check) Read(body *driverv1.Envelope) *driverv1.Result {
	return c.optional(bus.OperationOf(body), func() *driverv1.Result { return c.Send(c.readRequest(c.Class.Name, body)).Result() })
}

// ListResult asks for the instances of the class.
func (c *Check) ListResult() *driverv1.Result { return c.Send(c.ListRequest()).Result() }

// List returns the instances of the class.
func (c *Check) List() []*driverv1.Instance {
	result := c.ListResult()
	c.Want(driverv1.Code_CODE_OK, "list", result)

	return result.GetList().GetInstances()
}

// ListWhenFree is List, but waits while the replica is busy.
func (c *Check) ListWhenFree() {
	c.Eventually("the replica has a slot for a list", func() bool {
		result := c.Send(c.ListRequest()).Settled()
		c.Want(driverv1.Code_CODE_OK, "list", result)

		return result != nil
	})
}

// Ops asks the replica what it holds of an operation.
func (c *Check) Ops(id string, attempt uint32) *driverv1.OpsResponse {
	x := c.Send(Request{Subject: c.Below("replica." + c.Provider + "." + c.Target + ".ops"), Env: &driverv1.Envelope{
		OperationId: id, Attempt: attempt, Epoch: c.Epoch,
		Body: &driverv1.Envelope_Ops{Ops: &driverv1.OpsRequest{OperationId: id}},
	}})
	f := x.Until(c.Patience, func(Frame) bool { return true })
	if f.GetOpsHeld() == nil {
		c.Failf("ops was answered %s", f)
	}

	return f.GetOpsHeld()
}
