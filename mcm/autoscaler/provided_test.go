package autoscaler_test

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/proto/externalgrpc"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestProvidedGroupIsAnsweredFor(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.list = append(f.list, &driverv1.NodeGroupInstance{
		Id: "slot-3", State: driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_CREATING,
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
	if labels := node.Labels; labels["kubernetes.io/os"] != "linux" || labels["kubernetes.io/arch"] != "amd64" ||
		node.Status.Capacity.Pods().Value() != 110 || node.Status.Allocatable.Pods().Value() != 110 {
		t.Errorf("template %v: without what each node has nothing fits", node)
	}
	good := &driverv1.NodeGroupTemplate{
		Capacity: map[string]string{"cpu": "4", "memory": "16Gi", "pods": "30"}, Labels: map[string]string{"kubernetes.io/arch": "arm64"},
	}
	for _, faulty := range []*driverv1.NodeGroupTemplate{nil, {Capacity: map[string]string{"cpu": "lots", "memory": "16Gi"}}} {
		for _, template := range []*driverv1.NodeGroupTemplate{faulty, good} {
			f.change(func() { f.group.Template = template })
			bustest.Eventually(t, "the template is known", func() bool {
				r.sees(func(ids []string) bool { return len(ids) == 1 })
				answer, err := r.NodeGroupTemplateNodeInfo(t.Context(), &externalgrpc.NodeGroupTemplateNodeInfoRequest{Id: poolID})
				node := &corev1.Node{}
				if err != nil || node.Unmarshal(answer.GetNodeInfo()) != nil {
					t.Fatalf("%v, %v: a group that is listed and has no template ends all scaling up", answer, err)
				}
				closed := node.Status.Allocatable.Cpu().IsZero() && len(node.Spec.Taints) == 1

				return closed == (template != good) && (closed || node.Labels["kubernetes.io/arch"] == "arm64" && node.Status.Allocatable.Pods().Value() == 30)
			})
		}
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
	f.change(func() {
		f.enter = func(req *driverv1.NodeGroupsRequest) {
			if req.GetResize() == nil {
				return
			}
			f.change(func() { // the gateway knows 2 and 5
				if f.group.GetMaxSize() == 5 {
					f.group.TargetSize, f.group.MaxSize = 3, 6
				}
			})
		}
	})
	if err := r.grow(poolID, 1); err != nil || r.sizeOf(poolID) != 4 {
		t.Fatalf("%v, size %d; want 4", err, r.sizeOf(poolID))
	}
	groups, err1 := r.NodeGroups(t.Context(), &externalgrpc.NodeGroupsRequest{})
	node, err2 := r.NodeGroupForNode(t.Context(), &externalgrpc.NodeGroupForNodeRequest{Node: &externalgrpc.ExternalGrpcNode{ProviderID: "acme:///1"}})
	if diff := cmp.Diff(groups.GetNodeGroups(), []*externalgrpc.NodeGroup{node.GetNodeGroup()}, protocmp.Transform()); diff != "" || err1 != nil || err2 != nil {
		t.Errorf("%v, %v; the list has the group otherwise than its node:\n%s", err1, err2, diff)
	}
	if err := r.grow(poolID, 3); status.Code(err) != codes.OutOfRange {
		t.Errorf("above the maximum: %v", err)
	}
	f.change(func() {
		f.asked = nil
		f.wrong = func(req *driverv1.NodeGroupsRequest) *driverv1.Result {
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

// What never came goes as far as the minimum lets it, and a node that is named twice
// once.
func TestProvidedGroupGivesUpWhatNeverCame(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.group.TargetSize = 4
	f.list = nil
	var fakes []*externalgrpc.ExternalGrpcNode
	for _, id := range []string{"slot-1", "slot-2", "slot-3", "slot-4"} {
		f.list = append(f.list, &driverv1.NodeGroupInstance{Id: id, State: driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_CREATING})
		one := &externalgrpc.ExternalGrpcNode{
			Name: id, ProviderID: id, Annotations: map[string]string{"k8s.io/cluster-autoscaler/fake-node-reason": "create-error"},
		}
		fakes = append(fakes, one, one)
	}
	r := f.gateway(nil)
	remove := func(nodes []*externalgrpc.ExternalGrpcNode, want ...string) {
		t.Helper()
		f.change(func() { f.asked = nil })
		if _, err := r.NodeGroupDeleteNodes(t.Context(), &externalgrpc.NodeGroupDeleteNodesRequest{Id: poolID, Nodes: nodes}); err != nil {
			t.Fatal(err)
		}
		f.change(func() {
			if len(f.asked) != 1 || !slices.Equal(f.asked[0].GetDelete().GetInstances(), want) {
				t.Errorf("the driver was asked %v, want once, to delete %v", f.asked, want)
			}
		})
	}
	remove(fakes, "slot-1", "slot-2", "slot-3")
	if got := r.sizeOf(poolID); got != 1 {
		t.Errorf("size %d, want the minimum", got)
	}
	remove(fakes[6:], "slot-4") // whether it may is the driver's to say
}

// A driver that takes no step, whatever size it is from, is asked a few times and then
// quoted: its clock may be wrong, so that each request is too old for it.
func TestProvidedGroupTakesNoStep(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	r := f.gateway(nil)
	f.change(func() {
		f.wrong = func(req *driverv1.NodeGroupsRequest) *driverv1.Result {
			if req.GetResize() == nil {
				return nil
			}

			return failed(driverv1.Code_CODE_ABORTED)
		}
	})
	if err := r.grow(poolID, 1); status.Code(err) != codes.Aborted || !strings.Contains(err.Error(), "as told") {
		t.Errorf("%v, want what the driver says", err)
	}
	f.change(func() {
		if n := len(f.asked); n != 5 {
			t.Errorf("it was asked %d times, want 5", n)
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
		f.wrong = func(req *driverv1.NodeGroupsRequest) *driverv1.Result {
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

// A driver whose cloud is slow is asked about many groups at a time.
func TestProvidedGroupsAreAskedForTogether(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	const together = 8
	enter := turnstile(together)
	f.change(func() {
		f.lists(20)
		f.enter = func(req *driverv1.NodeGroupsRequest) {
			if req.GetInstances() != nil {
				enter()
			}
		}
	})
	f.gatewayOf(nil).sees(func(ids []string) bool { return len(ids) == 21 })
}

// Groups whose instances nobody tells do not keep others from being seen, nor their
// provider from being taken for one that lives.
func TestProvidedGroupsThatAreSilent(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	r := f.gateway(nil)
	stuck := make(chan struct{})
	t.Cleanup(func() { close(stuck) })
	f.change(func() {
		f.lists(3)
		f.group.TargetSize = 4
		f.enter = func(req *driverv1.NodeGroupsRequest) {
			if id := req.GetInstances().GetGroup(); id == "pool" || id == "more-0" {
				<-stuck
			}
		}
	})
	r.sees(func(ids []string) bool { return len(ids) == 3 && !slices.Contains(ids, "provider:acme/more-0") })
	bustest.Eventually(t, "the size of the silent one is known", func() bool {
		if _, err := r.Refresh(t.Context(), &externalgrpc.RefreshRequest{}); err != nil {
			t.Fatal(err)
		}

		return r.sizeOf(poolID) == 4
	})
	// A size that another one has changed is asked for within the call, and nothing else.
	f.change(func() { f.group.TargetSize = 3 })
	if err := r.grow(poolID, 1); err != nil || r.sizeOf(poolID) != 4 {
		t.Errorf("%v, size %d; want 4", err, r.sizeOf(poolID))
	}
}

// The cluster-autoscaler deletes many nodes by as many calls at once, which a driver
// gets so.
func TestProvidedGroupLosesManyNodesAtOnce(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	const nodes = 10
	f.group.TargetSize, f.group.MinSize, f.group.MaxSize, f.list = nodes, 0, nodes, nil
	for i := range nodes {
		f.list = append(f.list, &driverv1.NodeGroupInstance{Id: fmt.Sprintf("acme:///%d", i), State: driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_RUNNING})
	}
	r := f.gateway(nil)
	enter := turnstile(nodes)
	f.change(func() {
		f.enter = func(req *driverv1.NodeGroupsRequest) {
			if req.GetDelete() != nil {
				enter()
			}
		}
	})
	var calls sync.WaitGroup
	for i := range nodes {
		calls.Go(func() {
			id := fmt.Sprintf("acme:///%d", i)
			_, err := r.NodeGroupDeleteNodes(t.Context(), &externalgrpc.NodeGroupDeleteNodesRequest{
				Id: poolID, Nodes: []*externalgrpc.ExternalGrpcNode{{Name: id, ProviderID: id}},
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	calls.Wait()
	if got := r.sizeOf(poolID); got != 0 {
		t.Errorf("size %d, want 0", got)
	}
	for _, i := range r.instances(poolID) {
		if got := i.GetStatus().GetInstanceState(); got != externalgrpc.InstanceStatus_instanceDeleting {
			t.Errorf("%s is %s", i.GetId(), got)
		}
	}
}

// What a driver sends that was not made with the SDK is held to the contract.
func TestProvidedGroupsOfAFaultyDriver(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	bad := func(change func(*driverv1.NodeGroup)) *driverv1.NodeGroup {
		g := &driverv1.NodeGroup{Id: fmt.Sprintf("bad-%d", len(f.more)), MaxSize: 5}
		change(g)

		return g
	}
	for _, change := range []func(*driverv1.NodeGroup){
		func(g *driverv1.NodeGroup) { g.Id = "" },
		func(g *driverv1.NodeGroup) { g.Id = "with space" },
		func(g *driverv1.NodeGroup) { g.MinSize = 6 },
		func(g *driverv1.NodeGroup) { g.MinSize = -1 },
		func(g *driverv1.NodeGroup) { g.MaxSize = 0 },
		func(g *driverv1.NodeGroup) { g.TargetSize = -1 },
		func(g *driverv1.NodeGroup) {
			g.Template = &driverv1.NodeGroupTemplate{Capacity: map[string]string{"cpu": "1"}}
		},
		func(g *driverv1.NodeGroup) { g.Id, g.TargetSize = "pool", 5 }, // there twice: the first counts
	} {
		f.more = append(f.more, bad(change))
	}
	f.more = append(f.more, &driverv1.NodeGroup{Id: "good", MaxSize: 1})
	nan := math.NaN()
	f.group.Options = &driverv1.NodeGroupOptions{
		ScaleDownUtilizationThreshold: &nan, MaxNodeProvisionTime: durationpb.New(-time.Minute), ScaleDownUnneededTime: durationpb.New(time.Minute),
	}
	f.list[1].State = 7 // of a later version
	r := f.gatewayOf(nil)
	r.sees(func(ids []string) bool { return slices.Equal(ids, []string{"provider:acme/good", poolID}) })
	if got := r.sizeOf(poolID); got != 2 {
		t.Errorf("size %d, want 2", got)
	}
	if got := r.instances(poolID)[1].GetStatus().GetInstanceState(); got != externalgrpc.InstanceStatus_unspecified {
		t.Errorf("a state that nobody knows is %s", got)
	}
	answer, err := r.NodeGroupGetOptions(t.Context(), &externalgrpc.NodeGroupAutoscalingOptionsRequest{
		Id: poolID, Defaults: &externalgrpc.NodeGroupAutoscalingOptions{ScaleDownUtilizationThreshold: 0.5, MaxNodeProvisionDuration: durationpb.New(time.Hour)},
	})
	o := answer.GetNodeGroupAutoscalingOptions()
	if err != nil || o.GetScaleDownUtilizationThreshold() != 0.5 || o.GetMaxNodeProvisionDuration().AsDuration() != time.Hour ||
		o.GetScaleDownUnneededDuration().AsDuration() != time.Minute {
		t.Errorf("options %v, %v; want the defaults in place of the two that make no sense", o, err)
	}
	for name, list := range map[string][]*driverv1.NodeGroupInstance{
		"an empty id": {{Id: "acme:///1"}, {}},
		"an id twice": {{Id: "acme:///1"}, {Id: "acme:///1"}},
	} {
		asked := make(chan struct{}, 99)
		f.change(func() {
			f.list = list
			f.enter = func(req *driverv1.NodeGroupsRequest) {
				if req.GetInstances().GetGroup() == "pool" {
					asked <- struct{}{}
				}
			}
		})
		for range 2 { // the answer to the first is in when the second is asked for
			bustest.Eventually(t, "the driver is asked", func() bool {
				r.sees(func([]string) bool { return true })

				return len(asked) > 0
			})
			<-asked
		}
		r.sees(func([]string) bool { return true })
		if got := r.instances(poolID); len(got) != 2 || got[1].GetId() != "acme:///2" {
			t.Errorf("%s: instances %v, want those before", name, got)
		}
		node, err := r.NodeGroupForNode(t.Context(), &externalgrpc.NodeGroupForNodeRequest{Node: &externalgrpc.ExternalGrpcNode{}})
		if err != nil || node.GetNodeGroup().GetId() != "" {
			t.Errorf("%s: a node without name and id is %v's, %v", name, node, err)
		}
	}
}

// A provider cannot take another one's nodes for its own; as nobody can tell who of
// the two is right, they are nobody's.
func TestProvidersClaimOneInstance(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	other := &fleet{
		t: t, url: f.url, provider: "other", group: &driverv1.NodeGroup{Id: "pool", MaxSize: 5, TargetSize: 1},
		list: []*driverv1.NodeGroupInstance{{Id: "acme:///1", State: driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_RUNNING}},
	}
	other.start()
	r := f.gatewayOf(nil)
	r.sees(func(ids []string) bool { return len(ids) == 2 })
	for id, want := range map[string]string{"acme:///1": "", "acme:///2": poolID} {
		node, err := r.NodeGroupForNode(t.Context(), &externalgrpc.NodeGroupForNodeRequest{Node: &externalgrpc.ExternalGrpcNode{Name: id, ProviderID: id}})
		if err != nil || node.GetNodeGroup().GetId() != want {
			t.Errorf("%s is of %v, %v; want %q", id, node.GetNodeGroup(), err, want)
		}
	}
}
