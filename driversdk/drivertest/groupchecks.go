package drivertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

const (
	ok           = driverv1.Code_CODE_OK
	aborted      = driverv1.Code_CODE_ABORTED
	precondition = driverv1.Code_CODE_FAILED_PRECONDITION
)

func checkGroupQueue(ctx context.Context, s *suite) error {
	behind := func() error {
		_, err := s.groupList(ctx)

		return err
	}

	return s.shared(ctx, s.groupSubject("*"), behind, func() (func() bool, error) {
		c, err := s.sendGroup(verbGroups, s.groupEnvelope(groupsBody()), nil, "")

		return func() bool { return c.came > 0 }, err
	})
}

// checkGroupAnswers asks for what is there and for what is not.
func checkGroupAnswers(ctx context.Context, s *suite) error {
	for range s.cfg.Repeat {
		if _, err := s.groupList(ctx); err != nil {
			return err
		}
		answer, err := s.askGroup(ctx, instancesBody("conformance-"+nuid.Next()))
		if err != nil {
			return err
		}
		if answer.GetStatus().GetCode() == ok && len(answer.GetInstancesFound().GetInstances()) > 0 {
			return errors.New("a group that is not there has instances")
		}
	}
	if err := pause(ctx, silence); err != nil { // for what must not come
		return err
	}

	return s.witnessed("GROUP-2")
}

func checkGroupReplyTree(ctx context.Context, s *suite) error {
	return s.elsewhere(func(reply string) error {
		_, err := s.sendGroup(verbGroups, s.groupEnvelope(groupsBody()), nil, reply)
		if err == nil {
			_, err = s.groupList(ctx) // behind it
		}

		return err
	})
}

// checkGroupOutlives has another process of the driver go on where one has ended.
func checkGroupOutlives(ctx context.Context, s *suite) error {
	if s.cfg.Process == nil {
		return skipf("needs a driver that may be stopped and started %s", byProcess)
	}
	g, err := s.theGroup(ctx, 1)
	if err != nil {
		return err
	}
	from, to := g.GetTargetSize(), g.GetTargetSize()+1
	done := resizeBody(g.GetId(), from, to)
	if err := s.resize(ctx, done); err != nil {
		return err
	}
	came, err := s.come(ctx, g, 1)
	if err != nil {
		return err
	}
	if err := s.restart(ctx); err != nil {
		return err
	}
	if err := s.holds(ctx, g.GetId(), to, came...); err != nil {
		return fmt.Errorf("after the driver was started again: %w", err)
	}
	if err := s.removeInstances(ctx, g.GetId(), from, came...); err != nil {
		return err
	}
	if err := s.notAgain(ctx, done, from); err != nil {
		s.blamef("RESIZE-4", "asked of another replica than did it: %v", err)
	}

	return nil
}

func checkGroupUnknown(ctx context.Context, s *suite) error {
	for _, tc := range []struct {
		what, verb string
		env        *nodegroupv1.Envelope
		number     protowire.Number
		want       driverv1.Code
	}{
		{"an unknown field", verbGroups, groupsBody(), unknownField, ok},
		{"an unknown body", "teleport", &nodegroupv1.Envelope{}, unknownBody, driverv1.Code_CODE_UNIMPLEMENTED},
	} {
		env := s.groupEnvelope(tc.env)
		payload, err := proto.Marshal(env)
		if err != nil {
			return fmt.Errorf("encode %s: %w", tc.verb, err)
		}
		payload = protowire.AppendTag(payload, tc.number, protowire.BytesType)
		payload = protowire.AppendBytes(payload, nil)
		c, err := s.sendGroup(tc.verb, env, payload, "")
		if err != nil {
			return err
		}
		answer, err := c.answer(ctx, s.late())
		if err == nil {
			err = wantGroupCode(answer, tc.want, "a request with "+tc.what)
		}
		if err != nil {
			return err
		}
	}

	return nil
}

func checkGroupStale(ctx context.Context, s *suite) error {
	g, err := s.theGroup(ctx, 1)
	if err != nil {
		return err
	}
	id, size := g.GetId(), g.GetTargetSize()
	stale := func(env *nodegroupv1.Envelope) *nodegroupv1.Envelope {
		env.AcceptBy = timestamppb.New(time.Now().Add(-time.Minute))

		return env
	}
	if err := s.refused(ctx, stale(resizeBody(id, size, size+1)), aborted, "a resize that was to be accepted a minute ago", g); err != nil {
		return err
	}
	came, err := s.grow(ctx, g, 1)
	if err != nil {
		return err
	}

	return s.refused(ctx, stale(removeBody(id, came...)), aborted, "a delete that was to be accepted a minute ago", g.with(came))
}

// checkGroupsListed looks at all groups.
func checkGroupsListed(clause string) func(context.Context, *suite) error {
	return func(ctx context.Context, s *suite) error {
		groups, err := s.groupList(ctx)
		if err == nil && len(groups) == 0 {
			err = skipf("the driver has no node group for control plane %s", s.cfg.Cluster)
		}
		if err != nil {
			return err
		}

		return s.witnessed(clause)
	}
}

func checkTargetSize(ctx context.Context, s *suite) error {
	g, err := s.theGroup(ctx, 1)
	if err != nil {
		return err
	}
	came, err := s.grow(ctx, g, 1)
	if err != nil {
		return err
	}
	if err := s.holds(ctx, g.GetId(), g.GetTargetSize()+1); err != nil {
		return err
	}
	if err := s.removeInstances(ctx, g.GetId(), g.GetTargetSize(), came...); err != nil {
		return err
	}
	if err := s.holds(ctx, g.GetId(), g.GetTargetSize()); err != nil {
		return fmt.Errorf("while %s is being deleted: %w", came[0], err)
	}

	return s.witnessed("GROUP-9")
}

// checkInstancesListed counts what is there and to come.
func checkInstancesListed(ctx context.Context, s *suite) error {
	g, err := s.theGroup(ctx, 1)
	if err != nil {
		return err
	}
	size := g.GetTargetSize()
	if err := s.resize(ctx, resizeBody(g.GetId(), size, size+1)); err != nil {
		return err
	}
	instances, err := s.groupInstances(ctx, g.GetId())
	if err != nil {
		return err
	}
	if have := len(staying(instances)); have != int(size)+1 {
		return fmt.Errorf("a group of target size %d lists %d instances that are there or to come", size+1, have)
	}
	came, err := s.come(ctx, g, 1)
	if err != nil {
		return err
	}
	if err := s.removeInstances(ctx, g.GetId(), size, came...); err != nil {
		return err
	}
	if instances, err = s.groupInstances(ctx, g.GetId()); err != nil {
		return err
	}
	for _, i := range staying(instances) {
		if slices.Contains(came, i.GetId()) {
			return fmt.Errorf("instance %s was deleted, and is listed as %s", i.GetId(), i.GetState())
		}
	}

	return nil
}

// checkInstanceIDs sees that the id of an instance that runs stays what it is.
func checkInstanceIDs(ctx context.Context, s *suite) error {
	g, err := s.theGroup(ctx, 1)
	if err != nil {
		return err
	}
	came, err := s.grow(ctx, g, 1)
	if err != nil {
		return err
	}
	for range s.cfg.Repeat {
		if err := s.holds(ctx, g.GetId(), g.GetTargetSize()+1, came...); err != nil {
			return err
		}
	}

	return s.witnessed("INSTANCES-2")
}

// checkDeleteComing deletes an instance by what it is called before it has come.
func checkDeleteComing(ctx context.Context, s *suite) error {
	g, err := s.theGroup(ctx, 1)
	if err != nil {
		return err
	}
	size := g.GetTargetSize()
	if err := s.resize(ctx, resizeBody(g.GetId(), size, size+1)); err != nil {
		return err
	}

	return s.within(ctx, s.cfg.Timeout, "an instance is deleted by the id that it is listed by", func() (bool, error) {
		before, err := s.groupInstances(ctx, g.GetId())
		if err != nil {
			return false, err
		}
		fresh := slices.DeleteFunc(staying(before), func(i *nodegroupv1.Instance) bool { return g.ids[i.GetId()] })
		if len(fresh) == 0 {
			return false, nil // some lists lag behind
		}
		id := fresh[0].GetId()
		answer, err := s.askGroup(ctx, removeBody(g.GetId(), id))
		if err == nil {
			err = wantGroupCode(answer, ok, "delete of "+id+", which is listed")
		}
		if err != nil || answer.GetDeleted().GetTargetSize() == size {
			return true, err
		}
		after, err := s.groupInstances(ctx, g.GetId())
		for _, i := range staying(after) {
			if i.GetId() == id {
				err = fmt.Errorf("instance %s (%s) is listed, and a delete of it does nothing", id, fresh[0].GetState())
			}
		}

		return false, err // it came meanwhile, and goes by another name now
	})
}
