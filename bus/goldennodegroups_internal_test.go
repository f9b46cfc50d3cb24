package bus

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

// What the golden frames about node groups are about.
const (
	goldenGroup      = "eu-1/pool-a"
	goldenWish       = "WISH"
	goldenGroupReply = "mcm.v1.default.reply.nodejs." + nodeGroupCaller + ".TOKEN"
)

// goldenNodeGroups are what a gateway asks, as NodeGroupClient sends it, and what a
// replica answers, as Server does.
func goldenNodeGroups(t *testing.T) map[string]*nats.Msg {
	t.Helper()
	frames := map[string]*nats.Msg{}
	for name, body := range map[string]*nodegroupv1.Envelope{
		"request-groups":    {Body: &nodegroupv1.Envelope_Groups{Groups: &nodegroupv1.GroupsRequest{}}},
		"request-instances": {Body: &nodegroupv1.Envelope_Instances{Instances: &nodegroupv1.InstancesRequest{Group: goldenGroup}}},
		"request-resize": {Body: &nodegroupv1.Envelope_Resize{Resize: &nodegroupv1.ResizeRequest{
			Group: goldenGroup, ExpectedTarget: 2, Target: 4,
		}}},
		"request-delete": {Body: &nodegroupv1.Envelope_Delete{Delete: &nodegroupv1.DeleteRequest{
			Group: goldenGroup, Instances: []string{"virtual:///moon/i-1", "creating-7"},
		}}},
	} {
		verb, _ := nodeGroupVerb(body)
		payload, err := proto.Marshal(nodeGroupRequest(goldenWish, body, 5*time.Second, goldenTime(0)))
		if err != nil {
			t.Fatal(err)
		}
		frames[name] = &nats.Msg{Subject: wildcard(goldenCluster, TreeNodeGroup, goldenProvider, verb), Reply: goldenGroupReply, Data: payload}
	}
	w := &sentWire{}
	s := &Server{part: part{conn: w, cfg: &ServerConfig{Replica: goldenReplica}, log: quietLog()}}
	for name, answer := range goldenGroupAnswers() {
		s.answerNodeGroup(goldenGroupReply, &nodegroupv1.Envelope{RequestId: goldenWish}, answer)
		frames[name] = w.take()
	}

	return frames
}

func goldenGroupAnswers() map[string]*nodegroupv1.Envelope {
	return map[string]*nodegroupv1.Envelope{
		"answer-groups": {Body: &nodegroupv1.Envelope_GroupsFound{GroupsFound: &nodegroupv1.GroupsResponse{Groups: []*nodegroupv1.Group{
			{
				Id: goldenGroup, MinSize: 1, MaxSize: 10, TargetSize: 2, Description: "small machines on the moon",
				Template: &nodegroupv1.NodeTemplate{ // maps of one entry: several have no fixed order
					Capacity: map[string]string{"memory": "4Gi"}, Labels: map[string]string{"role": "worker"},
					Taints: []*driverv1.Taint{{Key: "dedicated", Value: "db", Effect: "NoSchedule"}},
				},
				Options: &nodegroupv1.Options{
					ScaleDownUtilizationThreshold: new(0.5), ScaleDownGpuUtilizationThreshold: new(0.0),
					ScaleDownUnneededTime: durationpb.New(10 * time.Minute), ScaleDownUnreadyTime: durationpb.New(20 * time.Minute),
					MaxNodeProvisionTime: durationpb.New(15 * time.Minute),
				},
			},
			{Id: "eu-1/pool-b", MaxSize: 1},
		}}}},
		"answer-instances": {Body: &nodegroupv1.Envelope_InstancesFound{InstancesFound: &nodegroupv1.InstancesResponse{
			Instances: []*nodegroupv1.Instance{
				{Id: "virtual:///moon/i-1", State: nodegroupv1.InstanceState_INSTANCE_STATE_RUNNING},
				{Id: "creating-7", State: nodegroupv1.InstanceState_INSTANCE_STATE_CREATING, Error: &driverv1.Status{
					Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED, Message: "no quota",
				}},
			},
		}}},
		"answer-resize":  {Body: &nodegroupv1.Envelope_Resized{Resized: &nodegroupv1.ResizeResponse{TargetSize: 4}}},
		"answer-delete":  {Body: &nodegroupv1.Envelope_Deleted{Deleted: &nodegroupv1.DeleteResponse{TargetSize: 2}}},
		"answer-failed":  {Status: &driverv1.Status{Code: driverv1.Code_CODE_ABORTED, Message: "the target is 3, not 2"}},
		"answer-refused": {Refused: true, Status: &driverv1.Status{Code: driverv1.Code_CODE_UNAVAILABLE, Message: "no slot"}},
	}
}
