package autoscaler_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/proto/externalgrpc"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

const poolID = "provider:acme/pool"

// A fleet is a replica on a real bus whose cloud has one group.
type fleet struct {
	t     *testing.T
	url   string
	stop  func()
	mu    sync.Mutex
	group *nodegroupv1.Group
	list  []*nodegroupv1.Instance
	wrong func(*nodegroupv1.Envelope) *nodegroupv1.Envelope // answers instead, if it likes
	asked []*nodegroupv1.Envelope                           // what changes something
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	f := &fleet{t: t, url: bustest.Server(t, embedded.Options{}).URL(), group: &nodegroupv1.Group{
		Id: "pool", MinSize: 1, MaxSize: 5, TargetSize: 2, Description: "pool of small",
		Template: &nodegroupv1.NodeTemplate{Capacity: map[string]string{"cpu": "4", "memory": "16Gi"}, Labels: map[string]string{"size": "small"}},
	}}
	for _, id := range []string{"acme:///1", "acme:///2"} {
		f.list = append(f.list, &nodegroupv1.Instance{Id: id, State: nodegroupv1.InstanceState_INSTANCE_STATE_RUNNING})
	}
	f.start()

	return f
}

func (f *fleet) start() {
	conn := bustest.Connect(f.t, bus.Config{URLs: []string{f.url}})
	server, err := bus.NewServer(conn, bus.ServerConfig{
		Provider: "acme", Version: "1.0.0", Logger: bustest.Quiet(), NodeGroups: f.answer,
		Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_LIST},
	}, nil)
	if err != nil {
		f.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(f.t.Context())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	f.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			f.t.Error(err)
		}
	})
	f.t.Cleanup(f.stop)
}

func (f *fleet) answer(_ context.Context, _ string, req *nodegroupv1.Envelope) *nodegroupv1.Envelope {
	f.mu.Lock()
	defer f.mu.Unlock()
	if req.GetResize() != nil || req.GetDelete() != nil {
		f.asked = append(f.asked, req)
	}
	if f.wrong != nil {
		if answer := f.wrong(req); answer != nil {
			return answer
		}
	}
	switch body := req.GetBody().(type) {
	case *nodegroupv1.Envelope_Instances:
		return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_InstancesFound{InstancesFound: &nodegroupv1.InstancesResponse{Instances: slices.Clone(f.list)}}}
	case *nodegroupv1.Envelope_Resize:
		if body.Resize.GetExpectedTarget() != f.group.GetTargetSize() {
			return failed(driverv1.Code_CODE_ABORTED)
		}
		f.group.TargetSize = body.Resize.GetTarget()

		return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Resized{Resized: &nodegroupv1.ResizeResponse{TargetSize: f.group.GetTargetSize()}}}
	case *nodegroupv1.Envelope_Delete:
		f.group.TargetSize -= int32(len(body.Delete.GetInstances()))

		return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Deleted{Deleted: &nodegroupv1.DeleteResponse{TargetSize: f.group.GetTargetSize()}}}
	default:
		group := &nodegroupv1.Group{
			Id: f.group.GetId(), MinSize: f.group.GetMinSize(), MaxSize: f.group.GetMaxSize(), TargetSize: f.group.GetTargetSize(),
			Description: f.group.GetDescription(), Template: f.group.GetTemplate(), Options: f.group.GetOptions(),
		}

		return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_GroupsFound{GroupsFound: &nodegroupv1.GroupsResponse{Groups: []*nodegroupv1.Group{group}}}}
	}
}

func failed(code driverv1.Code) *nodegroupv1.Envelope {
	return &nodegroupv1.Envelope{Status: &driverv1.Status{Code: code, Message: "as told"}}
}

func (f *fleet) change(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
}

// gateway returns a rig whose gateway is on the fleet's bus and knows its group.
func (f *fleet) gateway(clock func() time.Time) *rig {
	f.t.Helper()
	client, err := bus.NewNodeGroupClient(bustest.Connect(f.t, bus.Config{URLs: []string{f.url}}), "default", bustest.Quiet())
	if err != nil {
		f.t.Fatal(err)
	}
	provided := autoscaler.NewProvided(dispatch.NewNodeGroups(client), clock)
	ctx, cancel := context.WithCancel(f.t.Context())
	done := make(chan error, 1)
	go func() { done <- provided.Start(ctx) }()
	f.t.Cleanup(func() {
		cancel()
		<-done
		client.Close()
	})
	r := newRig(f.t, func(_ *rig, c *autoscaler.Config) { c.Provided = provided })
	r.sees(func(ids []string) bool { return len(ids) == 1 })

	return r
}

// sees refreshes until the groups are as expected.
func (r *rig) sees(ok func(ids []string) bool) {
	r.t.Helper()
	bustest.Eventually(r.t, "the groups are as expected", func() bool {
		if _, err := r.Refresh(r.t.Context(), &externalgrpc.RefreshRequest{}); err != nil {
			r.t.Fatal(err)
		}
		groups, err := r.NodeGroups(r.t.Context(), &externalgrpc.NodeGroupsRequest{})
		if err != nil {
			r.t.Fatal(err)
		}
		var ids []string
		for _, g := range groups.GetNodeGroups() {
			ids = append(ids, g.GetId())
		}

		return ok(ids)
	})
}

func (r *rig) sizeOf(id string) int32 {
	r.t.Helper()
	answer, err := r.NodeGroupTargetSize(r.t.Context(), &externalgrpc.NodeGroupTargetSizeRequest{Id: id})
	if err != nil {
		r.t.Fatal(err)
	}

	return answer.GetTargetSize()
}

func (r *rig) grow(id string, delta int32) error {
	_, err := r.NodeGroupIncreaseSize(r.t.Context(), &externalgrpc.NodeGroupIncreaseSizeRequest{Id: id, Delta: delta})

	return err
}

func TestProvidedGroupIsAnsweredFor(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.list = append(f.list, &nodegroupv1.Instance{
		Id: "slot-3", State: nodegroupv1.InstanceState_INSTANCE_STATE_CREATING,
		Error: &driverv1.Status{Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED, Message: "sold out"},
	})
	r := f.gateway(nil)
	want := &externalgrpc.NodeGroup{Id: poolID, MinSize: 1, MaxSize: 5, Debug: "pool of small of provider acme"}
	for name, tc := range map[string]struct {
		reason string
		node   *externalgrpc.ExternalGrpcNode
		want   *externalgrpc.NodeGroup
	}{
		"its node":    {"by the provider id", &externalgrpc.ExternalGrpcNode{Name: "n", ProviderID: "acme:///1"}, want},
		"placeholder": {"what has not joined goes by its instance", &externalgrpc.ExternalGrpcNode{Name: "slot-3", ProviderID: "slot-3"}, want},
		"foreign":     {"nobody's is an answer", &externalgrpc.ExternalGrpcNode{Name: "n", ProviderID: "other:///1"}, &externalgrpc.NodeGroup{}},
		"upcoming":    {"it has no id yet", &externalgrpc.ExternalGrpcNode{Name: "template-node"}, &externalgrpc.NodeGroup{}},
	} {
		got, err := r.NodeGroupForNode(t.Context(), &externalgrpc.NodeGroupForNodeRequest{Node: tc.node})
		if diff := cmp.Diff(tc.want, got.GetNodeGroup(), protocmp.Transform()); diff != "" || err != nil {
			t.Errorf("%s: %s: %v (-want +got):\n%s", name, tc.reason, err, diff)
		}
	}
	nodes, err := r.NodeGroupNodes(t.Context(), &externalgrpc.NodeGroupNodesRequest{Id: poolID})
	if err != nil || len(nodes.GetInstances()) != 3 {
		t.Fatalf("%v, %v", nodes, err)
	}
	last := nodes.GetInstances()[2].GetStatus()
	if e := last.GetErrorInfo(); e.GetInstanceErrorClass() != 1 || e.GetErrorCode() != "ResourceExhausted" {
		t.Errorf("error %v, want one of lacking resources", e)
	}
	template, err := r.NodeGroupTemplateNodeInfo(t.Context(), &externalgrpc.NodeGroupTemplateNodeInfoRequest{Id: poolID})
	node := &corev1.Node{}
	if err != nil || node.Unmarshal(template.GetNodeInfo()) != nil || node.Labels["size"] != "small" || node.Status.Allocatable.Cpu().Value() != 4 {
		t.Errorf("template %v, %v", node, err)
	}
	_, err = r.NodeGroupGetOptions(t.Context(), &externalgrpc.NodeGroupAutoscalingOptionsRequest{Id: poolID})
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("options of a group without any: %v", err)
	}
}

// A resize is done once, whoever else changes the size; what nobody can tell is not
// tried again.
func TestProvidedGroupIsResizedOnce(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	r := f.gateway(nil)
	f.change(func() { f.group.TargetSize = 3 }) // the gateway may know 2
	if err := r.grow(poolID, 1); err != nil || r.sizeOf(poolID) != 4 {
		t.Fatalf("%v, size %d; want 4", err, r.sizeOf(poolID))
	}
	if err := r.grow(poolID, 2); status.Code(err) != codes.OutOfRange {
		t.Errorf("above the maximum: %v", err)
	}
	f.change(func() {
		f.asked = nil
		f.wrong = func(req *nodegroupv1.Envelope) *nodegroupv1.Envelope {
			if req.GetResize() == nil {
				return nil
			}

			return failed(driverv1.Code_CODE_UNKNOWN)
		}
	})
	if err := r.grow(poolID, 1); status.Code(err) != codes.Unknown {
		t.Errorf("a failure: %v, want it passed on", err)
	}
	f.change(func() {
		if len(f.asked) != 1 {
			t.Errorf("%d requests, want one: nobody knows what it did", len(f.asked))
		}
	})
}

func TestProvidedGroupLosesTheNamedNodes(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	r := f.gateway(nil)
	there := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "there-" + r.namespace}, Spec: corev1.NodeSpec{ProviderID: "other:///" + r.namespace}}
	r.create(there)
	bustest.Eventually(t, "the cache has the foreign node", func() bool {
		var nodes corev1.NodeList

		return r.cache.List(t.Context(), &nodes) == nil && slices.ContainsFunc(nodes.Items, func(n corev1.Node) bool { return n.Name == there.Name })
	})
	for _, tc := range []struct {
		reason string
		node   *externalgrpc.ExternalGrpcNode
		code   codes.Code
		size   int32
	}{
		{"a foreign node", &externalgrpc.ExternalGrpcNode{Name: there.Name, ProviderID: there.Spec.ProviderID}, codes.InvalidArgument, 2},
		{"one that is gone", &externalgrpc.ExternalGrpcNode{Name: "gone", ProviderID: "acme:///gone"}, codes.OK, 2},
		{"one that must stay", &externalgrpc.ExternalGrpcNode{
			Name: "n2", ProviderID: "acme:///2", Annotations: map[string]string{"cluster-autoscaler.kubernetes.io/scale-down-disabled": "true"},
		}, codes.FailedPrecondition, 2},
		{"its own", &externalgrpc.ExternalGrpcNode{Name: "n1", ProviderID: "acme:///1"}, codes.OK, 1},
	} {
		_, err := r.NodeGroupDeleteNodes(t.Context(), &externalgrpc.NodeGroupDeleteNodesRequest{Id: poolID, Nodes: []*externalgrpc.ExternalGrpcNode{tc.node}})
		if status.Code(err) != tc.code || r.sizeOf(poolID) != tc.size {
			t.Errorf("%s: %v, size %d; want %v, %d", tc.reason, err, r.sizeOf(poolID), tc.code, tc.size)
		}
	}
	f.change(func() {
		if len(f.asked) != 1 || fmt.Sprint(f.asked[0].GetDelete().GetInstances()) != "[acme:///1]" {
			t.Errorf("the driver was asked %v", f.asked)
		}
	})
}

// A driver that is away takes nobody along: its groups stay as they were for a
// while, and go then.
func TestProviderIsAway(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	var mu sync.Mutex
	later := time.Duration(0)
	r := f.gateway(func() time.Time {
		mu.Lock()
		defer mu.Unlock()

		return time.Now().Add(later)
	})
	r.deployment("workers", 1, size("1", "5"))
	both := []string{poolID, r.id("workers")}
	slices.Sort(both)
	r.sees(func(ids []string) bool { slices.Sort(ids); return slices.Equal(ids, both) })
	f.stop()
	if err := r.grow(poolID, 1); status.Code(err) != codes.Unavailable {
		t.Errorf("a driver that is away: %v", err)
	}
	if got := r.sizeOf(poolID); got != 2 {
		t.Errorf("size %d, want the last that was told", got)
	}
	if err := r.grow(r.id("workers"), 1); err != nil {
		t.Error("another group:", err)
	}
	mu.Lock()
	later = 2 * time.Minute
	mu.Unlock()
	r.sees(func(ids []string) bool { return len(ids) == 1 && ids[0] == r.id("workers") })
	node, err := r.NodeGroupForNode(t.Context(), &externalgrpc.NodeGroupForNodeRequest{Node: &externalgrpc.ExternalGrpcNode{ProviderID: "acme:///1"}})
	if err != nil || node.GetNodeGroup().GetId() != "" {
		t.Errorf("a node of a group that is left out: %v, %v; want nobody's", node, err)
	}
	f.start()
	r.sees(func(ids []string) bool { return len(ids) == 2 })
}

// One group whose instances cannot be told keeps those it had.
func TestProvidedGroupOfUnknownInstances(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	r := f.gateway(nil)
	f.change(func() {
		f.group.TargetSize = 4
		f.wrong = func(req *nodegroupv1.Envelope) *nodegroupv1.Envelope {
			if req.GetInstances() == nil {
				return nil
			}

			return failed(driverv1.Code_CODE_INTERNAL)
		}
	})
	bustest.Eventually(t, "the new size is known", func() bool {
		if _, err := r.Refresh(t.Context(), &externalgrpc.RefreshRequest{}); err != nil {
			t.Fatal(err)
		}

		return r.sizeOf(poolID) == 4
	})
	nodes, err := r.NodeGroupNodes(t.Context(), &externalgrpc.NodeGroupNodesRequest{Id: poolID})
	if err != nil || len(nodes.GetInstances()) != 2 {
		t.Errorf("%v, %v; want the two known before", nodes, err)
	}
}
