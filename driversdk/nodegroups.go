package driversdk

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// NodeGroups is a [Driver] whose cloud keeps node groups itself (instance groups,
// scale sets, pools), so that a cluster-autoscaler can scale them without
// MachineDeployments. What a group is like is kept in the cloud: any replica may be
// asked anything [GROUP-4].
//
// The cluster-autoscaler gives up after 5 s, by default, when ctx ends as well. So start
// what takes long in the cloud, and return once the wish is on record there. When this
// replica is lost meanwhile, another one is asked under the same request id.
type NodeGroups interface {
	// NodeGroups returns all groups that are for a control plane.
	NodeGroups(ctx context.Context, cluster string) ([]*NodeGroup, error)
	// GroupInstances returns the instances of one group, those to come and those
	// being deleted included [INSTANCES-1]. An absent group is [NotFound].
	GroupInstances(ctx context.Context, cluster, group string) ([]*GroupInstance, error)
	// ResizeGroup sets the target size and returns it. Comparing with Expected and
	// changing are one step in the cloud [RESIZE-1]; a request that was done before
	// succeeds and changes nothing [RESIZE-4].
	ResizeGroup(ctx context.Context, req *GroupResize) (target int32, err error)
	// DeleteFromGroup removes the named instances and none else, together with as
	// many from the target size, which it returns: all or none of them [REMOVE-1].
	// What is gone or going is done already [REMOVE-2]. The cluster-autoscaler sends one
	// request for each node, ten at the same time by default.
	DeleteFromGroup(ctx context.Context, req *GroupDelete) (target int32, err error)
}

// A NodeGroup is a group of like nodes in the cloud.
type NodeGroup struct {
	// ID is made of letters, digits and any of "._/-".
	ID string
	// Min and Max are the bounds for the autoscaler.
	Min, Max int32
	// Target is how many instances are wished for, without those being deleted.
	Target int32
	// Description is one line for people.
	Description string
	// Template describes a node before there is one; nil for a group that never
	// grows from zero.
	Template *GroupTemplate
	// Options are the group's own settings; nil for those of all groups.
	Options *GroupOptions
}

// A GroupTemplate describes the nodes of a group.
type GroupTemplate struct {
	// Capacity is by resource, in Kubernetes' notation; cpu and memory are needed.
	Capacity map[string]string
	Labels   map[string]string
	Taints   []Taint
}

// GroupOptions are settings of the cluster-autoscaler; a nil one is as for all
// groups.
type GroupOptions struct {
	UtilizationThreshold, GPUUtilizationThreshold *float64
	UnneededTime, UnreadyTime, ProvisionTime      *time.Duration
}

// A GroupInstance is one of a group.
type GroupInstance struct {
	// ID is the Node's spec.providerID as soon as the instance can join; before,
	// any name of its own.
	ID    string
	State GroupInstanceState
	// Err says why an instance that is Creating does not come. Its code decides:
	// after [ResourceExhausted] the autoscaler turns to another group.
	Err error
}

// A GroupInstanceState is where an instance of a group stands.
type GroupInstanceState int

// The states.
const (
	GroupInstanceRunning GroupInstanceState = iota + 1
	GroupInstanceCreating
	GroupInstanceDeleting
)

// A GroupResize is a step from one target size to another.
type GroupResize struct {
	Cluster, Group string
	// RequestID is the same when the request comes again because its answer was
	// lost.
	RequestID string
	// Expected is the size that the asker knows: where it is another by now the
	// answer is [Aborted]. Target is the size to come: above Max is [OutOfRange],
	// and one that would take an instance that has come [FailedPrecondition].
	Expected, Target int32
}

// A GroupDelete names instances of a group that have to go. One of another group is
// [InvalidArgument], fewer than Min left is [FailedPrecondition].
type GroupDelete struct {
	Cluster, Group string
	RequestID      string
	Instances      []string
}

func nodeGroups(ctx context.Context, c *call, driver NodeGroups) (*driverv1.Result, error) {
	response, err := spanned(ctx, "node groups: "+bus.RequestVerb(c.task.Request), func(ctx context.Context) (*driverv1.NodeGroupsResponse, error) {
		return c.askGroups(ctx, driver)
	})
	if err != nil {
		return nil, err
	}

	return &driverv1.Result{Payload: &driverv1.Result_NodeGroups{NodeGroups: response}}, nil
}

// askGroups has a driver answer a request about its node groups. What it returns along
// with an error does not count.
func (c *call) askGroups(ctx context.Context, driver NodeGroups) (*driverv1.NodeGroupsResponse, error) {
	cluster, id := c.task.Cluster, c.task.Request.GetOperationId()
	switch body := c.task.Request.GetNodeGroups().GetBody().(type) {
	case *driverv1.NodeGroupsRequest_Groups:
		list, err := driver.NodeGroups(ctx, cluster)

		return &driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Groups{
			Groups: &driverv1.NodeGroupListResponse{Groups: soundGroups(list, c.log)},
		}}, err
	case *driverv1.NodeGroupsRequest_Instances:
		list, err := driver.GroupInstances(ctx, cluster, body.Instances.GetGroup())
		if err != nil {
			return nil, err
		}
		instances, err := groupInstances(list)

		return &driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Instances{
			Instances: &driverv1.NodeGroupInstancesResponse{Instances: instances},
		}}, err
	case *driverv1.NodeGroupsRequest_Resize:
		target, err := driver.ResizeGroup(ctx, &GroupResize{
			Cluster: cluster, Group: body.Resize.GetGroup(), RequestID: id,
			Expected: body.Resize.GetExpectedTarget(), Target: body.Resize.GetTarget(),
		})

		return &driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Resize{
			Resize: &driverv1.NodeGroupResizeResponse{TargetSize: target},
		}}, err
	case *driverv1.NodeGroupsRequest_Delete:
		target, err := driver.DeleteFromGroup(ctx, &GroupDelete{
			Cluster: cluster, Group: body.Delete.GetGroup(), RequestID: id, Instances: body.Delete.GetInstances(),
		})

		return &driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Delete{
			Delete: &driverv1.NodeGroupDeleteResponse{TargetSize: target},
		}}, err
	default:
		return nil, Errorf(Unimplemented, "this driver does not know this request about node groups")
	}
}

// soundGroups leaves out what breaks the contract or cannot be sent: one faulty group must
// not take the others away from the autoscaler.
func soundGroups(list []*NodeGroup, log *slog.Logger) []*driverv1.NodeGroup {
	out := make([]*driverv1.NodeGroup, 0, len(list))
	seen := map[string]bool{}
	for _, g := range list {
		if g == nil {
			log.Error("node group left out", "err", "the driver returned nil for it")

			continue
		}
		message := g.proto()
		err := bus.CheckNodeGroup(message)
		if err == nil && seen[g.ID] {
			err = fmt.Errorf("group %s is listed twice", g.ID)
		}
		if err == nil {
			_, err = proto.Marshal(message)
		}
		if err != nil {
			log.Error("node group left out", "group", g.ID, "err", err)

			continue
		}
		seen[g.ID] = true
		out = append(out, message)
	}

	return out
}

func (g *NodeGroup) proto() *driverv1.NodeGroup {
	out := &driverv1.NodeGroup{
		Id: g.ID, MinSize: g.Min, MaxSize: g.Max, TargetSize: g.Target, Description: g.Description,
	}
	if t := g.Template; t != nil {
		out.Template = &driverv1.NodeGroupTemplate{Capacity: t.Capacity, Labels: t.Labels}
		for _, taint := range t.Taints {
			out.Template.Taints = append(out.Template.Taints, &driverv1.Taint{Key: taint.Key, Value: taint.Value, Effect: taint.Effect})
		}
	}
	if o := g.Options; o != nil {
		out.Options = &driverv1.NodeGroupOptions{
			ScaleDownUtilizationThreshold: o.UtilizationThreshold, ScaleDownGpuUtilizationThreshold: o.GPUUtilizationThreshold,
			ScaleDownUnneededTime: duration(o.UnneededTime), ScaleDownUnreadyTime: duration(o.UnreadyTime),
			MaxNodeProvisionTime: duration(o.ProvisionTime),
		}
	}

	return out
}

func duration(d *time.Duration) *durationpb.Duration {
	if d == nil {
		return nil
	}

	return durationpb.New(*d)
}

// groupInstances returns an error for an invalid instance: without it, its Node would
// belong to no group.
func groupInstances(list []*GroupInstance) ([]*driverv1.NodeGroupInstance, error) {
	out := make([]*driverv1.NodeGroupInstance, 0, len(list))
	for _, i := range list {
		if i == nil {
			return nil, Errorf(Internal, "driver returned a nil instance from GroupInstances")
		}
		one := &driverv1.NodeGroupInstance{Id: i.ID, State: driverv1.NodeGroupInstanceState(i.State)}
		if i.Err != nil {
			one.Error = bus.StatusOf(i.Err)
		}
		if _, err := proto.Marshal(one); err != nil {
			return nil, Errorf(Internal, "driver returned an invalid instance from GroupInstances, %q: %w", i.ID, err)
		}
		out = append(out, one)
	}

	return out, nil
}

// groupAttrs are what log lines say of a request about node groups; none for others.
func groupAttrs(req *driverv1.NodeGroupsRequest) []slog.Attr {
	switch body := req.GetBody().(type) {
	case *driverv1.NodeGroupsRequest_Instances:
		return []slog.Attr{slog.String("group", body.Instances.GetGroup())}
	case *driverv1.NodeGroupsRequest_Resize:
		return []slog.Attr{
			slog.String("group", body.Resize.GetGroup()),
			slog.Int("from", int(body.Resize.GetExpectedTarget())), slog.Int("to", int(body.Resize.GetTarget())),
		}
	case *driverv1.NodeGroupsRequest_Delete:
		return []slog.Attr{slog.String("group", body.Delete.GetGroup()), slog.Any("instances", body.Delete.GetInstances())}
	default:
		return nil
	}
}
