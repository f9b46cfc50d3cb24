package drivertest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

// A groupState is a group at rest: it has as many instances as it is to have, and
// all have come.
type groupState struct {
	*nodegroupv1.Group

	ids map[string]bool
}

// with is the group with these instances more.
func (g *groupState) with(ids []string) *groupState {
	more := &groupState{Group: proto.CloneOf(g.Group), ids: maps.Clone(g.ids)}
	more.TargetSize += int32(len(ids))
	for _, id := range ids {
		more.ids[id] = true
	}

	return more
}

// staying returns the instances that are not being deleted.
func staying(instances []*nodegroupv1.Instance) []*nodegroupv1.Instance {
	return slices.DeleteFunc(slices.Clone(instances), func(i *nodegroupv1.Instance) bool {
		return i.GetState() == nodegroupv1.InstanceState_INSTANCE_STATE_DELETING
	})
}

// theGroup returns the group that may be resized, with room for more instances.
func (s *suite) theGroup(ctx context.Context, room int32) (*groupState, error) {
	if s.cfg.NodeGroup == "" {
		return nil, skipf("needs a node group that may be resized (Config.NodeGroup, --node-group)")
	}

	return s.atRest(ctx, s.cfg.NodeGroup, room)
}

// atRest waits until a group is, and notes how it was when the suite came to it.
func (s *suite) atRest(ctx context.Context, id string, room int32) (*groupState, error) {
	var now *groupState
	err := s.within(ctx, s.cfg.Timeout, "all instances of group "+id+" have come", func() (bool, error) {
		g, err := s.groupNamed(ctx, id)
		if err != nil {
			return false, err
		}
		instances, err := s.groupInstances(ctx, id)
		if err != nil {
			return false, err
		}
		now = &groupState{Group: g, ids: map[string]bool{}}
		for _, i := range staying(instances) {
			if i.GetState() == nodegroupv1.InstanceState_INSTANCE_STATE_RUNNING {
				now.ids[i.GetId()] = true
			}
		}

		return len(now.ids) == int(g.GetTargetSize()) && len(now.ids) == len(staying(instances)), nil
	})
	if err != nil {
		return nil, err
	}
	if s.groupsWere[id] == nil {
		s.groupsWere[id] = now
	}
	if now.GetTargetSize()+room > now.GetMaxSize() {
		return nil, skipf("group %s has %d instances of at most %d; needs room for %d more", id, now.GetTargetSize(), now.GetMaxSize(), room)
	}

	return now, nil
}

// resize asks for a step from one size to another, and wants it made.
func (s *suite) resize(ctx context.Context, env *nodegroupv1.Envelope) error {
	answer, err := s.askGroup(ctx, env)
	if err != nil {
		return err
	}
	want := env.GetResize().GetTarget()
	what := fmt.Sprintf("resize from %d to %d", env.GetResize().GetExpectedTarget(), want)
	if err := wantGroupCode(answer, driverv1.Code_CODE_OK, what); err != nil {
		return err
	}
	if have := answer.GetResized().GetTargetSize(); have != want {
		return fmt.Errorf("%s: answered with target size %d", what, have)
	}

	return nil
}

// grow adds instances to a group at rest and returns their ids once they run.
func (s *suite) grow(ctx context.Context, g *groupState, by int32) ([]string, error) {
	if err := s.resize(ctx, resizeBody(g.GetId(), g.GetTargetSize(), g.GetTargetSize()+by)); err != nil {
		return nil, err
	}

	return s.come(ctx, g, by)
}

// come waits for the instances that a group at rest did not have.
func (s *suite) come(ctx context.Context, g *groupState, n int32) ([]string, error) {
	var running, waiting []string
	err := s.within(ctx, s.cfg.Timeout, fmt.Sprintf("%d more instances of group %s run", n, g.GetId()), func() (bool, error) {
		instances, err := s.groupInstances(ctx, g.GetId())
		running, waiting = nil, nil
		for _, i := range staying(instances) {
			switch {
			case g.ids[i.GetId()]:
			case i.GetState() == nodegroupv1.InstanceState_INSTANCE_STATE_RUNNING:
				running = append(running, i.GetId())
			default:
				waiting = append(waiting, i.GetId()+" ("+saidStatus(i.GetError())+")")
			}
		}

		return len(running) == int(n), err
	})
	if err != nil && len(waiting) > 0 {
		err = fmt.Errorf("%w; still to come: %s", err, strings.Join(waiting, ", "))
	}
	slices.Sort(running)

	return running, err
}

// removeInstances asks for instances to go, and wants them taken with this size left.
func (s *suite) removeInstances(ctx context.Context, group string, left int32, ids ...string) error {
	answer, err := s.askGroup(ctx, removeBody(group, ids...))
	if err != nil {
		return err
	}
	what := "delete of " + strings.Join(ids, ", ")
	if err := wantGroupCode(answer, driverv1.Code_CODE_OK, what); err != nil {
		return err
	}
	if have := answer.GetDeleted().GetTargetSize(); have != left {
		return fmt.Errorf("%s: answered with target size %d, not %d", what, have, left)
	}

	return nil
}

// holds fails unless the group has this target size, and these instances stay.
func (s *suite) holds(ctx context.Context, group string, target int32, ids ...string) error {
	instances, err := s.groupInstances(ctx, group)
	if err != nil {
		return err
	}
	g, err := s.groupNamed(ctx, group)
	if err != nil {
		return err
	}
	if g.GetTargetSize() != target {
		return fmt.Errorf("group %s has target size %d, not %d", group, g.GetTargetSize(), target)
	}
	there := map[string]bool{}
	for _, i := range staying(instances) {
		there[i.GetId()] = true
	}
	for _, id := range ids {
		if !there[id] {
			return fmt.Errorf("instance %s of group %s goes, or is gone", id, group)
		}
	}

	return nil
}

// refused fails unless a request is answered with this code, and the group is as
// it was.
func (s *suite) refused(ctx context.Context, env *nodegroupv1.Envelope, want driverv1.Code, what string, was *groupState) error {
	answer, err := s.askGroup(ctx, env)
	if err != nil {
		return err
	}
	if err := wantGroupCode(answer, want, what); err != nil {
		return err
	}
	if err := s.holds(ctx, was.GetId(), was.GetTargetSize(), slices.Collect(maps.Keys(was.ids))...); err != nil {
		return fmt.Errorf("%s was refused, and yet: %w", what, err)
	}

	return nil
}

// restoreGroups gives the groups the sizes that they had, by removing what the
// suite had made.
func (s *suite) restoreGroups(ctx context.Context) error {
	s.mu.Lock()
	touched := s.groupsTouched
	s.groupsTouched = false
	s.mu.Unlock()
	if !touched {
		return nil
	}
	var errs []error
	for _, id := range slices.Sorted(maps.Keys(s.groupsWere)) {
		if err := s.restoreGroup(ctx, s.groupsWere[id]); err != nil {
			errs = append(errs, fmt.Errorf("node group %s: %w", id, err))
			s.mu.Lock()
			s.groupsTouched = true // the next time
			s.mu.Unlock()
		}
	}

	return errors.Join(errs...)
}

func (s *suite) restoreGroup(ctx context.Context, was *groupState) error {
	grown := false

	return s.within(ctx, s.cfg.Timeout, fmt.Sprintf("it has target size %d again", was.GetTargetSize()), func() (bool, error) {
		g, err := s.groupNamed(ctx, was.GetId())
		if err != nil {
			return false, err
		}
		instances, err := s.groupInstances(ctx, was.GetId())
		if err != nil {
			return false, err
		}
		var ours []string
		for _, i := range staying(instances) {
			if !was.ids[i.GetId()] {
				ours = append(ours, i.GetId())
			}
		}
		surplus := g.GetTargetSize() - was.GetTargetSize()
		switch {
		case surplus == 0:
			if grown { // with others than it had
				delete(s.groupsWere, was.GetId())
			}

			return true, nil
		case surplus < 0: // a faulty driver took more than it was told to: others come
			grown = true
			_, err = s.askGroup(ctx, resizeBody(was.GetId(), g.GetTargetSize(), was.GetTargetSize()))
		case len(ours) > 0:
			_, err = s.askGroup(ctx, removeBody(was.GetId(), ours[:min(len(ours), int(surplus))]...))
		}

		return false, err
	})
}
