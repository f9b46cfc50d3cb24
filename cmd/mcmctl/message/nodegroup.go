package message

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/machinebus/machinebus/bus"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

// nodeGroupSummary returns a node-group envelope as one line.
func nodeGroupSummary(env *nodegroupv1.Envelope) string {
	kind, unknown := bodyName(env), len(env.ProtoReflect().GetUnknown())
	switch {
	case kind != "":
	case env.GetRefused():
		kind = "refused"
	case unknown == 0 && (env.GetStatus() != nil || env.GetReplica() != ""):
		kind = "answer" // a failed one has no body
	default:
		return newerText(unknown)
	}
	text := kind + " " + env.GetRequestId()
	if request, ok := groupRequestText(env); ok {
		text += request
		if env.GetTimeout() != nil {
			text += " timeout " + env.GetTimeout().AsDuration().Round(time.Millisecond).String()
		}

		return text
	}

	return strings.TrimSpace(fmt.Sprintf("%s by %s: %s %s", text, env.GetReplica(), statusText(env.GetStatus()), groupAnswerText(env)))
}

// groupRequestText describes a request; it returns false for an answer.
func groupRequestText(env *nodegroupv1.Envelope) (string, bool) {
	switch b := env.GetBody().(type) {
	case *nodegroupv1.Envelope_Groups:
		return "", true
	case *nodegroupv1.Envelope_Instances:
		return " group " + b.Instances.GetGroup(), true
	case *nodegroupv1.Envelope_Resize:
		return fmt.Sprintf(" group %s from %d to %d", b.Resize.GetGroup(), b.Resize.GetExpectedTarget(), b.Resize.GetTarget()), true
	case *nodegroupv1.Envelope_Delete:
		return fmt.Sprintf(" group %s instances %s", b.Delete.GetGroup(), strings.Join(b.Delete.GetInstances(), " ")), true
	default:
		return "", false
	}
}

func groupAnswerText(env *nodegroupv1.Envelope) string {
	switch b := env.GetBody().(type) {
	case *nodegroupv1.Envelope_GroupsFound:
		return fmt.Sprintf("%d groups", len(b.GroupsFound.GetGroups()))
	case *nodegroupv1.Envelope_InstancesFound:
		return groupInstancesText(b.InstancesFound.GetInstances())
	case *nodegroupv1.Envelope_Resized:
		return fmt.Sprintf("target %d", b.Resized.GetTargetSize())
	case *nodegroupv1.Envelope_Deleted:
		return fmt.Sprintf("target %d", b.Deleted.GetTargetSize())
	default:
		return ""
	}
}

// groupInstancesText counts instances by state, or by error code if they have one.
func groupInstancesText(instances []*nodegroupv1.Instance) string {
	counts := map[string]int{}
	for _, i := range instances {
		state := strings.ToLower(strings.TrimPrefix(i.GetState().String(), "INSTANCE_STATE_"))
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
