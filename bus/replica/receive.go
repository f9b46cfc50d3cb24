package replica

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// onRequest handles a request for any replica. It runs on the subscription's only
// goroutine and must not block.
func (s *Server) onRequest(m *nats.Msg) {
	subject, env, ok := s.decodeMessage(m)
	if !ok {
		return
	}
	s.accept(subject, env, m)
}

// onDirected handles messages for this replica alone: operations and control.
func (s *Server) onDirected(m *nats.Msg) {
	subject, env, ok := s.decodeMessage(m)
	if !ok {
		return
	}
	switch subject.Verb {
	case bus.VerbOps:
		s.onOps(subject, env, m)
	case bus.VerbCancel:
		s.onCancel(subject, env)
	case bus.VerbAcknowledge:
		s.onAcknowledge(subject, env)
	default:
		s.accept(subject, env, m)
	}
}

// decodeMessage decodes a message. It drops a message whose reply subject is outside the
// provider's reply tree.
func (s *Server) decodeMessage(m *nats.Msg) (bus.Subject, *driverv1.Envelope, bool) {
	subject, err := bus.ParseSubject(m.Subject)
	if err != nil {
		s.dropMessage("not a machinebus subject", "subject", m.Subject, "err", err)

		return subject, nil, false
	}
	if m.Reply != "" && !strings.HasPrefix(m.Reply, s.replies[subject.Cluster]) {
		s.dropMessage("reply subject outside of the provider's reply tree", "subject", m.Subject, "reply", m.Reply)

		return subject, nil, false
	}
	env, err := bus.DecodeMessage(m)
	if err != nil {
		s.dropMessage("payload is not an envelope", "subject", m.Subject, "err", err)
		if m.Reply != "" { // a person may use `nats request`
			_ = s.out.sendTo(m.Reply, bus.ContentTypeOf(m), "", 0, // it is logged
				bus.ResultFrame(bus.Failure(driverv1.Code_CODE_INVALID_ARGUMENT, "payload is not an envelope: "+err.Error())))
		}

		return subject, nil, false
	}

	return subject, env, true
}

func (s *Server) dropMessage(why string, args ...any) {
	s.stats.dropped.Add(1)
	s.log.Warn("message dropped: "+why, args...)
}

// accept refuses a request, attaches it to a known operation, or runs it.
func (s *Server) accept(subject bus.Subject, env *driverv1.Envelope, m *nats.Msg) {
	op := &operation{
		cluster: subject.Cluster, id: env.GetOperationId(), operation: bus.OperationOf(env), request: env, lane: laneOf(env),
		machine: bus.MachineOf(env).GetUid(), namespace: subject.Namespace, name: subject.Name,
		started: time.Now(), reply: m.Reply, contentType: bus.ContentTypeOf(m), attempt: env.GetAttempt(),
		traceParent: bus.TraceParentOf(m), cancel: func() {}, earlierMayRun: env.GetEarlierMayRun(),
	}
	if m.Reply == "" {
		s.dropMessage("request without a reply subject", "subject", m.Subject)

		return
	}
	if refusal := s.check(op, subject); refusal != nil {
		refusal.OutcomeUnknown = refusal.GetOutcomeUnknown() || op.recoversCreate()
		refusal.NoEffect = refusal.GetOutcomeUnknown()
		s.stats.refused(endpoint{op.cluster, op.operation})
		s.out.send(op, bus.ResultFrame(refusal))

		return
	}
	if (bus.Mutates(op.operation) || bus.EditsNodeGroup(env)) && s.isStale(op) {
		s.out.sendBusy(op, driverv1.BusyReason_BUSY_REASON_STALE.Enum())

		return
	}
	s.start(op)
}

// check returns why a request cannot be served at all, or nil. It names the claim of a
// mutation.
func (s *Server) check(op *operation, subject bus.Subject) *driverv1.Result {
	verb, mutates := bus.RequestVerb(op.request), bus.Mutates(op.operation)
	// Some verbs of node groups have the names of operations.
	aboutGroups := op.operation == driverv1.Operation_OPERATION_NODE_GROUPS
	switch {
	case verb == "" || !slices.Contains(s.cfg.Capabilities, op.operation):
		return bus.Failure(driverv1.Code_CODE_UNIMPLEMENTED,
			fmt.Sprintf("driver of provider %s does not implement %s", s.cfg.Provider, subject.Verb))
	case subject.Verb != verb || (subject.Tree == bus.TreeNodeGroup) != aboutGroups: // NATS permissions go by subjects, so they must name the request
		return bus.Failure(driverv1.Code_CODE_INVALID_ARGUMENT,
			fmt.Sprintf("the subject names %s (%s), but the envelope holds %s (%s)", subject.Verb, subject.Tree, verb, bus.Verb(op.operation)))
	case op.id == "":
		return bus.Failure(driverv1.Code_CODE_INVALID_ARGUMENT, "request without an operation id")
	case op.contentType == bus.ContentTypeJSON && (mutates || bus.EditsNodeGroup(op.request)):
		return bus.Failure(driverv1.Code_CODE_INVALID_ARGUMENT, "JSON is accepted only for operations that change nothing")
	case !mutates:
		return nil
	case op.machine == "":
		return bus.Failure(driverv1.Code_CODE_INVALID_ARGUMENT, bus.Verb(op.operation)+" without a machine uid")
	}
	var err error
	if op.claimSubject, err = opstream.ClaimSubject(op.cluster, s.cfg.Provider, op.machine); err != nil {
		return bus.Failure(driverv1.Code_CODE_INVALID_ARGUMENT, bus.Verb(op.operation)+": the machine's uid: "+err.Error())
	}
	if op.request.GetClaimTerms() == nil {
		return bus.Failure(driverv1.Code_CODE_INVALID_ARGUMENT, bus.Verb(op.operation)+" without claim_terms [CLAIM-6]")
	}
	if highest, leads := s.managers.mayLead(op.cluster, op.request.GetEpoch()); !leads {
		refusal := bus.Failure(driverv1.Code_CODE_ABORTED,
			fmt.Sprintf("request of epoch %d, but a manager of epoch %d leads", op.request.GetEpoch(), highest))
		refusal.OutcomeUnknown = true // the leading manager may run the operation

		return refusal
	}

	return nil
}

// isStale reports whether a request came after its accept_by [ENV-8].
func (s *Server) isStale(op *operation) bool {
	by := op.request.GetAcceptBy()
	if !by.IsValid() || !op.started.After(by.AsTime()) {
		return false
	}
	s.log.Warn("request refused as stale: accept_by has passed; if this repeats, compare the clock of this machine with mcm's",
		"operation_id", op.id, "attempt", op.attempt, "late", op.started.Sub(by.AsTime()).Round(time.Millisecond))

	return true
}

// start runs an operation, if there is room for it. If the replica has it already, the
// caller is attached to it or gets its result again.
func (s *Server) start(op *operation) {
	known, ctx, why := s.ops.admit(op, s.managers.refuses(op.cluster))
	switch {
	case why != nil:
		s.out.sendBusy(op, why)
	case known != nil:
		s.out.resend(known)
	case ctx == nil: // attached: the answer comes once the claim is written
	case bus.Mutates(op.operation):
		go s.worker.claimAndRun(ctx, op)
	default:
		s.worker.waiting.add(ctx, op)
		go s.worker.runReads()
	}
}

// isOutdatedBy reports whether a request is for a later attempt that this operation cannot
// answer. Either the request names a claim of an attempt at another replica, or an attempt
// in between may run, about which this operation's failure says nothing.
func (op *operation) isOutdatedBy(request *operation) bool {
	if request.attempt <= op.attempt {
		return false
	}
	terms := request.request.GetClaimTerms()

	// The records between our first and our last were ours.
	other := terms.Sequence != nil && (terms.GetSequence() < op.firstClaim || terms.GetSequence() > op.claim)

	return !op.claiming && other || op.failed() && request.earlierMayRun
}

// failed reports whether the operation has failed.
func (op *operation) failed() bool { return op.result.GetStatus().GetCode() != driverv1.Code_CODE_OK }

// onOps answers with this replica's operations, or with the one asked for and its result
// [OPS-1].
func (s *Server) onOps(subject bus.Subject, env *driverv1.Envelope, m *nats.Msg) {
	if m.Reply == "" {
		return
	}
	answer := s.ops.answerOps(subject.Cluster, env.GetOps().GetOperationId(), env.GetAttempt(), time.Now())
	_ = s.out.sendTo(m.Reply, bus.ContentTypeOf(m), env.GetOperationId(), env.GetAttempt(), // it is logged
		&driverv1.Envelope{Body: &driverv1.Envelope_OpsHeld{OpsHeld: answer}})
}

func (s *Server) onCancel(subject bus.Subject, env *driverv1.Envelope) {
	if env.GetEpoch() >= s.managers.epoch(subject.Cluster) {
		s.ops.cancel(subject.Cluster + "/" + env.GetCancel().GetOperationId())
	}
}

func (s *Server) onAcknowledge(subject bus.Subject, env *driverv1.Envelope) {
	s.ops.acknowledge(subject.Cluster + "/" + env.GetAcknowledge().GetOperationId())
}

// onHello handles a hello on a cluster's subject. That cluster counts: a manager of one
// control plane must not raise the epoch of another.
func (s *Server) onHello(cluster string, m *nats.Msg) {
	env, err := bus.DecodeMessage(m)
	if err != nil || env.GetHello() == nil {
		s.dropMessage("message on the hello subject holds no Hello", "err", err)

		return
	}
	hello := env.GetHello()
	if s.managers.noteHello(cluster, hello) {
		s.log.Info("a new manager leads", "cluster", cluster, "mcm", hello.GetMcm(), "epoch", hello.GetEpoch())
		s.beat.renewNow()
	}
}

func (s *Server) onChanged(cluster string, m *nats.Msg) {
	env, err := bus.DecodeMessage(m)
	if err != nil || env.GetChanged() == nil {
		s.dropMessage("message on the changed subject holds no Changed", "err", err)

		return
	}
	if s.cfg.OnChanged != nil {
		s.cfg.OnChanged(cluster, env.GetChanged())
	}
}
