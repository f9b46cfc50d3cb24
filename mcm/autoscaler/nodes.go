package autoscaler

import (
	"context"
	"strings"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// Classes of errors, as the cluster-autoscaler numbers them.
const (
	classOutOfResources = 1
	classOther          = 99
)

// NodeGroupNodes lists the instances of a group, including upcoming ones.
func (s *Server) NodeGroupNodes(
	ctx context.Context, req *externalgrpc.NodeGroupNodesRequest,
) (*externalgrpc.NodeGroupNodesResponse, error) {
	if isProvided(req.GetId()) {
		g, err := s.provided(ctx, req.GetId())
		if err != nil {
			return nil, err
		}

		return g.nodes(), nil
	}
	g, err := s.group(ctx, req.GetId())
	if err != nil {
		return nil, err
	}
	out := &externalgrpc.NodeGroupNodesResponse{Instances: make([]*externalgrpc.Instance, 0, len(g.machines))}
	for _, m := range g.machines {
		if m.node != nil && m.node.Spec.ProviderID == "" {
			continue // with a placeholder as its id it would be deleted as one that never joined
		}
		out.Instances = append(out.Instances, &externalgrpc.Instance{Id: m.instanceID(), Status: s.instanceStatus(g, m)})
	}

	return out, nil
}

func (s *Server) instanceStatus(g *group, m *machine) *externalgrpc.InstanceStatus {
	switch {
	case g.going(m.Machine):
		return &externalgrpc.InstanceStatus{InstanceState: externalgrpc.InstanceStatus_instanceDeleting}
	case m.node != nil:
		return &externalgrpc.InstanceStatus{InstanceState: externalgrpc.InstanceStatus_instanceRunning}
	case s.isPreserved(g, m.Machine, nil):
		// With its error the cluster-autoscaler would try to correct the group's size and end
		// each loop with that. Without the error it logs a warning that the node is late, and
		// still deletes other late ones.
		return &externalgrpc.InstanceStatus{InstanceState: externalgrpc.InstanceStatus_instanceCreating}
	default:
		return &externalgrpc.InstanceStatus{
			InstanceState: externalgrpc.InstanceStatus_instanceCreating, ErrorInfo: createError(m.Machine),
		}
	}
}

// createError returns why a machine's create failed. The cluster-autoscaler then gives up the
// machine, and its group for a while. So an error that is retried within seconds is only
// returned once the machine is Failed.
func createError(m *v1alpha1.Machine) *externalgrpc.InstanceErrorInfo {
	last := m.Status.LastOperation
	if last.Type != v1alpha1.MachineOperationCreate || last.State != v1alpha1.MachineStateFailed {
		return nil
	}
	info := &externalgrpc.InstanceErrorInfo{
		ErrorCode: last.ErrorCode, ErrorMessage: short(last.Description), InstanceErrorClass: classOther,
	}
	switch last.ErrorCode {
	case v1alpha1.ErrorCodeResourceExhausted:
		info.InstanceErrorClass = classOutOfResources

		return info
	case "", v1alpha1.ErrorCodeUnknown, v1alpha1.ErrorCodeDeadlineExceeded, v1alpha1.ErrorCodeAborted,
		v1alpha1.ErrorCodeUnavailable, v1alpha1.ErrorCodeCanceled:
		if m.Status.CurrentStatus.Phase != v1alpha1.MachineFailed {
			return nil
		}
	}
	if info.ErrorCode == "" {
		info.ErrorCode = v1alpha1.ErrorCodeUnknown // the cluster-autoscaler ignores an empty one
	}

	return info
}

// short cuts a text, because the cluster-autoscaler repeats it in logs, Events and its status.
func short(text string) string {
	const most = 512
	if len(text) <= most {
		return text
	}

	return strings.ToValidUTF8(text[:most], "") + "…"
}
