package message

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// asked is a request about node groups as the gateway sends it.
func asked(req *driverv1.NodeGroupsRequest) *driverv1.Envelope {
	return &driverv1.Envelope{
		OperationId: "q", Attempt: 1, Timeout: durationpb.New(time.Minute),
		AcceptBy: timestamppb.New(time.Date(2026, 1, 2, 3, 4, 7, 0, time.UTC)), Body: &driverv1.Envelope_NodeGroups{NodeGroups: req},
	}
}

// answered is an answer.
func answered(r *driverv1.NodeGroupsResponse) *driverv1.Envelope {
	return &driverv1.Envelope{OperationId: "q", Attempt: 1, Replica: "r", Body: &driverv1.Envelope_Result{
		Result: &driverv1.Result{Payload: &driverv1.Result_NodeGroups{NodeGroups: r}},
	}}
}

const askedJSON = `{"acceptBy":"2026-01-02T03:04:07Z","attempt":1,"nodeGroups":`

// groupBodies has every request about node groups, and every answer.
var groupBodies = map[string]body{
	"groups": {
		asked(&driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Groups{Groups: &driverv1.NodeGroupListRequest{}}}),
		askedJSON + `{"groups":{}},"operationId":"q","timeout":"60s"}`,
		"node_groups q attempt 1 groups timeout 1m0s",
	},
	"instances": {
		asked(&driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Instances{
			Instances: &driverv1.NodeGroupInstancesRequest{Group: "pool/a"},
		}}),
		askedJSON + `{"instances":{"group":"pool/a"}},"operationId":"q","timeout":"60s"}`,
		"node_groups q attempt 1 instances of group pool/a timeout 1m0s",
	},
	"resize": {
		asked(&driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Resize{
			Resize: &driverv1.NodeGroupResizeRequest{Group: "pool/a", ExpectedTarget: 2, Target: 4},
		}}),
		askedJSON + `{"resize":{"expectedTarget":2,"group":"pool/a","target":4}},"operationId":"q","timeout":"60s"}`,
		"node_groups q attempt 1 resize group pool/a from 2 to 4 timeout 1m0s",
	},
	"delete from a group": {
		asked(&driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Delete{
			Delete: &driverv1.NodeGroupDeleteRequest{Group: "pool/a", Instances: []string{"virtual://1", "slot-2"}},
		}}),
		askedJSON + `{"delete":{"group":"pool/a","instances":["virtual://1","slot-2"]}},"operationId":"q","timeout":"60s"}`,
		"node_groups q attempt 1 delete from group pool/a instances virtual://1 slot-2 timeout 1m0s",
	},
	"groups answered": {
		answered(&driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Groups{Groups: &driverv1.NodeGroupListResponse{
			Groups: []*driverv1.NodeGroup{
				{
					Id: "pool/a", MinSize: 1, MaxSize: 5, TargetSize: 2,
					Template: &driverv1.NodeGroupTemplate{
						Capacity: map[string]string{"cpu": "4", "memory": "16Gi"},
						Taints:   []*driverv1.Taint{{Key: "k", Value: "v", Effect: "NoSchedule"}},
					},
					Options: &driverv1.NodeGroupOptions{ScaleDownUtilizationThreshold: new(0.0), ScaleDownUnneededTime: durationpb.New(time.Minute)},
				},
				{Id: "b"},
			},
		}}}),
		`{"attempt":1,"operationId":"q","replica":"r","result":{"nodeGroups":{"groups":{"groups":[{"id":"pool/a","maxSize":5,"minSize":1,` +
			`"options":{"scaleDownUnneededTime":"60s","scaleDownUtilizationThreshold":0},"targetSize":2,` +
			`"template":{"capacity":{"cpu":"4","memory":"16Gi"},"taints":[{"effect":"NoSchedule","key":"k","value":"v"}]}},` +
			`{"id":"b"}]}}}}`,
		"result q attempt 1 by r: OK 2 groups",
	},
	"instances answered": {
		answered(&driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Instances{Instances: &driverv1.NodeGroupInstancesResponse{
			Instances: []*driverv1.NodeGroupInstance{
				{Id: "virtual://1", State: driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_RUNNING},
				{Id: "virtual://3", State: driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_RUNNING},
				{
					Id: "slot-2", State: driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_CREATING,
					Error: &driverv1.Status{Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED, Message: "sold out"},
				},
			},
		}}}),
		`{"attempt":1,"operationId":"q","replica":"r","result":{"nodeGroups":{"instances":{"instances":[` +
			`{"id":"virtual://1","state":"NODE_GROUP_INSTANCE_STATE_RUNNING"},{"id":"virtual://3","state":"NODE_GROUP_INSTANCE_STATE_RUNNING"},` +
			`{"error":{"code":"CODE_RESOURCE_EXHAUSTED","message":"sold out"},"id":"slot-2","state":"NODE_GROUP_INSTANCE_STATE_CREATING"}]}}}}`,
		"result q attempt 1 by r: OK 3 instances: 1 ResourceExhausted, 2 running",
	},
	"no instances": {
		answered(&driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Instances{Instances: &driverv1.NodeGroupInstancesResponse{}}}),
		`{"attempt":1,"operationId":"q","replica":"r","result":{"nodeGroups":{"instances":{}}}}`,
		"result q attempt 1 by r: OK no instances",
	},
	"resized": {
		answered(&driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Resize{Resize: &driverv1.NodeGroupResizeResponse{TargetSize: 4}}}),
		`{"attempt":1,"operationId":"q","replica":"r","result":{"nodeGroups":{"resize":{"targetSize":4}}}}`,
		"result q attempt 1 by r: OK target 4",
	},
	"deleted": {
		answered(&driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Delete{Delete: &driverv1.NodeGroupDeleteResponse{}}}),
		`{"attempt":1,"operationId":"q","replica":"r","result":{"nodeGroups":{"delete":{}}}}`,
		"result q attempt 1 by r: OK target 0",
	},
}

// TestEveryNodeGroupBody keeps a request or an answer from being added that no case shows.
func TestEveryNodeGroupBody(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, b := range groupBodies {
		seen["asked "+bodyName(b.envelope.GetNodeGroups())] = true
		seen["answered "+bodyName(b.envelope.GetResult().GetNodeGroups())] = true
	}
	fields := (&driverv1.NodeGroupsRequest{}).ProtoReflect().Descriptor().Oneofs().ByName("body").Fields()
	for i := range fields.Len() {
		for _, way := range []string{"asked ", "answered "} {
			if name := string(fields.Get(i).Name()); !seen[way+name] {
				t.Errorf("no case shows how the body %q looks when %s", name, way)
			}
		}
	}
}
