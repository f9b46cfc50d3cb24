package drivertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

// What subjects call the requests about node groups.
const (
	verbGroups    = "groups"
	verbInstances = "instances"
	verbResize    = "resize"
	verbDelete    = "delete"
)

// A groupCall is one request about node groups and what answers it.
type groupCall struct {
	verb    string
	id      string
	answers chan *nodegroupv1.Envelope

	came int // answers; guarded by suite.mu
}

// answersKept is more than a request has answers.
const answersKept = 8

var errNobody = errors.New("nobody listens on its subject")

// servesGroups tells whether the driver says that it serves node groups.
func (s *suite) servesGroups() bool {
	return !s.plain && slices.Contains(s.session().GetCapabilities(), driverv1.Operation_OPERATION_NODE_GROUPS)
}

// groupEnvelope makes a body a request as a gateway makes it, but for what it says
// already.
func (s *suite) groupEnvelope(body *nodegroupv1.Envelope) *nodegroupv1.Envelope {
	if body.GetRequestId() == "" {
		body.RequestId = nuid.Next()
	}
	if body.GetAcceptBy() == nil {
		body.AcceptBy = acceptBy()
	}
	body.Timeout = durationpb.New(s.cfg.Timeout)

	return body
}

func (s *suite) groupSubject(verb string) string {
	return s.below("nodegroup." + s.cfg.Provider + "." + verb)
}

// sendGroup publishes a request. Payload is sent instead of env, and reply is where
// the answer is asked for, unless they are empty.
func (s *suite) sendGroup(verb string, env *nodegroupv1.Envelope, payload []byte, reply string) (*groupCall, error) {
	c := &groupCall{verb: verb, id: env.GetRequestId(), answers: make(chan *nodegroupv1.Envelope, answersKept)}
	if payload == nil {
		var err error
		if payload, err = proto.Marshal(env); err != nil {
			return nil, fmt.Errorf("encode %s: %w", verb, err)
		}
	}
	if reply == "" {
		reply = s.groupReplies + nuid.Next()
	}
	s.mu.Lock()
	s.groupCalls[reply] = c
	s.groupsTouched = s.groupsTouched || verb == verbResize || verb == verbDelete
	s.mu.Unlock()
	if err := s.nc.PublishMsg(&nats.Msg{Subject: s.groupSubject(verb), Reply: reply, Data: payload}); err != nil {
		return nil, fmt.Errorf("publish on %s: %w", s.groupSubject(verb), err)
	}

	return c, nil
}

// onGroupReply runs on the subscription's goroutine.
func (s *suite) onGroupReply(m *nats.Msg) {
	s.mu.Lock()
	c := s.groupCalls[m.Subject]
	if c != nil {
		c.came++
	}
	s.mu.Unlock()
	if c == nil {
		return
	}
	var answer *nodegroupv1.Envelope // nil says that nobody listens
	if len(m.Data) > 0 || m.Header.Get(headerStatus) != "503" {
		answer = &nodegroupv1.Envelope{}
		if err := proto.Unmarshal(m.Data, answer); err != nil {
			s.blamef("GROUP-2", "the answer to %s is no envelope: %v", c.verb, err)
		}
		s.witnessGroup(c, answer)
	}
	select {
	case c.answers <- answer:
	default: // a driver that answers so often has been seen enough
	}
}

// answer waits for the answer to a request.
func (c *groupCall) answer(ctx context.Context, limit time.Duration) (*nodegroupv1.Envelope, error) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case a := <-c.answers:
		if a == nil {
			return nil, fmt.Errorf("node groups, %s: %w", c.verb, errNobody)
		}

		return a, nil
	case <-timer.C:
		return nil, fmt.Errorf("node groups, %s: no answer within %s", c.verb, limit)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// askGroup has a request answered. A replica without a slot is asked again.
func (s *suite) askGroup(ctx context.Context, body *nodegroupv1.Envelope) (answer *nodegroupv1.Envelope, err error) {
	by := body.GetAcceptBy()
	err = s.eventually(ctx, "a replica has a slot for a request about node groups", func() (bool, error) {
		body.AcceptBy = by // counts from now
		c, err := s.sendGroup(groupVerb(body), s.groupEnvelope(body), nil, "")
		if err != nil {
			return false, err
		}
		answer, err = c.answer(ctx, s.late())

		return !answer.GetRefused(), err
	})

	return answer, err
}

func groupVerb(env *nodegroupv1.Envelope) string {
	switch env.GetBody().(type) {
	case *nodegroupv1.Envelope_Groups:
		return verbGroups
	case *nodegroupv1.Envelope_Instances:
		return verbInstances
	case *nodegroupv1.Envelope_Resize:
		return verbResize
	default:
		return verbDelete
	}
}

func groupsBody() *nodegroupv1.Envelope {
	return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Groups{Groups: &nodegroupv1.GroupsRequest{}}}
}

func instancesBody(group string) *nodegroupv1.Envelope {
	return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Instances{Instances: &nodegroupv1.InstancesRequest{Group: group}}}
}

func resizeBody(group string, from, to int32) *nodegroupv1.Envelope {
	return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Resize{
		Resize: &nodegroupv1.ResizeRequest{Group: group, ExpectedTarget: from, Target: to},
	}}
}

func removeBody(group string, ids ...string) *nodegroupv1.Envelope {
	return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Delete{
		Delete: &nodegroupv1.DeleteRequest{Group: group, Instances: ids},
	}}
}

// groupList asks for all groups.
func (s *suite) groupList(ctx context.Context) ([]*nodegroupv1.Group, error) {
	answer, err := s.askGroup(ctx, groupsBody())
	if err == nil {
		err = wantGroupCode(answer, driverv1.Code_CODE_OK, "groups")
	}

	return answer.GetGroupsFound().GetGroups(), err
}

// groupNamed asks for one group.
func (s *suite) groupNamed(ctx context.Context, id string) (*nodegroupv1.Group, error) {
	groups, err := s.groupList(ctx)
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, g := range groups {
		if g.GetId() == id {
			return g, nil
		}
		ids = append(ids, g.GetId())
	}

	return nil, fmt.Errorf("there is no group %q for control plane %s; there are: %s", id, s.cfg.Cluster, strings.Join(ids, ", "))
}

// groupInstances asks for the instances of a group, once it has settled.
func (s *suite) groupInstances(ctx context.Context, group string) ([]*nodegroupv1.Instance, error) {
	if err := s.settled(ctx); err != nil {
		return nil, err
	}
	answer, err := s.askGroup(ctx, instancesBody(group))
	if err == nil {
		err = wantGroupCode(answer, driverv1.Code_CODE_OK, "instances of group "+group)
	}

	return answer.GetInstancesFound().GetInstances(), err
}

// wantGroupCode fails when a request was answered otherwise.
func wantGroupCode(answer *nodegroupv1.Envelope, want driverv1.Code, what string) error {
	if have := answer.GetStatus().GetCode(); have != want {
		return fmt.Errorf("%s: answered %s, not %s", what, saidStatus(answer.GetStatus()), bus.CodeName(want))
	}

	return nil
}
