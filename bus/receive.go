package bus

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// onRequest takes a request for any replica. It runs on the subscription's one
// goroutine and must not block.
func (s *Server) onRequest(m *nats.Msg) {
	subject, env, ok := s.open(m)
	if !ok {
		return
	}
	s.accept(subject, env, m)
}

// onDirected takes what is for this replica alone: operations and control.
func (s *Server) onDirected(m *nats.Msg) {
	subject, env, ok := s.open(m)
	if !ok {
		return
	}
	switch subject.Verb {
	case verbOps:
		s.onOps(subject, env, m)
	case verbCancel:
		s.onCancel(subject, env)
	case verbAck:
		s.onAcknowledge(subject, env)
	default:
		s.accept(subject, env, m)
	}
}

// open decodes a message, and drops what could only be answered by publishing
// where this provider has no business.
func (s *Server) open(m *nats.Msg) (Subject, *driverv1.Envelope, bool) {
	subject, err := ParseSubject(m.Subject)
	if err != nil {
		s.drop("not a subject of ours", "subject", m.Subject, "err", err)

		return subject, nil, false
	}
	if m.Reply != "" && !strings.HasPrefix(m.Reply, s.replies[subject.Cluster]) {
		s.drop("reply subject outside of the provider's reply tree", "subject", m.Subject, "reply", m.Reply)

		return subject, nil, false
	}
	env, err := decodeMsg(m)
	if err != nil {
		s.drop("payload is no envelope", "subject", m.Subject, "err", err)
		if m.Reply != "" { // people try things out with `nats request`
			_ = s.sendTo(m.Reply, contentTypeOf(m), "", 0, // it is logged
				resultFrame(failure(driverv1.Code_CODE_INVALID_ARGUMENT, "payload is no envelope: "+err.Error())))
		}

		return subject, nil, false
	}

	return subject, env, true
}

func (s *Server) drop(why string, args ...any) {
	s.stats.dropped.Add(1)
	s.log.Warn("message dropped: "+why, args...)
}

// accept decides about a request: refuse it, attach to what runs already, or
// run it.
func (s *Server) accept(subject Subject, env *driverv1.Envelope, m *nats.Msg) {
	op := OperationOf(env)
	h := &held{
		cluster: subject.Cluster, id: env.GetOperationId(), operation: op, request: env,
		machine: MachineOf(env).GetUid(), namespace: subject.Namespace, name: subject.Name,
		started: time.Now(), reply: m.Reply, contentType: contentTypeOf(m), attempt: env.GetAttempt(),
		traceParent: traceParentOf(m), cancel: func() {}, earlierMayRun: env.GetEarlierMayRun(),
	}
	if m.Reply == "" {
		s.drop("request without a reply subject", "subject", m.Subject)

		return
	}
	if refusal := s.check(h, subject); refusal != nil {
		refusal.OutcomeUnknown = refusal.GetOutcomeUnknown() || h.recovers()
		refusal.NoEffect = refusal.GetOutcomeUnknown()
		s.stats.refused(endpoint{h.cluster, op})
		s.send(h, resultFrame(refusal))

		return
	}
	if Mutates(op) {
		s.acceptMutation(h)

		return
	}
	s.acceptRead(h)
}

func (s *Server) acceptRead(h *held) {
	var ctx context.Context
	refusal := driverv1.BusyReason_BUSY_REASON_UNSPECIFIED
	s.mu.Lock()
	switch {
	case s.strange[h.cluster] != nil:
		refusal = driverv1.BusyReason_BUSY_REASON_PROTOCOL
	case s.draining:
		refusal = driverv1.BusyReason_BUSY_REASON_DRAINING
	case len(s.reads) >= s.cfg.Slots:
		refusal = driverv1.BusyReason_BUSY_REASON_SLOTS
	default:
		s.reads[h] = struct{}{}
		ctx = s.begin(h)
	}
	s.mu.Unlock()
	if ctx == nil {
		s.send(h, s.busyFrame(refusal))

		return
	}
	s.begunReads.add(ctx, h)
	go s.runReads()
}

// check returns why a request cannot be served at all, or nil.
func (s *Server) check(h *held, subject Subject) *driverv1.Result {
	if h.operation == driverv1.Operation_OPERATION_UNSPECIFIED || !slices.Contains(s.cfg.Capabilities, h.operation) {
		return failure(driverv1.Code_CODE_UNIMPLEMENTED,
			fmt.Sprintf("driver of provider %s does not implement %s", s.cfg.Provider, subject.Verb))
	}
	if subject.Verb != Verb(h.operation) {
		return failure(driverv1.Code_CODE_INVALID_ARGUMENT,
			fmt.Sprintf("subject says %s, envelope says %s", subject.Verb, Verb(h.operation)))
	}
	if h.id == "" {
		return failure(driverv1.Code_CODE_INVALID_ARGUMENT, "request without an operation id")
	}
	if !Mutates(h.operation) {
		return nil
	}
	if h.contentType == contentTypeJSON {
		return failure(driverv1.Code_CODE_INVALID_ARGUMENT, "JSON is accepted for operations that change nothing")
	}
	if h.machine == "" {
		return failure(driverv1.Code_CODE_INVALID_ARGUMENT, Verb(h.operation)+" without a machine uid")
	}
	if _, err := claimSubject(h.cluster, s.cfg.Provider, h.machine); err != nil {
		return failure(driverv1.Code_CODE_INVALID_ARGUMENT, Verb(h.operation)+": the machine's uid: "+err.Error())
	}
	if h.request.GetClaimTerms() == nil {
		return failure(driverv1.Code_CODE_INVALID_ARGUMENT, Verb(h.operation)+" without terms for its claim [CLAIM-6]")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if highest := s.epochs[h.cluster]; h.request.GetEpoch() < highest {
		refusal := failure(driverv1.Code_CODE_ABORTED,
			fmt.Sprintf("request of epoch %d, but epoch %d leads", h.request.GetEpoch(), highest))
		refusal.OutcomeUnknown = true // who leads may have it done

		return refusal
	}
	s.epochs[h.cluster] = h.request.GetEpoch()

	return nil
}

// stale tells that a request came too late to be taken [ENV-8].
func (s *Server) stale(h *held) bool {
	by := h.request.GetAcceptBy()
	if !by.IsValid() || !h.started.After(by.AsTime()) {
		return false
	}
	s.log.Warn("request refused: it was to be accepted earlier; if that is so for all of them, compare this machine's clock with mcm's",
		"operation_id", h.id, "attempt", h.attempt, "late", h.started.Sub(by.AsTime()).Round(time.Millisecond))

	return true
}

// acceptMutation runs a mutation, unless this replica has it already: then the
// asker is attached to the running one, or gets its result again.
func (s *Server) acceptMutation(h *held) {
	if s.stale(h) {
		s.send(h, s.busyFrame(driverv1.BusyReason_BUSY_REASON_STALE))

		return
	}
	s.mu.Lock()
	if answer := s.attach(h); answer != nil {
		s.mu.Unlock()
		answer()

		return
	}
	var ctx context.Context
	var refusal driverv1.BusyReason
	switch {
	case s.denials.covers(h):
		// Left unspecified: it says only that nothing was done.
	case s.strange[h.cluster] != nil:
		refusal = driverv1.BusyReason_BUSY_REASON_PROTOCOL
	case s.draining:
		refusal = driverv1.BusyReason_BUSY_REASON_DRAINING
	case s.machines[h.machineKey()] != nil:
		refusal = driverv1.BusyReason_BUSY_REASON_MACHINE
		if s.machines[h.machineKey()].stuck {
			refusal = driverv1.BusyReason_BUSY_REASON_STUCK
		}
	case s.taken(h.operation) >= s.cfg.Slots:
		refusal = driverv1.BusyReason_BUSY_REASON_SLOTS
	default:
		h.claiming = true
		s.occupy(h.operation, 1)
		s.held[h.key()] = h
		s.machines[h.machineKey()] = h
		ctx = s.begin(h)
	}
	s.mu.Unlock()
	if ctx == nil {
		s.send(h, s.busyFrame(refusal))

		return
	}
	go s.claimAndRun(ctx, h)
}

// occupy counts a mutation that begins, or with -1 one that has ended. Server.mu is
// held.
func (s *Server) occupy(op driverv1.Operation, by int) {
	s.running += by
	if op == driverv1.Operation_OPERATION_DELETE {
		s.deleting += by
	}
}

// taken is how many of the slots that an operation could have are not free.
// Server.mu is held.
func (s *Server) taken(op driverv1.Operation) int {
	if op == driverv1.Operation_OPERATION_DELETE {
		return s.deleting
	}

	return s.running - s.deleting
}

// attach has the frames of an operation that is here already go to who asks for
// it now, and returns how to answer; nil when it is not here, or no longer counts.
// Server.mu is held.
func (s *Server) attach(h *held) (answer func()) {
	known, ok := s.held[h.key()]
	if !ok || known.outdated(h) {
		if ok && known.result != nil {
			delete(s.held, known.key()) // what another attempt has superseded is no answer
		}

		return nil
	}
	known.reply, known.contentType, known.attempt = h.reply, h.contentType, h.attempt
	known.earlierMayRun = known.earlierMayRun || h.earlierMayRun
	known.askedAgain = known.askedAgain || !known.stored
	claiming := known.claiming
	known.answered = !claiming // until it is accepted

	return func() {
		if claiming {
			return // it is said in a moment
		}
		s.send(known, acceptedFrame())
		s.mu.Lock()
		known.answered = false
		result := known.result
		s.mu.Unlock()
		if result != nil {
			s.send(known, resultFrame(result))
		}
	}
}

// outdated reports whether a request is for a later attempt, and either names another
// claim than those of this operation, as an attempt made elsewhere meanwhile has taken
// their place, or asks about such an attempt, of which an earlier failure says nothing.
func (h *held) outdated(request *held) bool {
	if request.attempt <= h.attempt {
		return false
	}
	terms := request.request.GetClaimTerms()

	// What stood there between the first and the last record of ours was ours.
	other := terms.Sequence != nil && (terms.GetSequence() < h.firstClaim || terms.GetSequence() > h.claim)

	return !h.claiming && other || h.failed() && request.earlierMayRun
}

// failed tells that the operation has ended so.
func (h *held) failed() bool { return h.result.GetStatus().GetCode() != driverv1.Code_CODE_OK }

func (s *Server) busyFrame(why driverv1.BusyReason) *driverv1.Envelope {
	s.stats.busy.Add(1)

	return &driverv1.Envelope{Body: &driverv1.Envelope_Busy{Busy: &driverv1.Busy{Reason: why}}}
}

// onOps tells what this replica holds, and the result of the one operation
// asked for [OPS-1].
func (s *Server) onOps(subject Subject, env *driverv1.Envelope, m *nats.Msg) {
	if m.Reply == "" {
		return
	}
	answer := s.holds(subject.Cluster, env.GetOps().GetOperationId(), env.GetAttempt(), time.Now())
	_ = s.sendTo(m.Reply, contentTypeOf(m), env.GetOperationId(), env.GetAttempt(), // it is logged
		&driverv1.Envelope{Body: &driverv1.Envelope_OpsHeld{OpsHeld: answer}})
}

// holds tells what this replica has of a control plane's operations, or of the one
// that it wants to know of. What it does not have then it will not take.
func (s *Server) holds(cluster, want string, attempt uint32, now time.Time) *driverv1.OpsResponse {
	answer, denied := &driverv1.OpsResponse{}, true
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.held {
		if h.cluster != cluster || want != "" && want != h.id {
			continue
		}
		st := h.state(now)
		answer.Operations = append(answer.Operations, st)
		denied = denied && st.GetFenced() // mcm goes on from it as from what is not here
		if want != "" && h.counts() {
			answer.Result = h.result
		}
	}
	if want == "" {
		answer.Operations = append(answer.Operations, s.stuckStates(cluster, now)...)
	}
	if want != "" && denied && attempt > 0 {
		s.denials.add(cluster+"/"+want, attempt, now)
	}

	return answer
}

func (s *Server) onCancel(subject Subject, env *driverv1.Envelope) {
	id := env.GetCancel().GetOperationId()
	s.mu.Lock()
	defer s.mu.Unlock()
	if env.GetEpoch() < s.epochs[subject.Cluster] {
		return
	}
	h, ok := s.held[subject.Cluster+"/"+id]
	switch {
	case !ok || h.result != nil:
	case h.begun:
		s.log.Info("cancel comes too late: the provider is at it", "operation_id", id)
	default:
		s.log.Info("cancelling on request", "operation_id", id)
		h.cancel()
	}
}

func (s *Server) onAcknowledge(subject Subject, env *driverv1.Envelope) {
	key := subject.Cluster + "/" + env.GetAcknowledge().GetOperationId()
	s.mu.Lock()
	h, ok := s.held[key]
	switch {
	case !ok || h.result == nil:
	case !h.stored:
		h.known = true // it goes once its claim has ended, too: nobody else would end that
	default:
		delete(s.held, key)
	}
	s.mu.Unlock()
	signal(s.acked)
}

func (s *Server) onHello(m *nats.Msg) {
	subject, err := ParseSubject(m.Subject)
	if err != nil {
		return
	}
	env, err := decodeMsg(m)
	if err != nil || env.GetHello() == nil {
		s.drop("hello is no hello", "err", err)

		return
	}
	hello := env.GetHello()
	// The subject's word counts: who may speak for one control plane must not
	// raise another's epoch.
	cluster := subject.Cluster
	s.mu.Lock()
	news := s.leaders[cluster] != hello.GetMcm()
	s.leaders[cluster] = hello.GetMcm()
	if hello.GetEpoch() >= s.epochs[cluster] { // else it does not lead any more
		s.understand(cluster, hello)
	}
	s.epochs[cluster] = max(s.epochs[cluster], hello.GetEpoch())
	s.mu.Unlock()
	if news {
		s.log.Info("a manager leads", "cluster", cluster, "mcm", hello.GetMcm(), "epoch", hello.GetEpoch())
		s.renewNow()
	}
}

// understand notes whether a manager that leads speaks a version of the protocol that
// this replica speaks. Server.mu is held.
func (s *Server) understand(cluster string, hello *driverv1.Hello) {
	before, now := s.strange[cluster], s.protocols.refusesHello(hello)
	switch {
	case now == nil && before != nil:
		delete(s.strange, cluster)
		s.log.Info("work is taken again: the manager that leads speaks the protocol", "cluster", cluster, "mcm", hello.GetMcm())
	case now != nil:
		s.strange[cluster] = now
		if before == nil || before.Error() != now.Error() {
			s.log.Error("no work is taken", "cluster", cluster, "err", now)
		}
	}
}

func (s *Server) onChanged(m *nats.Msg) {
	subject, err := ParseSubject(m.Subject)
	if err != nil {
		return
	}
	env, err := decodeMsg(m)
	if err != nil || env.GetChanged() == nil {
		s.drop("notice of a change is none", "err", err)

		return
	}
	if s.cfg.OnChanged != nil {
		s.cfg.OnChanged(subject.Cluster, env.GetChanged())
	}
}
