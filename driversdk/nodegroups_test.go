package driversdk

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// groupDriver is a testDriver whose cloud has groups.
type groupDriver struct {
	testDriver

	groups    []*NodeGroup
	instances []*GroupInstance
	resize    *GroupResize
}

func (d *groupDriver) NodeGroups(context.Context, string) ([]*NodeGroup, error) { return d.groups, nil }

func (d *groupDriver) GroupInstances(context.Context, string, string) ([]*GroupInstance, error) {
	return d.instances, nil
}

func (d *groupDriver) ResizeGroup(_ context.Context, req *GroupResize) (int32, error) {
	d.resize = req

	return req.Target, nil
}

func (d *groupDriver) DeleteFromGroup(context.Context, *GroupDelete) (int32, error) {
	return 0, Errorf(FailedPrecondition, "fewer than the minimum")
}

// aboutGroups asks for one thing about node groups.
func aboutGroups(req *driverv1.NodeGroupsRequest) *driverv1.Envelope {
	return &driverv1.Envelope{OperationId: "r1", Body: &driverv1.Envelope_NodeGroups{NodeGroups: req}}
}

func groupResult(r *driverv1.NodeGroupsResponse) *driverv1.Result {
	return &driverv1.Result{Payload: &driverv1.Result_NodeGroups{NodeGroups: r}}
}

func TestNodeGroups(t *testing.T) {
	t.Parallel()
	unneeded := time.Minute
	good := &NodeGroup{
		ID: "pool/a", Min: 1, Max: 5, Target: 2, Description: "a pool",
		Template: &GroupTemplate{Capacity: map[string]string{"cpu": "4", "memory": "16Gi"}, Taints: []Taint{{"k", "v", "NoSchedule"}}},
		Options:  &GroupOptions{UnneededTime: &unneeded},
	}
	d := &groupDriver{instances: []*GroupInstance{
		{ID: "acme:///1", State: GroupInstanceRunning},
		{ID: "slot-2", State: GroupInstanceCreating, Err: Errorf(ResourceExhausted, "sold out")},
	}, groups: []*NodeGroup{
		nil,
		{ID: "not-utf-8", Max: 1, Description: "\xff"},
		good, good,
		{ID: "with space", Max: 1},
		{ID: "upside-down", Min: 2, Max: 1},
		{ID: "no-max"},
		{ID: "below", Max: 1, Target: -1},
		{ID: "no-cpu", Max: 1, Template: &GroupTemplate{Capacity: map[string]string{"memory": "1Gi"}}},
	}}
	w := start(t, d, nil)
	for name, tc := range map[string]struct {
		reason string
		req    *driverv1.NodeGroupsRequest
		want   *driverv1.Result
	}{
		"groups": {
			"what breaks the contract is left out, and takes nothing else along",
			&driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Groups{Groups: &driverv1.NodeGroupListRequest{}}},
			groupResult(&driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Groups{Groups: &driverv1.NodeGroupListResponse{Groups: []*driverv1.NodeGroup{{
				Id: "pool/a", MinSize: 1, MaxSize: 5, TargetSize: 2, Description: "a pool",
				Template: &driverv1.NodeGroupTemplate{
					Capacity: map[string]string{"cpu": "4", "memory": "16Gi"}, Taints: []*driverv1.Taint{{Key: "k", Value: "v", Effect: "NoSchedule"}},
				},
				Options: &driverv1.NodeGroupOptions{ScaleDownUnneededTime: durationpb.New(time.Minute)},
			}}}}}),
		},
		"instances": {
			"an error that keeps one from coming has its code",
			&driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Instances{Instances: &driverv1.NodeGroupInstancesRequest{Group: "pool/a"}}},
			groupResult(&driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Instances{Instances: &driverv1.NodeGroupInstancesResponse{
				Instances: []*driverv1.NodeGroupInstance{
					{Id: "acme:///1", State: driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_RUNNING},
					{
						Id: "slot-2", State: driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_CREATING,
						Error: &driverv1.Status{Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED, Message: "sold out"},
					},
				},
			}}}),
		},
		"resize": {
			"the size that it has then",
			&driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Resize{
				Resize: &driverv1.NodeGroupResizeRequest{Group: "pool/a", ExpectedTarget: 2, Target: 4},
			}},
			groupResult(&driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Resize{
				Resize: &driverv1.NodeGroupResizeResponse{TargetSize: 4},
			}}),
		},
		"refused": {
			"a driver's word is its answer, and nothing comes along with it",
			&driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Delete{
				Delete: &driverv1.NodeGroupDeleteRequest{Group: "pool/a", Instances: []string{"acme:///1"}},
			}},
			&driverv1.Result{Status: &driverv1.Status{Code: driverv1.Code_CODE_FAILED_PRECONDITION, Message: "fewer than the minimum"}},
		},
	} {
		got, _ := w.ask(aboutGroups(tc.req)).end()
		if diff := cmp.Diff(tc.want, got, protocmp.Transform()); diff != "" {
			t.Errorf("%s: %s (-want +got):\n%s", name, tc.reason, diff)
		}
	}
	want := &GroupResize{Cluster: testCluster, Group: "pool/a", RequestID: "r1", Expected: 2, Target: 4}
	if diff := cmp.Diff(want, d.resize); diff != "" {
		t.Errorf("the driver's request (-want +got):\n%s", diff)
	}
}

// A driver without node groups does not offer them.
func TestNodeGroups_None(t *testing.T) {
	t.Parallel()
	for op, w := range map[bool]*world{false: start(t, &testDriver{}, nil), true: start(t, &groupDriver{}, nil)} {
		session := w.session(func(*driverv1.Session) bool { return true })
		if got := slices.Contains(session.GetCapabilities(), driverv1.Operation_OPERATION_NODE_GROUPS); got != op {
			t.Errorf("capabilities %v; that they have node groups: want %t", session.GetCapabilities(), op)
		}
	}
}

// Of what changed a group there is a line in production, and of what failed; looks are
// many.
func TestNodeGroups_Log(t *testing.T) {
	t.Parallel()
	log := &lockedBuffer{}
	w := start(t, &groupDriver{}, func(c *Config) { c.Logger = slog.New(slog.NewTextHandler(log, nil)) })
	for _, req := range []*driverv1.NodeGroupsRequest{
		{Body: &driverv1.NodeGroupsRequest_Groups{Groups: &driverv1.NodeGroupListRequest{}}},
		{Body: &driverv1.NodeGroupsRequest_Resize{Resize: &driverv1.NodeGroupResizeRequest{Group: "pool/a", ExpectedTarget: 2, Target: 4}}},
		{Body: &driverv1.NodeGroupsRequest_Delete{Delete: &driverv1.NodeGroupDeleteRequest{Group: "pool/b", Instances: []string{"acme:///1"}}}},
	} {
		w.ask(aboutGroups(req)).end()
	}
	var lines []string
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, "operation=nodegroups") {
			lines = append(lines, line)
		}
	}
	if len(lines) != 2 || !strings.Contains(lines[0], "level=INFO") || !strings.Contains(lines[0], "group=pool/a from=2 to=4") ||
		!strings.Contains(lines[1], "level=WARN") || !strings.Contains(lines[1], "group=pool/b instances=[acme:///1]") {
		t.Errorf("want a line each of the resize and the refused delete, have %q", lines)
	}
}

// An instance that was left out would have a Node of no group: the whole answer fails.
func TestNodeGroups_FaultyInstance(t *testing.T) {
	t.Parallel()
	good := &GroupInstance{ID: "acme:///1", State: GroupInstanceRunning}
	for name, tc := range map[string]struct {
		faulty *GroupInstance
		says   string
	}{
		"nil":       {nil, "driver returned a nil instance"},
		"not UTF-8": {&GroupInstance{ID: "\xff", State: GroupInstanceRunning}, "invalid UTF-8"},
	} {
		w := start(t, &groupDriver{instances: []*GroupInstance{good, tc.faulty}}, nil)
		answer, _ := w.ask(aboutGroups(&driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Instances{
			Instances: &driverv1.NodeGroupInstancesRequest{Group: "pool/a"},
		}})).end()
		if st := answer.GetStatus(); st.GetCode() != Internal || !strings.Contains(st.GetMessage(), tc.says) || answer.GetPayload() != nil {
			t.Errorf("%s: have %v, want %v that says %q", name, answer, Internal, tc.says)
		}
	}
}
