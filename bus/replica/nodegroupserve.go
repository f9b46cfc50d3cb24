package replica

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

// A NodeGroupHandler answers a request about node groups: its answer needs a
// status, if it is none of success, and a body. It is called from many goroutines
// and must return when ctx ends; it may panic, which is answered as an internal
// error.
type NodeGroupHandler func(ctx context.Context, cluster string, req *nodegroupv1.Envelope) *nodegroupv1.Envelope

// withNodeGroups returns capabilities that say whether node groups are served.
func withNodeGroups(capabilities []driverv1.Operation, h NodeGroupHandler) []driverv1.Operation {
	out := slices.DeleteFunc(slices.Clone(capabilities), func(op driverv1.Operation) bool {
		return op == driverv1.Operation_OPERATION_NODE_GROUPS
	})
	if h != nil {
		out = append(out, driverv1.Operation_OPERATION_NODE_GROUPS)
	}

	return out
}

func (s *Server) onNodeGroup(m *nats.Msg) {
	received := time.Now()
	subject, err := bus.ParseSubject(m.Subject)
	if err != nil {
		s.drop("not a subject of ours", "subject", m.Subject, "err", err)

		return
	}
	if !strings.HasPrefix(m.Reply, s.replies[subject.Cluster]) {
		s.drop("reply subject outside of the provider's reply tree", "subject", m.Subject, "reply", m.Reply)

		return
	}
	req := &nodegroupv1.Envelope{}
	if err := proto.Unmarshal(m.Data, req); err != nil || req.GetRequestId() == "" {
		s.drop("payload is no request about node groups", "subject", m.Subject, "err", err)

		return
	}
	if refusal := checkNodeGroup(req, subject, received); refusal != nil {
		s.stats.refused(endpoint{subject.Cluster, driverv1.Operation_OPERATION_NODE_GROUPS})
		s.answerNodeGroup(m.Reply, req, &nodegroupv1.Envelope{Status: bus.StatusOf(refusal)})

		return
	}
	// Each kind has as many slots: a gateway that looks at many groups keeps none of
	// them from being changed.
	running := &s.groupReads
	if _, changes := bus.NodeGroupVerb(req); changes {
		running = &s.groupEdits
	}
	s.ops.mu.Lock()
	refused := s.ops.draining || s.managers.strange[subject.Cluster] != nil || *running >= s.cfg.Slots
	if !refused {
		*running++
		s.ops.tasks.Go(func() { s.runNodeGroup(subject.Cluster, m.Reply, req, running) })
	}
	s.ops.mu.Unlock()
	if refused {
		s.stats.busy.Add(1)
		s.answerNodeGroup(m.Reply, req, &nodegroupv1.Envelope{Refused: true, Status: &driverv1.Status{
			Code: driverv1.Code_CODE_UNAVAILABLE, Message: "this replica has no slot, is about to stop, or speaks another version of the protocol than mcm; nothing was done",
		}})
	}
}

func checkNodeGroup(req *nodegroupv1.Envelope, subject bus.Subject, received time.Time) error {
	verb, changes := bus.NodeGroupVerb(req)
	switch {
	case verb == "":
		return bus.Errorf(driverv1.Code_CODE_UNIMPLEMENTED, "this driver does not know what %s asks for", subject.Verb)
	case verb != subject.Verb:
		return bus.Errorf(driverv1.Code_CODE_INVALID_ARGUMENT, "subject says %s, envelope says %s", subject.Verb, verb)
	}
	if by := req.GetAcceptBy(); changes && by.IsValid() && received.After(by.AsTime()) {
		return bus.Errorf(driverv1.Code_CODE_ABORTED, "request is stale: it was to be accepted %s ago",
			received.Sub(by.AsTime()).Round(time.Millisecond))
	}

	return nil
}

// runNodeGroup answers a request that is counted in running, which s.mu guards.
func (s *Server) runNodeGroup(cluster, reply string, req *nodegroupv1.Envelope, running *int) {
	timeout := req.GetTimeout().AsDuration()
	if timeout <= 0 || timeout > bus.DefaultTimeout {
		timeout = bus.DefaultTimeout
	}
	ctx, cancel := context.WithTimeout(s.groups, timeout)
	defer cancel()
	begun := time.Now()
	answer := s.callNodeGroups(ctx, cluster, req)
	took := time.Since(begun)
	s.ops.mu.Lock()
	*running--
	s.ops.mu.Unlock()
	s.stats.settled(endpoint{cluster, driverv1.Operation_OPERATION_NODE_GROUPS}, answer.GetStatus(), took)
	if s.cfg.OnSettled != nil {
		s.cfg.OnSettled(driverv1.Operation_OPERATION_NODE_GROUPS, answer.GetStatus().GetCode(), took)
	}
	s.answerNodeGroup(reply, req, answer)
}

func (s *Server) callNodeGroups(ctx context.Context, cluster string, req *nodegroupv1.Envelope) (answer *nodegroupv1.Envelope) {
	defer func() {
		if r := recover(); r != nil {
			s.log.Error("node groups: the driver panicked", "request_id", req.GetRequestId(), "panic", r, "stack", string(debug.Stack()))
			answer = &nodegroupv1.Envelope{Status: &driverv1.Status{Code: driverv1.Code_CODE_INTERNAL, Message: "the driver panicked; its log tells more"}}
		}
	}()

	if answer = s.cfg.NodeGroups(ctx, cluster, req); answer == nil {
		answer = &nodegroupv1.Envelope{Status: &driverv1.Status{Code: driverv1.Code_CODE_INTERNAL, Message: "the driver gave no answer"}}
	}

	return answer
}

// answerNodeGroup sends the one answer to a request.
func (s *Server) answerNodeGroup(reply string, req, answer *nodegroupv1.Envelope) {
	answer.RequestId, answer.Replica = req.GetRequestId(), s.cfg.Replica
	err := s.sendNodeGroup(reply, answer)
	if errors.Is(err, bus.ErrTooLarge) || errors.Is(err, bus.ErrEncode) {
		// Nobody will ever get this answer: who asks must not wait for it in vain.
		err = s.sendNodeGroup(reply, &nodegroupv1.Envelope{
			RequestId: answer.GetRequestId(), Replica: answer.GetReplica(),
			Status: &driverv1.Status{Code: driverv1.Code_CODE_INTERNAL, Message: "the driver's answer cannot be sent: " + err.Error()},
		})
	}
	if err != nil {
		s.log.Warn("answer about node groups not sent; it will be asked for again", "request_id", req.GetRequestId(), "err", err)
	}
}

func (s *Server) sendNodeGroup(reply string, answer *nodegroupv1.Envelope) error {
	payload, err := proto.Marshal(answer)
	if err != nil {
		return fmt.Errorf("%w: %w", bus.ErrEncode, err)
	}
	m := &nats.Msg{Subject: reply, Data: payload}
	if st := answer.GetStatus(); st.GetCode() != driverv1.Code_CODE_OK {
		m.Header = nats.Header{bus.HeaderErrorCode: {fmt.Sprint(int32(st.GetCode()))}, bus.HeaderError: {bus.OneLine(st.GetMessage())}}
	}

	return s.conn.Publish(m)
}
