package message

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

// Where requests and answers about node groups go.
const (
	groupRequests = "mcm.v1.default.nodegroup.virtual.resize"
	groupAnswers  = "mcm.v1.default.reply.virtual.autoscaler.TOKEN"
)

// A groupBody is one kind of node-group envelope, and what it is shown as.
type groupBody struct {
	envelope *nodegroupv1.Envelope
	json     string
	summary  string
}

// asked is a request as bus.NodeGroupClient sends it.
func asked(env *nodegroupv1.Envelope) *nodegroupv1.Envelope {
	env.RequestId, env.Timeout = "q", durationpb.New(time.Minute)
	env.AcceptBy = timestamppb.New(time.Date(2026, 1, 2, 3, 4, 7, 0, time.UTC))

	return env
}

// answered is an answer as replica.Server sends it.
func answered(env *nodegroupv1.Envelope) *nodegroupv1.Envelope {
	env.RequestId, env.Replica = "q", "r"

	return env
}

// groupBodies has every body, and answers without one.
var groupBodies = map[string]groupBody{
	"groups": {
		asked(&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Groups{Groups: &nodegroupv1.GroupsRequest{}}}),
		`{"acceptBy":"2026-01-02T03:04:07Z","groups":{},"requestId":"q","timeout":"60s"}`,
		"groups q timeout 1m0s",
	},
	"instances": {
		asked(&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Instances{Instances: &nodegroupv1.InstancesRequest{Group: "pool/a"}}}),
		`{"acceptBy":"2026-01-02T03:04:07Z","instances":{"group":"pool/a"},"requestId":"q","timeout":"60s"}`,
		"instances q group pool/a timeout 1m0s",
	},
	"resize": {
		asked(&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Resize{
			Resize: &nodegroupv1.ResizeRequest{Group: "pool/a", ExpectedTarget: 2, Target: 4},
		}}),
		`{"acceptBy":"2026-01-02T03:04:07Z","requestId":"q","resize":{"expectedTarget":2,"group":"pool/a","target":4},"timeout":"60s"}`,
		"resize q group pool/a from 2 to 4 timeout 1m0s",
	},
	"delete": {
		asked(&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Delete{
			Delete: &nodegroupv1.DeleteRequest{Group: "pool/a", Instances: []string{"virtual://1", "slot-2"}},
		}}),
		`{"acceptBy":"2026-01-02T03:04:07Z","delete":{"group":"pool/a","instances":["virtual://1","slot-2"]},"requestId":"q","timeout":"60s"}`,
		"delete q group pool/a instances virtual://1 slot-2 timeout 1m0s",
	},
	"groups_found": {
		answered(&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_GroupsFound{GroupsFound: &nodegroupv1.GroupsResponse{Groups: []*nodegroupv1.Group{
			{
				Id: "pool/a", MinSize: 1, MaxSize: 5, TargetSize: 2,
				Template: &nodegroupv1.NodeTemplate{
					Capacity: map[string]string{"cpu": "4", "memory": "16Gi"},
					Taints:   []*driverv1.Taint{{Key: "k", Value: "v", Effect: "NoSchedule"}},
				},
				Options: &nodegroupv1.Options{ScaleDownUtilizationThreshold: new(0.0), ScaleDownUnneededTime: durationpb.New(time.Minute)},
			},
			{Id: "b"},
		}}}}),
		`{"groupsFound":{"groups":[{"id":"pool/a","maxSize":5,"minSize":1,` +
			`"options":{"scaleDownUnneededTime":"60s","scaleDownUtilizationThreshold":0},"targetSize":2,` +
			`"template":{"capacity":{"cpu":"4","memory":"16Gi"},"taints":[{"effect":"NoSchedule","key":"k","value":"v"}]}},` +
			`{"id":"b"}]},"replica":"r","requestId":"q"}`,
		"groups_found q by r: OK 2 groups",
	},
	"instances_found": {
		answered(&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_InstancesFound{InstancesFound: &nodegroupv1.InstancesResponse{
			Instances: []*nodegroupv1.Instance{
				{Id: "virtual://1", State: nodegroupv1.InstanceState_INSTANCE_STATE_RUNNING},
				{Id: "virtual://3", State: nodegroupv1.InstanceState_INSTANCE_STATE_RUNNING},
				{
					Id: "slot-2", State: nodegroupv1.InstanceState_INSTANCE_STATE_CREATING,
					Error: &driverv1.Status{Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED, Message: "sold out"},
				},
			},
		}}}),
		`{"instancesFound":{"instances":[{"id":"virtual://1","state":"INSTANCE_STATE_RUNNING"},` +
			`{"id":"virtual://3","state":"INSTANCE_STATE_RUNNING"},` +
			`{"error":{"code":"CODE_RESOURCE_EXHAUSTED","message":"sold out"},"id":"slot-2","state":"INSTANCE_STATE_CREATING"}]},` +
			`"replica":"r","requestId":"q"}`,
		"instances_found q by r: OK 3 instances: 1 ResourceExhausted, 2 running",
	},
	"no instances": {
		answered(&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_InstancesFound{InstancesFound: &nodegroupv1.InstancesResponse{}}}),
		`{"instancesFound":{},"replica":"r","requestId":"q"}`,
		"instances_found q by r: OK no instances",
	},
	"resized": {
		answered(&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Resized{Resized: &nodegroupv1.ResizeResponse{TargetSize: 4}}}),
		`{"replica":"r","requestId":"q","resized":{"targetSize":4}}`,
		"resized q by r: OK target 4",
	},
	"deleted": {
		answered(&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Deleted{Deleted: &nodegroupv1.DeleteResponse{}}}),
		`{"deleted":{},"replica":"r","requestId":"q"}`,
		"deleted q by r: OK target 0",
	},
	"failed": {
		answered(&nodegroupv1.Envelope{Status: &driverv1.Status{Code: driverv1.Code_CODE_ABORTED, Message: "size is 7"}}),
		`{"replica":"r","requestId":"q","status":{"code":"CODE_ABORTED","message":"size is 7"}}`,
		"answer q by r: Aborted size is 7",
	},
	"refused": {
		answered(&nodegroupv1.Envelope{Refused: true, Status: &driverv1.Status{Code: driverv1.Code_CODE_UNAVAILABLE, Message: "no slot"}}),
		`{"refused":true,"replica":"r","requestId":"q","status":{"code":"CODE_UNAVAILABLE","message":"no slot"}}`,
		"refused q by r: Unavailable no slot",
	},
}

func TestEveryNodeGroupBody(t *testing.T) {
	t.Parallel()
	fields := (&nodegroupv1.Envelope{}).ProtoReflect().Descriptor().Oneofs().ByName("body").Fields()
	for i := range fields.Len() {
		if name := string(fields.Get(i).Name()); bodyName(groupBodies[name].envelope) != name {
			t.Errorf("no case shows how the body %q looks", name)
		}
	}
	for name, tc := range groupBodies {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			payload, err := proto.Marshal(tc.envelope)
			if err != nil {
				t.Fatal(err)
			}
			// What the bus sends is known without its subject, too.
			for _, subject := range []string{"", "_INBOX.x", groupRequests, groupAnswers, "mcm.v1.default.reply.virtual.mygateway.TOKEN"} {
				m, err := Parse(payload, subject)
				if err != nil {
					t.Fatalf("Parse(..., %q): %v", subject, err)
				}
				text, err := m.JSON()
				if err != nil {
					t.Fatalf("JSON() of %q: %v", subject, err)
				}
				if diff := cmp.Diff(tc.json, string(text)); diff != "" {
					t.Errorf("JSON() of %q: -want, +got:\n%s", subject, diff)
				}
				if diff := cmp.Diff(tc.summary, m.Summary()); diff != "" {
					t.Errorf("Summary() of %q: -want, +got:\n%s", subject, diff)
				}
			}
			if m, err := Parse(payload, "mcm.v1.default.driver.virtual.create.ns.m1"); err == nil && m.groups != nil {
				t.Error("a request to create a machine is never about node groups")
			}
		})
	}
}
