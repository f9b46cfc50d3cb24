package driversdk

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A handler runs operations in a driver: typed on the driver's side, protobuf on
// the bus's. Each operation is a method in a file of its name.
type handler[S any] struct {
	driver  Driver[S]
	classes *classes[S]
	metrics *metrics
	replica *process
	hard    context.Context // ends at the hard stop
	verbs   map[driverv1.Operation]verb
}

// A verb does one operation. Its result is the payload, which may come with an
// error.
type verb func(ctx context.Context, c *call) (*driverv1.Result, error)

// A call is one operation on its way through a handler.
type call struct {
	ctx   context.Context // ends at the deadline, when cancelled, at the hard stop
	task  *replica.Task
	scrub scrubber
	begun atomic.Bool // something may have been changed
	log   *slog.Logger
	// What the log says of it.
	providerID string
}

func newHandler[S any](hard context.Context, driver Driver[S], classes *classes[S], m *metrics, r *process) *handler[S] {
	h := &handler[S]{driver: driver, classes: classes, metrics: m, replica: r, hard: hard}
	h.verbs = map[driverv1.Operation]verb{
		driverv1.Operation_OPERATION_CREATE: h.create,
		driverv1.Operation_OPERATION_DELETE: h.delete,
		driverv1.Operation_OPERATION_LIST:   h.list,
		// Offered by the SDK whether or not the driver has a method for them.
		driverv1.Operation_OPERATION_STATUS:   h.status,
		driverv1.Operation_OPERATION_VALIDATE: h.validate,
	}
	offer(h, driverv1.Operation_OPERATION_INITIALIZE, h.initialize)
	offer(h, driverv1.Operation_OPERATION_VOLUME_IDS, volumeIDs)
	offer(h, driverv1.Operation_OPERATION_MIGRATE_CLASS, migrateClass)
	offer(h, driverv1.Operation_OPERATION_NODE_GROUPS, nodeGroups)

	return h
}

// offer adds a verb if the driver has the further ability that the verb needs.
func offer[A, S any](h *handler[S], op driverv1.Operation, do func(context.Context, *call, A) (*driverv1.Result, error)) {
	if able, ok := h.driver.(A); ok {
		h.verbs[op] = func(ctx context.Context, c *call) (*driverv1.Result, error) { return do(ctx, c, able) }
	}
}

// capabilities are the operations the handler does, in the contract's order.
func (h *handler[S]) capabilities() []driverv1.Operation { return slices.Sorted(maps.Keys(h.verbs)) }

// Handle runs an operation. It implements [replica.Handler].
func (h *handler[S]) Handle(ctx context.Context, t *replica.Task) *driverv1.Result {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(h.hard, cancel)()
	defer h.metrics.begin(t.Operation)()
	ctx, span := h.traced(ctx, t)
	defer func() { span.End() }() // deferred itself, it would record what a panic says

	c := &call{ctx: ctx, task: t, log: h.replica.log, providerID: bus.MachineOf(t.Request).GetProviderId()}
	defer func() {
		if r := recover(); r != nil {
			fail(span, Internal)
			// The server answers it and logs it, stack included; only the SDK
			// knows what must not be in that log.
			panic(c.scrub.text(fmt.Sprint(r))) //nolint:forbidigo // it is the driver's, passed on
		}
	}()
	begun := time.Now()
	result, err := h.verbs[t.Operation](ctx, c) // the replica refuses all others than capabilities
	if result == nil {
		result = &driverv1.Result{}
	}
	if err = codedBy(ctx, err); err != nil {
		result.Status = bus.StatusOf(err)
		result.Status.Message = c.scrub.text(err.Error())
		result.OutcomeUnknown = c.outcomeUnknown(err)
	}
	fail(span, result.GetStatus().GetCode())
	c.logEnd(result.GetStatus(), time.Since(begun))

	return result
}

// request makes what a driver's method gets of an operation on a machine.
func (h *handler[S]) request(
	ctx context.Context, c *call, m *driverv1.Machine, ref *driverv1.ClassReference,
) (*Request[S], error) {
	class, err := h.class(ctx, c, ref)
	if err != nil {
		return nil, err
	}

	return &Request[S]{
		// The secret's bytes are those of the cache.
		Machine: machineOf(m), Class: class, UserData: slices.Clone(class.Secret[userDataKey]),
		OperationID: c.task.Request.GetOperationId(), Attempt: c.task.Request.GetAttempt(),
		Recover: c.task.Request.GetRecover(), Cluster: c.task.Cluster, Owner: c.task.Request.GetOwner(),
		call: c,
	}, nil
}

// checked checks a method's result against the contract. If a method that has begun
// something breaks the contract, its outcome is unknown.
func (c *call) checked(method string, i *Instance, err error) (*driverv1.Instance, error) {
	switch {
	case err == nil && i == nil:
		err = Errorf(Internal, "driver returned neither an instance nor an error from %s", method)
	case err == nil && i.ProviderID == "":
		err = Errorf(Internal, "driver returned an instance without a provider id from %s [INSTANCE-1]", method)
	default:
		return i.proto(), err
	}
	if c.begun.Load() {
		err = OutcomeUnknown(err)
	}

	return nil, err
}

func (c *call) progress(message string) { c.task.Progress(c.scrub.text(message)) }

// outcomeUnknown reports whether a failed operation may have had an effect: the driver
// says so, or its call was cut off halfway.
func (c *call) outcomeUnknown(err error) bool {
	if !bus.Mutates(c.task.Operation) {
		return false
	}
	_, said := errors.AsType[*outcomeUnknownError](err)

	return said || c.begun.Load() && c.ctx.Err() != nil
}

// logEnd says how an operation ended: what changes something and what fails is
// worth a line in production.
func (c *call) logEnd(status *driverv1.Status, took time.Duration) {
	level := slog.LevelDebug
	switch {
	case status.GetCode() != OK:
		level = slog.LevelWarn
	case bus.Mutates(c.task.Operation), bus.EditsNodeGroup(c.task.Request):
		level = slog.LevelInfo
	}
	if !c.log.Enabled(c.ctx, level) {
		return // reads are many, and their line is for debugging
	}
	attrs := append(c.attrs(),
		slog.String("code", bus.CodeName(status.GetCode())), slog.Duration("took", took.Round(time.Millisecond)))
	if c.providerID != "" {
		attrs = append(attrs, slog.String("provider_id", c.providerID))
	}
	if text := status.GetMessage(); text != "" {
		attrs = append(attrs, slog.String("err", text))
	}
	c.log.LogAttrs(c.ctx, level, "operation ended", attrs...)
}

// attrs are what every log line about the operation carries, beside the
// replica's own.
func (c *call) attrs() []slog.Attr {
	req := c.task.Request
	attrs := []slog.Attr{
		slog.String("operation", bus.Verb(c.task.Operation)),
		slog.String("operation_id", req.GetOperationId()),
		slog.Uint64("attempt", uint64(req.GetAttempt())),
		slog.String("cluster", c.task.Cluster),
	}
	if m := bus.MachineOf(req); m != nil {
		attrs = append(attrs, slog.String("machine", m.GetNamespace()+"/"+m.GetName()))
	}
	if ref := bus.ClassOf(req).GetClass(); ref != nil {
		attrs = append(attrs, slog.String("class", ref.GetNamespace()+"/"+ref.GetName()))
	}
	attrs = append(attrs, groupAttrs(req.GetNodeGroups())...)
	if span := trace.SpanContextFromContext(c.ctx); span.IsSampled() {
		attrs = append(attrs, slog.String("trace_id", span.TraceID().String()))
	}

	return attrs
}
