package drivertest

import (
	"context"
	"fmt"
	"maps"
	"slices"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

// rivals is how many resizes want to make the same step at the same time.
const rivals = 4

// checkResizeStep asks for a step from where the group is not, and then several
// times at once for one step.
func checkResizeStep(ctx context.Context, s *suite) error {
	g, err := s.theGroup(ctx, 1)
	if err != nil {
		return err
	}
	size := g.GetTargetSize()
	what := fmt.Sprintf("a resize from %d, where the group has %d", size+1, size)
	if err := s.refused(ctx, resizeBody(g.GetId(), size+1, size+1), aborted, what, g); err != nil {
		return err
	}
	var calls []*groupCall
	for range rivals {
		c, err := s.sendGroup(verbResize, s.groupEnvelope(resizeBody(g.GetId(), size, size+1)), nil, "")
		if err != nil {
			return err
		}
		calls = append(calls, c)
	}
	done := 0
	for _, c := range calls {
		answer, err := c.answer(ctx, s.late())
		switch {
		case err != nil:
			return err
		case answer.GetStatus().GetCode() == ok:
			done++
		case !answer.GetRefused():
			if err := wantGroupCode(answer, aborted, "one of several resizes from the same size"); err != nil {
				return err
			}
		}
	}
	if done != 1 {
		return fmt.Errorf("of %d resizes from %d to %d that came at once, %d were made, not one", rivals, size, size+1, done)
	}

	return s.holds(ctx, g.GetId(), size+1)
}

func checkResizeAbove(ctx context.Context, s *suite) error {
	g, err := s.theGroup(ctx, 0)
	if err != nil {
		return err
	}
	above := g.GetMaxSize() + 1

	return s.refused(ctx, resizeBody(g.GetId(), g.GetTargetSize(), above), driverv1.Code_CODE_OUT_OF_RANGE,
		fmt.Sprintf("a resize to %d, above the maximum of %d", above, above-1), g)
}

func checkResizeDown(ctx context.Context, s *suite) error {
	g, err := s.theGroup(ctx, 1)
	if err != nil {
		return err
	}
	came, err := s.grow(ctx, g, 1)
	if err != nil {
		return err
	}
	size := g.GetTargetSize()

	return s.refused(ctx, resizeBody(g.GetId(), size+1, size), precondition, "a resize that would take an instance that has come", g.with(came))
}

// notAgain asks again for a resize that was done, when the group has this size.
func (s *suite) notAgain(ctx context.Context, done *nodegroupv1.Envelope, size int32) error {
	done.AcceptBy = nil
	answer, err := s.askGroup(ctx, done)
	if err == nil {
		err = wantGroupCode(answer, ok, "a resize that was done already")
	}
	if err != nil {
		return err
	}
	if err := s.holds(ctx, done.GetResize().GetGroup(), size); err != nil {
		return fmt.Errorf("a resize that was done already was done again: %w", err)
	}

	return nil
}

// checkResizeAgain asks again for a step at once, and when it could be made again.
func checkResizeAgain(ctx context.Context, s *suite) error {
	g, err := s.theGroup(ctx, 1)
	if err != nil {
		return err
	}
	size := g.GetTargetSize()
	step := resizeBody(g.GetId(), size, size+1)
	if err := s.resize(ctx, step); err != nil {
		return err
	}
	if err := s.notAgain(ctx, step, size+1); err != nil {
		return err
	}
	came, err := s.come(ctx, g, 1)
	if err != nil {
		return err
	}
	if err := s.removeInstances(ctx, g.GetId(), size, came...); err != nil {
		return err
	}
	if err := s.notAgain(ctx, step, size); err != nil {
		return err
	}

	return s.witnessed("RESIZE-4")
}

func checkRemoveNamed(ctx context.Context, s *suite) error {
	g, err := s.theGroup(ctx, 2)
	if err != nil {
		return err
	}
	came, err := s.grow(ctx, g, 2)
	if err != nil {
		return err
	}
	size := g.GetTargetSize() + 1
	rest := append(slices.Sorted(maps.Keys(g.ids)), came[1])
	if err := s.removeInstances(ctx, g.GetId(), size, came[0]); err != nil {
		return err
	}
	if err := s.holds(ctx, g.GetId(), size, rest...); err != nil {
		return fmt.Errorf("only %s was to go: %w", came[0], err)
	}
	if s.cfg.OtherNodeGroup == "" {
		return nil
	}
	foreign, _, err := s.foreign(ctx)
	if err != nil {
		return err
	}
	answer, err := s.askGroup(ctx, removeBody(g.GetId(), came[1], foreign))
	if err != nil {
		return err
	}
	if answer.GetStatus().GetCode() == ok {
		return fmt.Errorf("a delete of instances of two groups was answered %s", saidStatus(answer.GetStatus()))
	}
	if err := s.holds(ctx, g.GetId(), size, rest...); err != nil {
		return fmt.Errorf("not all of the named instances could go, so none was to: %w", err)
	}

	return nil
}

// foreign returns an instance of the other group, and that group.
func (s *suite) foreign(ctx context.Context) (string, *groupState, error) {
	other, err := s.atRest(ctx, s.cfg.OtherNodeGroup, 0)
	if err != nil {
		return "", nil, err
	}
	if len(other.ids) == 0 {
		came, err := s.grow(ctx, other, 1)
		if err != nil {
			return "", nil, err
		}
		other = other.with(came)
	}

	return slices.Sorted(maps.Keys(other.ids))[0], other, nil
}

func checkRemoveAgain(ctx context.Context, s *suite) error {
	g, err := s.theGroup(ctx, 1)
	if err != nil {
		return err
	}
	came, err := s.grow(ctx, g, 1)
	if err != nil {
		return err
	}
	id, size, gone := g.GetId(), g.GetTargetSize(), came[0]
	if err := s.removeInstances(ctx, id, size, gone, gone); err != nil { // named twice, it goes once
		return err
	}
	for range s.cfg.Repeat {
		if err := s.removeInstances(ctx, id, size, gone); err != nil {
			return fmt.Errorf("while it is going: %w", err)
		}
	}
	if err := s.within(ctx, s.cfg.Timeout, "instance "+gone+" is gone", func() (bool, error) {
		instances, err := s.groupInstances(ctx, id)

		return !slices.ContainsFunc(instances, func(i *nodegroupv1.Instance) bool { return i.GetId() == gone }), err
	}); err != nil {
		return err
	}
	if err := s.removeInstances(ctx, id, size, gone); err != nil {
		return fmt.Errorf("when it is gone: %w", err)
	}

	return s.holds(ctx, id, size)
}

func checkRemoveForeign(ctx context.Context, s *suite) error {
	if s.cfg.OtherNodeGroup == "" {
		return skipf("needs a second node group (Config.OtherNodeGroup, --other-node-group)")
	}
	g, err := s.theGroup(ctx, 0)
	if err != nil {
		return err
	}
	foreign, other, err := s.foreign(ctx)
	if err != nil {
		return err
	}
	what := "a delete of an instance of group " + other.GetId()
	if err := s.refused(ctx, removeBody(g.GetId(), foreign), driverv1.Code_CODE_INVALID_ARGUMENT, what, g); err != nil {
		return err
	}
	if err := s.holds(ctx, other.GetId(), other.GetTargetSize(), foreign); err != nil {
		return fmt.Errorf("%s was refused, and yet: %w", what, err)
	}

	return nil
}

func checkRemoveBelow(ctx context.Context, s *suite) error {
	g, err := s.theGroup(ctx, 0)
	if err != nil {
		return err
	}
	many := int(g.GetTargetSize() - g.GetMinSize() + 1)
	if g.GetMinSize() == 0 || many > len(g.ids) {
		return skipf("group %s has %d instances of at least %d: none that it could not do without", g.GetId(), len(g.ids), g.GetMinSize())
	}

	return s.refused(ctx, removeBody(g.GetId(), slices.Sorted(maps.Keys(g.ids))[:many]...), precondition,
		fmt.Sprintf("a delete of %d instances of %d, where %d have to stay", many, len(g.ids), g.GetMinSize()), g)
}
