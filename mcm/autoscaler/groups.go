package autoscaler

import (
	"context"

	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// NodeGroups lists the groups of the last snapshot.
func (s *Server) NodeGroups(ctx context.Context, _ *externalgrpc.NodeGroupsRequest) (*externalgrpc.NodeGroupsResponse, error) {
	now, err := s.current(ctx)
	if err != nil {
		return nil, err
	}
	out := &externalgrpc.NodeGroupsResponse{NodeGroups: make([]*externalgrpc.NodeGroup, 0, len(now.groups)+len(now.provided.groups))}
	for _, g := range now.groups {
		out.NodeGroups = append(out.NodeGroups, g.message())
	}
	for _, g := range now.provided.groups {
		out.NodeGroups = append(out.NodeGroups, g.message())
	}

	return out, nil
}

// NodeGroupForNode returns the group of a node. For a node without a group (foreign, upcoming
// or nameless) it returns an empty group and never an error, which would stop all scale-ups.
func (s *Server) NodeGroupForNode(
	ctx context.Context, req *externalgrpc.NodeGroupForNodeRequest,
) (*externalgrpc.NodeGroupForNodeResponse, error) {
	now, err := s.current(ctx)
	if err != nil {
		return nil, err
	}
	if m := now.find(req.GetNode().GetProviderID(), req.GetNode().GetName()); m != nil {
		return &externalgrpc.NodeGroupForNodeResponse{NodeGroup: now.byID[m.group].message()}, nil
	}
	if g := now.provided.find(req.GetNode().GetProviderID(), req.GetNode().GetName()); g != nil {
		return &externalgrpc.NodeGroupForNodeResponse{NodeGroup: g.message()}, nil
	}

	return &externalgrpc.NodeGroupForNodeResponse{NodeGroup: &externalgrpc.NodeGroup{}}, nil
}

// message includes the sizes in every answer: the cluster-autoscaler uses those of any.
func (g *group) message() *externalgrpc.NodeGroup {
	return &externalgrpc.NodeGroup{
		Id: g.id, MinSize: g.min, MaxSize: g.max,
		Debug: "MachineDeployment " + g.id + " of class " + g.deployment.Spec.Template.Spec.Class.Name,
	}
}
