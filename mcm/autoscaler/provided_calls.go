package autoscaler

import (
	"cmp"
	"context"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

func (g *providedGroup) message() *externalgrpc.NodeGroup {
	return &externalgrpc.NodeGroup{Id: g.id, MinSize: g.Min, MaxSize: g.Max, Debug: g.Description + " of provider " + g.provider}
}

// provided finds a group of a driver's.
func (s *Server) provided(ctx context.Context, id string) (*providedGroup, error) {
	now, err := s.current(ctx)
	if err != nil {
		return nil, err
	}
	g, ok := now.provided.byID[id]
	if !ok {
		return nil, status.Errorf(codes.NotFound, "there is no node group %q: no driver has told of it for %s", id, providerGrace)
	}

	return g, nil
}

func (g *providedGroup) nodes() *externalgrpc.NodeGroupNodesResponse {
	out := &externalgrpc.NodeGroupNodesResponse{Instances: make([]*externalgrpc.Instance, 0, len(g.instances))}
	for _, i := range g.instances {
		one := &externalgrpc.Instance{Id: i.ID, Status: &externalgrpc.InstanceStatus{
			// The numbers are the cluster-autoscaler's own.
			InstanceState: externalgrpc.InstanceStatus_InstanceState(i.State),
		}}
		if i.Err != nil && i.State == dispatch.InstanceCreating {
			one.Status.ErrorInfo = &externalgrpc.InstanceErrorInfo{
				ErrorCode: dispatch.CodeOf(i.Err).String(), ErrorMessage: short(i.Err.Error()), InstanceErrorClass: classOther,
			}
			if dispatch.CodeOf(i.Err) == dispatch.ResourceExhausted {
				one.Status.ErrorInfo.InstanceErrorClass = classOutOfResources
			}
		}
		out.Instances = append(out.Instances, one)
	}

	return out
}

func (g *providedGroup) template(ctx context.Context) (*externalgrpc.NodeGroupTemplateNodeInfoResponse, error) {
	if g.Template == nil { // learn has logged what is wrong with one
		klog.FromContext(ctx).V(1).Info("node group cannot grow from zero: its driver does not tell what a node has", "nodeGroup", g.id)

		return templateResponse(g.id, unknownNode(g.ID))
	}
	node := g.Template.DeepCopy()
	node.Name = "template-of-" + g.ID

	return templateResponse(g.id, node)
}

// resize changes a group's size by delta. That the driver knows another size than
// we do proves that nothing was done, and is tried again with the new one; whatever
// else goes wrong is not.
func (s *Server) resize(ctx context.Context, id string, delta int32) error {
	unlock, err := s.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	var last error
	for range maxConflicts {
		g, err := s.provided(ctx, id)
		if err != nil {
			return err
		}
		want := int64(g.Target) + int64(delta)
		switch {
		case delta > 0 && want > int64(g.Max):
			return status.Errorf(codes.OutOfRange, "node group %s has %d nodes: %d more would exceed its maximum of %d", id, g.Target, delta, g.Max)
		case want < 0:
			return status.Errorf(codes.FailedPrecondition, "node group %s has %d nodes: %d fewer are less than none", id, g.Target, -int64(delta))
		}
		target, err := s.cfg.Provided.source.Resize(ctx, g.provider, g.ID, g.Target, int32(want))
		if err == nil {
			s.wroteProvided(ctx, g, target, nil)

			return nil
		}
		s.cfg.Provided.kick()
		if dispatch.CodeOf(err) != dispatch.Aborted || dispatch.Unknowable(err) {
			return driverStatus(err, "resize node group "+id)
		}
		last = err
		s.askAgain(ctx, g)
	}

	return status.Errorf(codes.Aborted, "resize node group %s: nothing was done in %d attempts, the last time because %v", id, maxConflicts, last)
}

// deleteProvided removes nodes of a driver's group. Calls for one group run at the
// same time, as drivers must be able to bear: the cluster-autoscaler sends one for
// each node.
func (s *Server) deleteProvided(ctx context.Context, id string, nodes []*externalgrpc.ExternalGrpcNode) error {
	g, err := s.provided(ctx, id)
	if err != nil {
		return err
	}
	victims, err := s.providedVictims(ctx, g, nodes)
	if err != nil || len(victims) == 0 {
		return err
	}
	if areFake(nodes) {
		victims = g.aboveMinimum(victims)
	}
	target, err := s.cfg.Provided.source.Delete(ctx, g.provider, g.ID, victims)
	if err != nil {
		s.cfg.Provided.kick()

		return driverStatus(err, "delete from node group "+id)
	}
	s.wroteProvided(ctx, g, target, victims)

	return nil
}

// providedVictims are the ids of the instances to delete.
func (s *Server) providedVictims(ctx context.Context, g *providedGroup, nodes []*externalgrpc.ExternalGrpcNode) ([]string, error) {
	now, err := s.current(ctx)
	if err != nil {
		return nil, err
	}
	var victims []string
	for _, node := range nodes {
		id := cmp.Or(node.GetProviderID(), node.GetName())
		owner := now.provided.find(node.GetProviderID(), node.GetName())
		if g.has(id) { // also of one that another provider claims
			owner = g
		}
		if owner == nil {
			if err := s.mustBeGone(ctx, g.id, node); err != nil {
				return nil, err
			}

			continue
		}
		if owner.id != g.id {
			return nil, status.Errorf(codes.InvalidArgument, "node %s belongs to node group %s, not %s", node.GetName(), owner.id, g.id)
		}
		if node.GetAnnotations()[v1alpha1.AnnotationKeyScaleDownDisabled] == "true" {
			return nil, status.Errorf(codes.FailedPrecondition, "node %s has the annotation %s", node.GetName(), v1alpha1.AnnotationKeyScaleDownDisabled)
		}
		if !slices.Contains(victims, id) {
			victims = append(victims, id)
		}
	}

	return victims, nil
}

// aboveMinimum are as many of instances as may go; all, if none may: to say so is the
// driver's. Those that are going already count for nothing.
func (g *providedGroup) aboveMinimum(instances []string) []string {
	room := int(g.Target - g.Min)
	staying := slices.DeleteFunc(slices.Clone(instances), func(id string) bool {
		return slices.ContainsFunc(g.instances, func(i dispatch.NodeGroupInstance) bool {
			return i.ID == id && i.State == dispatch.InstanceDeleting
		})
	})
	if room <= 0 || len(staying) <= room {
		return instances
	}

	return staying[:room]
}

// has tells whether an instance is listed as the group's.
func (g *providedGroup) has(instance string) bool {
	return slices.ContainsFunc(g.instances, func(i dispatch.NodeGroupInstance) bool { return i.ID == instance })
}

// wroteProvided has a change that a driver made seen at once.
func (s *Server) wroteProvided(ctx context.Context, g *providedGroup, target int32, deleting []string) {
	sure := true
	s.showProvided(func() (after *providedGroup) {
		after, sure = s.cfg.Provided.wrote(g, target, deleting)

		return after
	})
	klog.FromContext(ctx).Info("node group scaled", "nodeGroup", g.id, "client", clientOf(ctx),
		"from", g.Target, "to", target, "deleted", deleting)
	if !sure {
		ctx, cancel := context.WithTimeout(ctx, settleTimeout)
		defer cancel()
		s.askAgain(ctx, g)
	}
}

// askAgain has a group shown as its driver tells it by now.
func (s *Server) askAgain(ctx context.Context, g *providedGroup) {
	s.cfg.Provided.askGroups(ctx, g.provider)
	s.showProvided(func() *providedGroup { return s.cfg.Provided.group(g) })
}

// showProvided puts one group into the snapshot, and leaves the others as they were
// for this loop. Whatever read or change of the group it shows, change makes it: what
// was looked up before might be older than what is shown.
func (s *Server) showProvided(change func() *providedGroup) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := change()
	if last := s.last.Load(); last != nil && g != nil {
		now := *last
		now.provided = last.provided.with(g)
		s.last.Store(&now)
	}
}

// driverStatus gives what a driver, or the bus, says the cluster-autoscaler's code:
// the numbers are the same but for the last.
func driverStatus(err error, doing string) error {
	code := codes.Code(dispatch.CodeOf(err))
	if code > codes.Unauthenticated || code == codes.Unimplemented {
		code = codes.Internal
	}

	return status.Errorf(code, "%s: %v", doing, err)
}
