package dispatch

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// roomPause is the time until replicas are asked again that had no room for a request
	// twice; it doubles up to roomPauseMax.
	roomPause    = 150 * time.Millisecond
	roomPauseMax = 1200 * time.Millisecond
	// providerKept is how long a provider counts that is not heard of.
	providerKept = time.Hour
)

// A NodeGroupCaller is the part of caller.Caller that NodeGroups uses.
type NodeGroupCaller interface {
	Call(ctx context.Context, req caller.Request) (*caller.Outcome, error)
	Replicas() []caller.Replica
	Up() bool
}

// NodeGroups asks drivers about node groups that live in their clouds, and has them
// changed. Its methods wait for the answer, and are safe for concurrent use.
type NodeGroups struct {
	caller NodeGroupCaller
	log    logr.Logger

	mu    sync.Mutex
	heard map[string]time.Time // when a replica of each provider was last heard that serves node groups
}

// NewNodeGroups returns a NodeGroups that asks through a caller.
func NewNodeGroups(client NodeGroupCaller, log logr.Logger) *NodeGroups {
	return &NodeGroups{caller: client, log: log, heard: map[string]time.Time{}}
}

// A NodeGroup is one of a provider's.
type NodeGroup struct {
	ID               string // among the provider's groups
	Min, Max, Target int32
	Description      string
	Template         *corev1.Node // nil when the driver does not tell what a node has
	TemplateErr      error        // why the driver's template cannot be read
	Options          NodeGroupOptions
	// Err says what makes it none that can be worked with.
	Err error
}

// NodeGroupOptions are a group's own settings; nil is as for all groups.
type NodeGroupOptions struct {
	Utilization, GPUUtilization  *float64
	Unneeded, Unready, Provision *time.Duration
}

// A NodeGroupInstance is one of a group.
type NodeGroupInstance struct {
	// ID is the Node's provider id as soon as the instance can join.
	ID    string
	State NodeGroupInstanceState
	// Err says why one that is to be made does not come, with its code.
	Err error
}

// A NodeGroupInstanceState is where an instance stands.
type NodeGroupInstanceState int

// The states; zero is none that is known.
const (
	InstanceRunning  = NodeGroupInstanceState(driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_RUNNING)
	InstanceCreating = NodeGroupInstanceState(driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_CREATING)
	InstanceDeleting = NodeGroupInstanceState(driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_DELETING)
)

// Providers returns those that serve node groups, or did in the last hour, sorted: of
// what is asked often enough, as it looks at who lives now. Whether one is there, asking
// says. While the bus cannot be reached none is heard, and none forgotten.
func (n *NodeGroups) Providers() []string {
	up, replicas := n.caller.Up(), n.caller.Replicas()
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, r := range replicas {
		if !slices.Contains(r.Session.GetCapabilities(), driverv1.Operation_OPERATION_NODE_GROUPS) {
			continue
		}
		provider := r.Session.GetProvider()
		if _, known := n.heard[provider]; !known {
			n.log.Info("a provider serves node groups", "provider", provider)
		}
		if r.Seen.After(n.heard[provider]) {
			n.heard[provider] = r.Seen
		}
	}
	maps.DeleteFunc(n.heard, func(provider string, heard time.Time) bool {
		gone := up && time.Since(heard) > providerKept
		if gone {
			n.log.Info("a provider that served node groups is not heard of any more: it is forgotten", "provider", provider)
		}

		return gone
	})

	return slices.Sorted(maps.Keys(n.heard))
}

// ask has one replica of a provider answer a request, until ctx ends, a minute at most.
// While replicas have no room for it, which proves that nothing was done, it is sent
// again under the same id.
func (n *NodeGroups) ask(ctx context.Context, provider string, body *driverv1.NodeGroupsRequest) (*driverv1.NodeGroupsResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, bus.DefaultTimeout)
	defer cancel()
	deadline, _ := ctx.Deadline()
	wish := caller.Request{
		Provider: provider, OperationID: rand.Text(), Body: &driverv1.Envelope{Body: &driverv1.Envelope_NodeGroups{NodeGroups: body}},
	}
	// At once after the first, for another replica may have some.
	for pause := time.Duration(0); ; pause = min(max(2*pause, roomPause), roomPauseMax) {
		wish.Timeout = max(time.Until(deadline), time.Millisecond)
		out, err := n.caller.Call(ctx, wish)
		if err == nil {
			return out.Result.GetNodeGroups(), nil
		}
		if e, ok := errors.AsType[*bus.Error](err); !ok || !e.NoRoom {
			return nil, err
		}
		// What may have been done stays so, whoever says later that it cannot be.
		wish.Attempt, wish.Recover = out.Attempts, out.Attempts > 0
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()

			return nil, err
		}
	}
}

// Groups returns a provider's groups. Whoever has written the driver, none that
// breaks the contract comes without an error, nor does one come twice.
func (n *NodeGroups) Groups(ctx context.Context, provider string) ([]NodeGroup, error) {
	answer, err := n.ask(ctx, provider, &driverv1.NodeGroupsRequest{
		Body: &driverv1.NodeGroupsRequest_Groups{Groups: &driverv1.NodeGroupListRequest{}},
	})
	if err == nil && answer.GetGroups() == nil {
		err = Errorf(Internal, "the driver answered without any list")
	}
	if err != nil {
		return nil, fmt.Errorf("node groups of provider %s: %w", provider, err)
	}
	list := answer.GetGroups().GetGroups()
	groups := make([]NodeGroup, 0, len(list))
	seen := make(map[string]bool, len(list))
	for _, g := range list {
		if seen[g.GetId()] {
			continue
		}
		seen[g.GetId()] = true
		groups = append(groups, nodeGroup(g))
	}

	return groups, nil
}

// Instances returns those of a group, each with an id of its own, or an error.
func (n *NodeGroups) Instances(ctx context.Context, provider, group string) ([]NodeGroupInstance, error) {
	answer, err := n.ask(ctx, provider, &driverv1.NodeGroupsRequest{
		Body: &driverv1.NodeGroupsRequest_Instances{Instances: &driverv1.NodeGroupInstancesRequest{Group: group}},
	})
	if err == nil && answer.GetInstances() == nil {
		err = Errorf(Internal, "the driver answered without any list")
	}
	if err != nil {
		return nil, fmt.Errorf("instances of node group %s of provider %s: %w", group, provider, err)
	}
	list := answer.GetInstances().GetInstances()
	instances := make([]NodeGroupInstance, 0, len(list))
	seen := make(map[string]bool, len(list))
	for _, i := range list {
		if i.GetId() == "" || seen[i.GetId()] {
			return nil, Errorf(Internal, "instances of node group %s of provider %s: id %q is empty or there twice", group, provider, i.GetId())
		}
		seen[i.GetId()] = true
		one := NodeGroupInstance{ID: i.GetId(), State: NodeGroupInstanceState(i.GetState()), Err: bus.ErrorOf(i.GetError())}
		if one.State < 0 || one.State > InstanceDeleting {
			one.State = 0 // of a later version; the cluster-autoscaler knows none but these
		}
		instances = append(instances, one)
	}

	return instances, nil
}

// Resize takes a group from the size that is known to another one, and returns what
// it is then. After Aborted it has a size that was not known. [Unknowable] tells of an
// error whether it may have been done all the same.
func (n *NodeGroups) Resize(ctx context.Context, provider, group string, expected, target int32) (int32, error) {
	answer, err := n.ask(ctx, provider, &driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Resize{
		Resize: &driverv1.NodeGroupResizeRequest{Group: group, ExpectedTarget: expected, Target: target},
	}})
	if err != nil {
		return 0, err
	}
	done := answer.GetResize()

	return sizeAfter("resize", provider, done != nil, done.GetTargetSize())
}

// Delete removes instances of a group, and as many from its size, which it returns.
func (n *NodeGroups) Delete(ctx context.Context, provider, group string, instances []string) (int32, error) {
	answer, err := n.ask(ctx, provider, &driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Delete{
		Delete: &driverv1.NodeGroupDeleteRequest{Group: group, Instances: instances},
	}})
	if err != nil {
		return 0, err
	}
	done := answer.GetDelete()

	return sizeAfter("delete", provider, done != nil, done.GetTargetSize())
}

// sizeAfter returns the size that a driver says a group has after a change. Where it says
// that all went well, and cannot be believed, what was done is not known.
func sizeAfter(verb, provider string, said bool, size int32) (int32, error) {
	switch {
	case !said:
		return 0, outcomeUnknown("the driver of provider %s answered %s without what it was asked for", provider, verb)
	case size < 0:
		return 0, outcomeUnknown("the driver of provider %s answered %s with a size of %d", provider, verb, size)
	default:
		return size, nil
	}
}

func outcomeUnknown(format string, args ...any) error {
	e := bus.OutcomeUnknownf(format, args...)
	e.Code = driverv1.Code_CODE_INTERNAL

	return e
}

// Unknowable reports whether what failed may have been done all the same.
func Unknowable(err error) bool { return err != nil && bus.OriginOf(err) == bus.OriginTimeout }

func nodeGroup(g *driverv1.NodeGroup) NodeGroup {
	out := NodeGroup{
		ID: g.GetId(), Min: g.GetMinSize(), Max: g.GetMaxSize(), Target: g.GetTargetSize(), Description: g.GetDescription(),
		Err: bus.CheckNodeGroup(g),
	}
	if t := g.GetTemplate(); t != nil {
		out.Template, out.TemplateErr = nodeGroupTemplate(t)
	}
	o := g.GetOptions()
	if o == nil {
		return out
	}
	out.Options.Utilization, out.Options.GPUUtilization = o.ScaleDownUtilizationThreshold, o.ScaleDownGpuUtilizationThreshold //nolint:protogetter // absent is not 0
	if d := o.GetScaleDownUnneededTime(); d != nil {
		out.Options.Unneeded = new(d.AsDuration())
	}
	if d := o.GetScaleDownUnreadyTime(); d != nil {
		out.Options.Unready = new(d.AsDuration())
	}
	if d := o.GetMaxNodeProvisionTime(); d != nil {
		out.Options.Provision = new(d.AsDuration())
	}

	return out
}

func nodeGroupTemplate(t *driverv1.NodeGroupTemplate) (*corev1.Node, error) {
	capacity := corev1.ResourceList{}
	for name, text := range t.GetCapacity() {
		q, err := resource.ParseQuantity(text)
		if err != nil {
			return nil, fmt.Errorf("template: capacity %s: %q is no quantity: %w", name, text, err)
		}
		capacity[corev1.ResourceName(name)] = q
	}
	if capacity.Cpu().IsZero() || capacity.Memory().IsZero() {
		return nil, Errorf(FailedPrecondition, "template: capacity holds no cpu or no memory")
	}
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Labels: t.GetLabels()},
		Status: corev1.NodeStatus{
			Capacity: capacity, Allocatable: capacity.DeepCopy(),
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Template"}},
		},
	}
	for _, taint := range t.GetTaints() {
		node.Spec.Taints = append(node.Spec.Taints, corev1.Taint{
			Key: taint.GetKey(), Value: taint.GetValue(), Effect: corev1.TaintEffect(taint.GetEffect()),
		})
	}

	return node, nil
}
