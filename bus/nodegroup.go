package bus

import (
	"errors"
	"fmt"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// RequestVerb returns how a subject calls what an envelope asks for: the operation, or in
// [TreeNodeGroup] what is wanted of node groups. It is empty for what this version does
// not know.
func RequestVerb(env *driverv1.Envelope) string {
	op := OperationOf(env)
	if op != driverv1.Operation_OPERATION_NODE_GROUPS {
		return operationVerbs[op]
	}
	switch env.GetNodeGroups().GetBody().(type) {
	case *driverv1.NodeGroupsRequest_Groups:
		return "groups"
	case *driverv1.NodeGroupsRequest_Instances:
		return "instances"
	case *driverv1.NodeGroupsRequest_Resize:
		return "resize"
	case *driverv1.NodeGroupsRequest_Delete:
		return "delete"
	default:
		return ""
	}
}

// EditsNodeGroup reports whether an envelope asks for a change of a node group. That is
// no mutation, as nothing claims it, but what became of a lost one is not known.
func EditsNodeGroup(env *driverv1.Envelope) bool {
	req := env.GetNodeGroups()

	return req.GetResize() != nil || req.GetDelete() != nil
}

// CheckNodeGroup holds a group to the contract, in a driver before it is sent and in
// the gateway, which serves many drivers, before it is believed.
func CheckNodeGroup(g *driverv1.NodeGroup) error {
	lower, upper, capacity := g.GetMinSize(), g.GetMaxSize(), g.GetTemplate().GetCapacity()
	switch {
	case !validNodeGroupID(g.GetId()):
		return fmt.Errorf("id %q: want letters, digits and any of \"._/-\" [GROUP-7]", g.GetId())
	case lower < 0 || upper <= 0 || lower > upper:
		return fmt.Errorf("sizes %d to %d: want 0 <= min <= max and 0 < max [GROUP-8]", lower, upper)
	case g.GetTargetSize() < 0:
		return fmt.Errorf("target size %d is below zero [GROUP-9]", g.GetTargetSize())
	case g.GetTemplate() != nil && (capacity["cpu"] == "" || capacity["memory"] == ""):
		return errors.New("template without cpu or memory [GROUP-10]")
	default:
		return nil
	}
}

func validNodeGroupID(id string) bool {
	for _, c := range []byte(id) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '.', c == '_', c == '/', c == '-':
		default:
			return false
		}
	}

	return id != ""
}
