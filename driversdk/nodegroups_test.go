package driversdk

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
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
	handle := nodeGroups(d, t.Context(), slog.New(slog.DiscardHandler))
	ask := func(req *nodegroupv1.Envelope) *nodegroupv1.Envelope {
		req.RequestId = "r1"

		return handle(t.Context(), testCluster, req)
	}
	for name, tc := range map[string]struct {
		reason    string
		req, want *nodegroupv1.Envelope
	}{
		"groups": {
			"what breaks the contract is left out, and takes nobody along",
			&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Groups{Groups: &nodegroupv1.GroupsRequest{}}},
			&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_GroupsFound{GroupsFound: &nodegroupv1.GroupsResponse{Groups: []*nodegroupv1.Group{{
				Id: "pool/a", MinSize: 1, MaxSize: 5, TargetSize: 2, Description: "a pool",
				Template: &nodegroupv1.NodeTemplate{
					Capacity: map[string]string{"cpu": "4", "memory": "16Gi"}, Taints: []*driverv1.Taint{{Key: "k", Value: "v", Effect: "NoSchedule"}},
				},
				Options: &nodegroupv1.Options{ScaleDownUnneededTime: durationpb.New(time.Minute)},
			}}}}},
		},
		"instances": {
			"an error that keeps one from coming has its code",
			&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Instances{Instances: &nodegroupv1.InstancesRequest{Group: "pool/a"}}},
			&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_InstancesFound{InstancesFound: &nodegroupv1.InstancesResponse{Instances: []*nodegroupv1.Instance{
				{Id: "acme:///1", State: nodegroupv1.InstanceState_INSTANCE_STATE_RUNNING},
				{
					Id: "slot-2", State: nodegroupv1.InstanceState_INSTANCE_STATE_CREATING,
					Error: &driverv1.Status{Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED, Message: "sold out"},
				},
			}}}},
		},
		"resize": {
			"the size that it has then",
			&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Resize{Resize: &nodegroupv1.ResizeRequest{Group: "pool/a", ExpectedTarget: 2, Target: 4}}},
			&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Resized{Resized: &nodegroupv1.ResizeResponse{TargetSize: 4}}},
		},
		"refused": {
			"a driver's word is its answer",
			&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Delete{Delete: &nodegroupv1.DeleteRequest{Group: "pool/a", Instances: []string{"acme:///1"}}}},
			&nodegroupv1.Envelope{Status: &driverv1.Status{Code: driverv1.Code_CODE_FAILED_PRECONDITION, Message: "fewer than the minimum"}},
		},
	} {
		if diff := cmp.Diff(tc.want, ask(tc.req), protocmp.Transform()); diff != "" {
			t.Errorf("%s: %s (-want +got):\n%s", name, tc.reason, diff)
		}
	}
	want := &GroupResize{Cluster: testCluster, Group: "pool/a", RequestID: "r1", Expected: 2, Target: 4}
	if diff := cmp.Diff(want, d.resize); diff != "" {
		t.Errorf("the driver's request (-want +got):\n%s", diff)
	}
	if nodeGroups(&testDriver{}, t.Context(), slog.New(slog.DiscardHandler)) != nil {
		t.Error("a driver without node groups must not offer them")
	}
}

// An instance that was left out would have a Node of nobody's: the whole answer fails.
func TestNodeGroups_FaultyInstance(t *testing.T) {
	t.Parallel()
	good := &GroupInstance{ID: "acme:///1", State: GroupInstanceRunning}
	for name, tc := range map[string]struct {
		faulty *GroupInstance
		says   string
	}{
		"nil":       {nil, "driver returned nil"},
		"not UTF-8": {&GroupInstance{ID: "\xff", State: GroupInstanceRunning}, "invalid UTF-8"},
	} {
		d := &groupDriver{instances: []*GroupInstance{good, tc.faulty}}
		answer := nodeGroups(d, t.Context(), slog.New(slog.DiscardHandler))(t.Context(), testCluster, &nodegroupv1.Envelope{
			RequestId: "r1",
			Body:      &nodegroupv1.Envelope_Instances{Instances: &nodegroupv1.InstancesRequest{Group: "pool/a"}},
		})
		if st := answer.GetStatus(); st.GetCode() != Internal || !strings.Contains(st.GetMessage(), tc.says) || answer.GetBody() != nil {
			t.Errorf("%s: have %v, want %v that says %q", name, answer, Internal, tc.says)
		}
		if _, err := proto.Marshal(answer); err != nil {
			t.Errorf("%s: the answer cannot be sent: %v", name, err)
		}
	}
}
