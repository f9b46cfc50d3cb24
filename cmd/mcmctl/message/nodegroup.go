package message

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// groupRequestText describes a request about node groups; it is empty for other requests.
func groupRequestText(req *driverv1.NodeGroupsRequest) string {
	switch b := req.GetBody().(type) {
	case *driverv1.NodeGroupsRequest_Groups:
		return " groups"
	case *driverv1.NodeGroupsRequest_Instances:
		return " instances of group " + b.Instances.GetGroup()
	case *driverv1.NodeGroupsRequest_Resize:
		return fmt.Sprintf(" resize group %s from %d to %d", b.Resize.GetGroup(), b.Resize.GetExpectedTarget(), b.Resize.GetTarget())
	case *driverv1.NodeGroupsRequest_Delete:
		return fmt.Sprintf(" delete from group %s instances %s", b.Delete.GetGroup(), strings.Join(b.Delete.GetInstances(), " "))
	default:
		return ""
	}
}

// groupAnswerText describes an answer about node groups; it is empty for other answers.
func groupAnswerText(r *driverv1.NodeGroupsResponse) string {
	switch b := r.GetBody().(type) {
	case *driverv1.NodeGroupsResponse_Groups:
		return fmt.Sprintf(" %d groups", len(b.Groups.GetGroups()))
	case *driverv1.NodeGroupsResponse_Instances:
		return " " + groupInstancesText(b.Instances.GetInstances())
	case *driverv1.NodeGroupsResponse_Resize:
		return fmt.Sprintf(" target %d", b.Resize.GetTargetSize())
	case *driverv1.NodeGroupsResponse_Delete:
		return fmt.Sprintf(" target %d", b.Delete.GetTargetSize())
	default:
		return ""
	}
}

// groupInstancesText counts instances by state, or by error code if they have one.
func groupInstancesText(instances []*driverv1.NodeGroupInstance) string {
	counts := map[string]int{}
	for _, i := range instances {
		state := strings.ToLower(strings.TrimPrefix(i.GetState().String(), "NODE_GROUP_INSTANCE_STATE_"))
		if i.GetError() != nil {
			state = bus.CodeName(i.GetError().GetCode())
		}
		counts[state]++
	}
	parts := make([]string, 0, len(counts))
	for _, state := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%d %s", counts[state], state))
	}
	if len(parts) == 0 {
		return "no instances"
	}

	return fmt.Sprintf("%d instances: %s", len(instances), strings.Join(parts, ", "))
}
