package dispatch

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/bus"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

// A NodeGroupCaller is the part of bus.NodeGroupClient that NodeGroups uses.
type NodeGroupCaller interface {
	Providers() []string
	Ask(ctx context.Context, provider string, body *nodegroupv1.Envelope) (*nodegroupv1.Envelope, error)
}

// NodeGroups asks drivers about node groups that live in their clouds, and has them
// changed. Its methods wait for the answer, and are safe for concurrent use.
type NodeGroups struct{ caller NodeGroupCaller }

// NewNodeGroups returns a NodeGroups that asks through a caller.
func NewNodeGroups(caller NodeGroupCaller) *NodeGroups { return &NodeGroups{caller: caller} }

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
	InstanceRunning  = NodeGroupInstanceState(nodegroupv1.InstanceState_INSTANCE_STATE_RUNNING)
	InstanceCreating = NodeGroupInstanceState(nodegroupv1.InstanceState_INSTANCE_STATE_CREATING)
	InstanceDeleting = NodeGroupInstanceState(nodegroupv1.InstanceState_INSTANCE_STATE_DELETING)
)

// Providers returns those that serve node groups, or did in the last hour.
func (n *NodeGroups) Providers() []string { return n.caller.Providers() }

// Groups returns a provider's groups. Whoever has written the driver, none that
// breaks the contract comes without an error, nor does one come twice.
func (n *NodeGroups) Groups(ctx context.Context, provider string) ([]NodeGroup, error) {
	answer, err := n.caller.Ask(ctx, provider, &nodegroupv1.Envelope{
		Body: &nodegroupv1.Envelope_Groups{Groups: &nodegroupv1.GroupsRequest{}},
	})
	if err != nil {
		return nil, fmt.Errorf("node groups of provider %s: %w", provider, err)
	}
	list := answer.GetGroupsFound().GetGroups()
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
	answer, err := n.caller.Ask(ctx, provider, &nodegroupv1.Envelope{
		Body: &nodegroupv1.Envelope_Instances{Instances: &nodegroupv1.InstancesRequest{Group: group}},
	})
	if err != nil {
		return nil, fmt.Errorf("instances of node group %s of provider %s: %w", group, provider, err)
	}
	list := answer.GetInstancesFound().GetInstances()
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
	answer, err := n.caller.Ask(ctx, provider, &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Resize{
		Resize: &nodegroupv1.ResizeRequest{Group: group, ExpectedTarget: expected, Target: target},
	}})
	if err != nil {
		return 0, err
	}

	return answer.GetResized().GetTargetSize(), nil
}

// Delete removes instances of a group, and as many from its size, which it returns.
func (n *NodeGroups) Delete(ctx context.Context, provider, group string, instances []string) (int32, error) {
	answer, err := n.caller.Ask(ctx, provider, &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Delete{
		Delete: &nodegroupv1.DeleteRequest{Group: group, Instances: instances},
	}})
	if err != nil {
		return 0, err
	}

	return answer.GetDeleted().GetTargetSize(), nil
}

// Unknowable tells that nobody can say whether what failed was done.
func Unknowable(err error) bool { return err != nil && bus.OriginOf(err) == bus.OriginTimeout }

func nodeGroup(g *nodegroupv1.Group) NodeGroup {
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

func nodeGroupTemplate(t *nodegroupv1.NodeTemplate) (*corev1.Node, error) {
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
