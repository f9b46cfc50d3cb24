package driversdk

import (
	"context"
	"fmt"
	"log/slog"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

// A groupServer translates between the wire and a driver's NodeGroups.
type groupServer struct {
	driver NodeGroups
	hard   context.Context // ends at the hard stop
	log    *slog.Logger
}

// nodeGroups returns what answers about node groups; nil when the driver has none.
func nodeGroups(driver any, hard context.Context, log *slog.Logger) replica.NodeGroupHandler { //nolint:revive // the driver is the subject
	d, ok := driver.(NodeGroups)
	if !ok {
		return nil
	}

	return (&groupServer{driver: d, hard: hard, log: log}).handle
}

func (s *groupServer) handle(ctx context.Context, cluster string, req *nodegroupv1.Envelope) *nodegroupv1.Envelope {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.hard, cancel)()
	answer, err := s.do(ctx, cluster, req)
	if err != nil {
		answer = &nodegroupv1.Envelope{Status: bus.StatusOf(codedBy(ctx, err))}
	}
	s.logEnd(req, err)

	return answer
}

func (s *groupServer) do(ctx context.Context, cluster string, req *nodegroupv1.Envelope) (*nodegroupv1.Envelope, error) {
	switch body := req.GetBody().(type) {
	case *nodegroupv1.Envelope_Groups:
		groups, err := s.driver.NodeGroups(ctx, cluster)

		return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_GroupsFound{
			GroupsFound: &nodegroupv1.GroupsResponse{Groups: s.groups(groups)},
		}}, err
	case *nodegroupv1.Envelope_Instances:
		list, err := s.driver.GroupInstances(ctx, cluster, body.Instances.GetGroup())
		if err != nil {
			return nil, err
		}
		instances, err := groupInstances(list)

		return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_InstancesFound{
			InstancesFound: &nodegroupv1.InstancesResponse{Instances: instances},
		}}, err
	case *nodegroupv1.Envelope_Resize:
		target, err := s.driver.ResizeGroup(ctx, &GroupResize{
			Cluster: cluster, Group: body.Resize.GetGroup(), RequestID: req.GetRequestId(),
			Expected: body.Resize.GetExpectedTarget(), Target: body.Resize.GetTarget(),
		})

		return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Resized{
			Resized: &nodegroupv1.ResizeResponse{TargetSize: target},
		}}, err
	case *nodegroupv1.Envelope_Delete:
		target, err := s.driver.DeleteFromGroup(ctx, &GroupDelete{
			Cluster: cluster, Group: body.Delete.GetGroup(), RequestID: req.GetRequestId(), Instances: body.Delete.GetInstances(),
		})

		return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Deleted{
			Deleted: &nodegroupv1.DeleteResponse{TargetSize: target},
		}}, err
	default:
		return nil, Errorf(Unimplemented, "this driver does not know the request")
	}
}

// groups leaves out what breaks the contract or cannot be sent: one faulty group must
// not take the others away from the autoscaler.
func (s *groupServer) groups(list []*NodeGroup) []*nodegroupv1.Group {
	out := make([]*nodegroupv1.Group, 0, len(list))
	seen := map[string]bool{}
	for _, g := range list {
		if g == nil {
			s.log.Error("node group left out", "err", "the driver returned nil in its place")

			continue
		}
		message := g.proto()
		err := bus.CheckNodeGroup(message)
		if err == nil && seen[g.ID] {
			err = fmt.Errorf("group %s is there twice", g.ID)
		}
		if err == nil {
			_, err = proto.Marshal(message)
		}
		if err != nil {
			s.log.Error("node group left out", "group", g.ID, "err", err)

			continue
		}
		seen[g.ID] = true
		out = append(out, message)
	}

	return out
}

func (g *NodeGroup) proto() *nodegroupv1.Group {
	out := &nodegroupv1.Group{
		Id: g.ID, MinSize: g.Min, MaxSize: g.Max, TargetSize: g.Target, Description: g.Description,
	}
	if t := g.Template; t != nil {
		out.Template = &nodegroupv1.NodeTemplate{Capacity: t.Capacity, Labels: t.Labels}
		for _, taint := range t.Taints {
			out.Template.Taints = append(out.Template.Taints, &driverv1.Taint{Key: taint.Key, Value: taint.Value, Effect: taint.Effect})
		}
	}
	if o := g.Options; o != nil {
		out.Options = &nodegroupv1.Options{
			ScaleDownUtilizationThreshold: o.UtilizationThreshold, ScaleDownGpuUtilizationThreshold: o.GPUUtilizationThreshold,
		}
		if o.UnneededTime != nil {
			out.Options.ScaleDownUnneededTime = durationpb.New(*o.UnneededTime)
		}
		if o.UnreadyTime != nil {
			out.Options.ScaleDownUnreadyTime = durationpb.New(*o.UnreadyTime)
		}
		if o.ProvisionTime != nil {
			out.Options.MaxNodeProvisionTime = durationpb.New(*o.ProvisionTime)
		}
	}

	return out
}

// groupInstances fails for one that cannot be sent: left out, its Node would be
// nobody's.
func groupInstances(list []*GroupInstance) ([]*nodegroupv1.Instance, error) {
	out := make([]*nodegroupv1.Instance, 0, len(list))
	for _, i := range list {
		if i == nil {
			return nil, Errorf(Internal, "driver returned nil in the place of an instance from GroupInstances")
		}
		one := &nodegroupv1.Instance{Id: i.ID, State: nodegroupv1.InstanceState(i.State)}
		if i.Err != nil {
			one.Error = bus.StatusOf(i.Err)
		}
		if _, err := proto.Marshal(one); err != nil {
			return nil, Errorf(Internal, "driver returned an instance from GroupInstances that cannot be sent, %q: %w", i.ID, err)
		}
		out = append(out, one)
	}

	return out, nil
}

// logEnd says what changed something or failed; reads are many.
func (s *groupServer) logEnd(req *nodegroupv1.Envelope, err error) {
	attrs := []any{"request_id", req.GetRequestId()}
	switch body := req.GetBody().(type) {
	case *nodegroupv1.Envelope_Resize:
		attrs = append(attrs, "group", body.Resize.GetGroup(), "from", body.Resize.GetExpectedTarget(), "to", body.Resize.GetTarget())
	case *nodegroupv1.Envelope_Delete:
		attrs = append(attrs, "group", body.Delete.GetGroup(), "instances", body.Delete.GetInstances())
	default:
		if err == nil {
			return
		}
	}
	if err != nil {
		s.log.Warn("request about node groups failed", append(attrs, "code", bus.CodeName(CodeOf(err)), "err", err)...)

		return
	}
	s.log.Info("node group changed", attrs...)
}
