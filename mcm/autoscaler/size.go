package autoscaler

import (
	"cmp"
	"context"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// NodeGroupTargetSize returns the replicas of the deployment.
func (s *Server) NodeGroupTargetSize(
	ctx context.Context, req *externalgrpc.NodeGroupTargetSizeRequest,
) (*externalgrpc.NodeGroupTargetSizeResponse, error) {
	if isProvided(req.GetId()) {
		g, err := s.provided(ctx, req.GetId())
		if err != nil {
			return nil, err
		}

		return &externalgrpc.NodeGroupTargetSizeResponse{TargetSize: g.Target}, nil
	}
	g, err := s.group(ctx, req.GetId())
	if err != nil {
		return nil, err
	}

	return &externalgrpc.NodeGroupTargetSizeResponse{TargetSize: g.deployment.Spec.Replicas}, nil
}

// NodeGroupIncreaseSize adds replicas. It refuses to exceed the maximum.
func (s *Server) NodeGroupIncreaseSize(
	ctx context.Context, req *externalgrpc.NodeGroupIncreaseSizeRequest,
) (*externalgrpc.NodeGroupIncreaseSizeResponse, error) {
	delta := req.GetDelta()
	if delta <= 0 {
		return nil, status.Errorf(codes.InvalidArgument, "node group %s: want a delta above zero, not %d", req.GetId(), delta)
	}
	if isProvided(req.GetId()) {
		return &externalgrpc.NodeGroupIncreaseSizeResponse{}, s.resize(ctx, req.GetId(), delta)
	}
	err := s.write(ctx, req.GetId(), func(g *group, d *v1alpha1.MachineDeployment) (bool, error) {
		if have := d.Spec.Replicas; delta > g.max-have {
			return false, status.Errorf(codes.OutOfRange, "node group %s has %d nodes: %d more would exceed its maximum of %d",
				g.id, have, delta, g.max)
		}
		d.Spec.Replicas += delta

		return true, nil
	})
	if err != nil {
		return nil, err
	}

	return &externalgrpc.NodeGroupIncreaseSizeResponse{}, nil
}

// NodeGroupDecreaseTargetSize gives up machines that have not joined, never nodes. It marks
// those that exist, because otherwise their set would choose which to delete. It ignores the
// minimum: the cluster-autoscaler asks for the actual size, and an error would end each loop.
func (s *Server) NodeGroupDecreaseTargetSize(
	ctx context.Context, req *externalgrpc.NodeGroupDecreaseTargetSizeRequest,
) (*externalgrpc.NodeGroupDecreaseTargetSizeResponse, error) {
	if req.GetDelta() >= 0 {
		return nil, status.Errorf(codes.InvalidArgument, "node group %s: want a delta below zero, not %d", req.GetId(), req.GetDelta())
	}
	if isProvided(req.GetId()) {
		return &externalgrpc.NodeGroupDecreaseTargetSizeResponse{}, s.resize(ctx, req.GetId(), req.GetDelta())
	}
	err := s.write(ctx, req.GetId(), func(g *group, d *v1alpha1.MachineDeployment) (bool, error) {
		less := -int64(req.GetDelta())
		now, err := s.take(ctx) // a new one, to count machines that have joined since the last
		if err != nil {
			return false, err
		}
		if g = now.byID[g.id]; g == nil {
			return false, status.Errorf(codes.FailedPrecondition, "MachineDeployment %s is no node group any more: its annotations have changed",
				req.GetId())
		}
		pending, joined, err := s.pending(ctx, g)
		if err != nil {
			return false, err
		}
		if int64(d.Spec.Replicas)-less < int64(joined) {
			return false, status.Errorf(codes.FailedPrecondition, "node group %s has %d replicas, and %d machines that have joined "+
				"or are preserved: %d fewer replicas would delete some of them", g.id, d.Spec.Replicas, joined, less)
		}
		d.Spec.Replicas -= int32(less)
		if absent := int64(d.Spec.Replicas) - int64(joined); int64(len(pending)) > absent {
			s.mark(d, pending[absent:])
		}

		return true, nil
	})
	if err != nil {
		return nil, err
	}

	return &externalgrpc.NodeGroupDecreaseTargetSizeResponse{}, nil
}

// pending returns the machines that have not joined, with the best to keep first, and the
// number of machines to keep in any case: those that have joined, also since the snapshot, and
// those that are preserved.
func (s *Server) pending(ctx context.Context, g *group) (names []string, joined int, err error) {
	var waiting []*v1alpha1.Machine
	for _, m := range g.machines {
		if m.node != nil {
			if !g.going(m.Machine) {
				joined++
			}

			continue
		}
		newest, err := s.newestMachine(ctx, g, m)
		if err != nil {
			return nil, 0, err
		}
		if newest == nil {
			continue
		}
		there, err := s.hasNode(ctx, newest)
		switch {
		case err != nil:
			return nil, 0, err
		case there, s.isPreserved(g, newest, nil):
			joined++
		default:
			waiting = append(waiting, newest)
		}
	}
	failed := func(m *v1alpha1.Machine) int {
		if m.Status.LastOperation.State == v1alpha1.MachineStateFailed {
			return 1
		}

		return 0
	}
	slices.SortFunc(waiting, func(a, b *v1alpha1.Machine) int {
		return cmp.Or(
			cmp.Compare(failed(a), failed(b)),
			a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
			cmp.Compare(a.Name, b.Name),
		)
	})
	for _, m := range waiting {
		names = append(names, m.Name)
	}

	return names, joined, nil
}

func (s *Server) hasNode(ctx context.Context, m *v1alpha1.Machine) (bool, error) {
	name := m.Labels[v1alpha1.LabelKeyNode]
	if name == "" {
		return false, nil
	}
	node := &corev1.Node{}
	err := s.cfg.Nodes.Get(ctx, client.ObjectKey{Name: name}, node)
	if client.IgnoreNotFound(err) != nil {
		return false, statusOf(err, "read Node "+name)
	}

	return err == nil && mayBeOf(m, node), nil
}
