package autoscaler_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

func TestWhatIsANodeGroup(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(r *rig, c *autoscaler.Config) {
		for name, bounds := range map[string][2]int32{"named": {2, 7}, "hidden": {0, 0}} {
			c.Groups = append(c.Groups, autoscaler.Group{
				Deployment: client.ObjectKey{Namespace: r.namespace, Name: name}, Min: bounds[0], Max: bounds[1],
			})
		}
	})
	if _, err := r.NodeGroups(t.Context(), &externalgrpc.NodeGroupsRequest{}); err != nil {
		t.Error("the cluster-autoscaler asks before its first Refresh:", err)
	}
	r.deployment("annotated", 1, size("1", "5"))
	r.deployment("from-zero", 0, map[string]string{autoscaler.AnnotationKeyMax: "5"})
	r.deployment("old-prefix", 1, map[string]string{
		"cluster.k8s.io/cluster-api-autoscaler-node-group-min-size": "1", "cluster.k8s.io/cluster-api-autoscaler-node-group-max-size": "2",
	})
	r.deployment("named", 1, size("1", "5"))
	r.deployment("hidden", 1, size("1", "5"))
	r.deployment("unmarked", 1, nil)
	invalid := map[string]map[string]string{
		"no-max": {autoscaler.AnnotationKeyMin: "1"}, "zero": size("0", "0"), "upside-down": size("5", "1"), "negative": size("-1", "5"), "words": size("one", "two"),
	}
	for name, annotations := range invalid {
		r.deployment(name, 1, annotations)
	}
	r.refresh(4, 0)
	got, err := r.NodeGroups(t.Context(), &externalgrpc.NodeGroupsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	group := func(name string, lower, upper int32) *externalgrpc.NodeGroup {
		return &externalgrpc.NodeGroup{
			Id: r.id(name), MinSize: lower, MaxSize: upper, Debug: "MachineDeployment " + r.id(name) + " of class small",
		}
	}
	want := []*externalgrpc.NodeGroup{group("annotated", 1, 5), group("from-zero", 0, 5), group("named", 2, 7), group("old-prefix", 1, 2)}
	if diff := cmp.Diff(want, got.GetNodeGroups(), protocmp.Transform()); diff != "" {
		t.Errorf("groups (-want +got):\n%s", diff)
	}
	for name := range invalid {
		r.eventually("an Event on "+name, func() bool {
			if _, err := r.Refresh(t.Context(), &externalgrpc.RefreshRequest{}); err != nil {
				t.Fatal(err)
			}

			return len(r.warnings(name, "cluster.x-k8s.io/cluster-api-autoscaler-node-group-")) > 0
		})
	}
}

func TestParseGroup(t *testing.T) {
	t.Parallel()
	got, err := autoscaler.ParseGroup("1:5:shop.workers.a")
	want := autoscaler.Group{Deployment: client.ObjectKey{Namespace: "shop", Name: "workers.a"}, Min: 1, Max: 5}
	if err != nil || got != want {
		t.Errorf("got %v, %v", got, err)
	}
	for _, text := range []string{"", "1:5", "1:5:workers", "1:5:.workers", "1:5:shop.", "5:1:a.b", "-1:1:a.b", "a:b:c.d", "1:99999999999:a.b"} {
		if _, err := autoscaler.ParseGroup(text); err == nil || !strings.Contains(err.Error(), "want") {
			t.Errorf("%q: want an error that says what is wanted, got: %v", text, err)
		}
	}
}

func TestNodeGroupForNode(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.deployment("a", 3, size("1", "5"))
	r.deployment("unmarked", 1, nil)
	registered := r.joined("a", "registered")
	r.machine("a", "coming")
	others := r.joined("unmarked", "others")
	r.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: r.namespace + "-foreign"}})
	poser := &externalgrpc.ExternalGrpcNode{Name: r.namespace + "-poser", ProviderID: registered.GetProviderID()}
	r.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: poser.GetName()}, Spec: corev1.NodeSpec{ProviderID: poser.GetProviderID()}})
	r.refresh(1, 2)
	node := func(name, id string) *externalgrpc.ExternalGrpcNode {
		return &externalgrpc.ExternalGrpcNode{Name: name, ProviderID: id}
	}
	cases := map[string]struct {
		reason string
		node   *externalgrpc.ExternalGrpcNode
		ours   bool
	}{
		"registered":     {"it is the machine's Node", registered, true},
		"by name":        {"a cloud controller sets the provider id later", node(registered.GetName(), ""), true},
		"provider id":    {"the machine's own spelling is as good", node(registered.GetName(), "virtual:///elsewhere/"+r.namespace+"/registered"), true},
		"not seen yet":   {"the cluster-autoscaler makes up a node for the instance", node(registered.GetProviderID(), registered.GetProviderID()), true},
		"a copy":         {"it stands for a machine to come", node("template-node-for-"+r.id("a")+"-123-upcoming-0", registered.GetProviderID()), true},
		"poser":          {"it has chosen another machine's provider id, which would go for it", poser, false},
		"unregistered":   {"it goes by its placeholder", r.fake("coming"), true},
		"gone":           {"nothing has that placeholder any more", r.fake("gone"), false},
		"other machine":  {"its deployment is no group", others, false},
		"foreign":        {"it belongs to no machine", node(r.namespace+"-foreign", "aws://x"), false},
		"another Node":   {"a later one of the same name", node(registered.GetName(), "virtual://another"), false},
		"template":       {"the cluster-autoscaler asks about nodes to come", node("template-node-for-"+r.id("a")+"-123-upcoming-0", ""), false},
		"nameless":       {"an error would stop every scale-up", node("", ""), false},
		"no node at all": {"an error would stop every scale-up", nil, false},
	}
	for name, tc := range cases {
		got, err := r.NodeGroupForNode(t.Context(), &externalgrpc.NodeGroupForNodeRequest{Node: tc.node})
		if err != nil {
			t.Errorf("%s: %v: %s", name, err, tc.reason)

			continue
		}
		if g := got.GetNodeGroup(); g == nil || (g.GetId() != "") != tc.ours {
			t.Errorf("%s: got %v: %s", name, g, tc.reason)
		} else if tc.ours && (g.GetId() != r.id("a") || g.GetMinSize() != 1 || g.GetMaxSize() != 5) {
			t.Errorf("%s: the group must come with its sizes, got %v", name, g)
		}
	}
}

func TestNodeGroupNodes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.deployment("a", 9, map[string]string{
		autoscaler.AnnotationKeyMax: "9", v1alpha1.AnnotationKeyTriggerDeletion: "listed~2026-08-11T07:00:00Z",
	})
	failed := func(code string, phase v1alpha1.MachinePhase) func(*v1alpha1.Machine) {
		return func(m *v1alpha1.Machine) {
			m.Status.CurrentStatus.Phase = phase
			m.Status.LastOperation = v1alpha1.LastOperation{
				Type: v1alpha1.MachineOperationCreate, State: v1alpha1.MachineStateFailed, ErrorCode: code, Description: "why",
			}
		}
	}
	type instance struct {
		State externalgrpc.InstanceStatus_InstanceState
		Code  string
		Class int32
	}
	const running, creating, deleting = externalgrpc.InstanceStatus_instanceRunning, externalgrpc.InstanceStatus_instanceCreating,
		externalgrpc.InstanceStatus_instanceDeleting
	want := map[string]instance{r.joined("a", "running").GetProviderID(): {State: running}}
	add := func(name string, i instance, change func(*v1alpha1.Machine)) {
		r.machine("a", name, change)
		want["requested://"+r.namespace+"/"+name] = i
	}
	add("creating", instance{State: creating}, func(*v1alpha1.Machine) {})
	add("exhausted", instance{creating, "ResourceExhausted", 1}, failed("ResourceExhausted", v1alpha1.MachineCrashLoopBackOff))
	add("refused", instance{creating, "PermissionDenied", 99}, failed("PermissionDenied", v1alpha1.MachineCrashLoopBackOff))
	add("passing", instance{State: creating}, failed("Unavailable", v1alpha1.MachineCrashLoopBackOff))
	add("given-up", instance{creating, "Unavailable", 99}, failed("Unavailable", v1alpha1.MachineFailed))
	add("never-joined", instance{creating, "Unknown", 99}, failed("", v1alpha1.MachineFailed))
	add("listed", instance{State: deleting}, func(*v1alpha1.Machine) {})
	add("marked", instance{State: deleting}, func(m *v1alpha1.Machine) {
		m.Annotations = map[string]string{v1alpha1.AnnotationKeyMarkedForDeletionTime: "2026-08-11T07:00:00Z"}
	})
	terminating := r.joined("a", "terminating", func(m *v1alpha1.Machine) { m.Status.CurrentStatus.Phase = v1alpha1.MachineTerminating })
	want[terminating.GetProviderID()] = instance{State: deleting}
	got := map[string]instance{}
	r.refresh(1, len(want))
	r.eventually("the status of all machines is seen", func() bool {
		r.refresh(1, len(want))
		got = map[string]instance{}
		for _, i := range r.instances(r.id("a")) {
			s := i.GetStatus()
			got[i.GetId()] = instance{s.GetInstanceState(), s.GetErrorInfo().GetErrorCode(), s.GetErrorInfo().GetInstanceErrorClass()}
		}

		return cmp.Equal(want, got)
	})
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("instances (-want +got):\n%s", diff)
	}
	_, err := r.NodeGroupNodes(t.Context(), &externalgrpc.NodeGroupNodesRequest{Id: "none/none"})
	r.wantCode(err, codes.NotFound)
}

// An invalid option is reported once, and the cluster-autoscaler's own
// holds: it asks six times for each node and loop.
func TestOptions_Faulty(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	const mcm, capi = "autoscaler.gardener.cloud/", "cluster.x-k8s.io/autoscaling-options-"
	faulty := map[string]string{ // each is the only one of its deployment
		mcm + "scale-down-utilization-threshold":     "NaN",
		capi + "scaledownutilizationthreshold":       "+Inf",
		capi + "scaledowngpuutilizationthreshold":    "-0.1",
		mcm + "scale-down-gpu-utilization-threshold": "1.5",
		mcm + "max-node-provision-time":              "0s",
		capi + "maxnodeprovisiontime":                "-5m",
		capi + "scaledownunneededtime":               "soon",
		mcm + "scale-down-unready-time":              "-1s",
	}
	names := map[string]string{}
	for key, value := range faulty {
		names[key] = fmt.Sprintf("faulty-%d", len(names))
		r.deployment(names[key], 1, map[string]string{autoscaler.AnnotationKeyMax: "5", key: value})
	}
	r.deployment("mixed", 1, map[string]string{
		autoscaler.AnnotationKeyMax: "5", mcm + "scale-down-unneeded-time": "0s", mcm + "max-node-provision-time": "0s",
	})
	r.refresh(len(faulty)+1, 0)
	options := func(name string) (*externalgrpc.NodeGroupAutoscalingOptionsResponse, error) {
		return r.NodeGroupGetOptions(t.Context(), &externalgrpc.NodeGroupAutoscalingOptionsRequest{
			Id: r.id(name), Defaults: &externalgrpc.NodeGroupAutoscalingOptions{
				ScaleDownUnneededDuration: durationpb.New(time.Minute), MaxNodeProvisionDuration: durationpb.New(time.Hour),
			},
		})
	}
	for key, name := range names {
		for range 3 {
			_, err := options(name)
			r.wantCode(err, codes.Unimplemented)
		}
		r.eventually("an Event on "+name, func() bool { return len(r.warnings(name, key)) > 0 })
	}
	got, err := options("mixed")
	o := got.GetNodeGroupAutoscalingOptions()
	if err != nil || o.GetScaleDownUnneededDuration().AsDuration() != 0 || o.GetMaxNodeProvisionDuration().AsDuration() != time.Hour {
		t.Errorf("%v, %v; want the sound option, and the default for the other", o, err)
	}
	for range 3 {
		r.refresh(len(faulty)+1, 0)
	}
	r.deployment("last", 1, map[string]string{autoscaler.AnnotationKeyMax: "none"})
	r.eventually("an Event on the last one", func() bool {
		r.refresh(len(faulty)+1, 0)

		return len(r.warnings("last", "none")) > 0
	})
	for key, name := range names {
		if list := r.warnings(name, key); len(list) != 1 || list[0].Count > 1 {
			t.Errorf("%s: reported %v, want once", key, list)
		}
	}
}

// A group without a template can only grow by hand from nothing: its deployment says
// why, once, and again after it was well.
func TestTemplate_None(t *testing.T) {
	t.Parallel()
	const capacity = "capacity.cluster-autoscaler.kubernetes.io/"
	r := newRig(t)
	good := map[string]string{autoscaler.AnnotationKeyMax: "5", capacity + "cpu": "4", capacity + "memory": "16Gi"}
	with := func(key, value string) map[string]string {
		all := maps.Clone(good)
		all[key] = value

		return all
	}
	texts := map[string]string{}
	for name, of := range map[string]struct {
		annotations map[string]string
		text        string
	}{
		"good":    {good, ""},
		"unknown": {size("0", "5"), "nodeTemplate of MachineClass small"},
		"cpu":     {with(capacity+"cpu", "lots"), capacity + "cpu"},
		"labels":  {with(capacity+"labels", "=a"), capacity + "labels"},
		"taints":  {with(capacity+"taints", "a=b"), capacity + "taints"},
	} {
		r.deployment(name, 0, of.annotations)
		texts[name] = of.text
	}
	r.refresh(len(texts), 0)
	ask := func(name string) *corev1.Node {
		t.Helper()
		answer, err := r.NodeGroupTemplateNodeInfo(t.Context(), &externalgrpc.NodeGroupTemplateNodeInfoRequest{Id: r.id(name)})
		node := &corev1.Node{}
		if err != nil || node.Unmarshal(answer.GetNodeInfo()) != nil {
			t.Fatalf("%s: %v, %v", name, answer, err)
		}

		return node
	}
	for name, text := range texts {
		for range 3 {
			r.refresh(len(texts), 0)
			if node := ask(name); node.Status.Allocatable.Pods().IsZero() == (text == "") {
				t.Errorf("%s takes %s pods", name, node.Status.Allocatable.Pods())
			}
		}
		if text != "" {
			r.eventually("an Event on "+name, func() bool { return len(r.warnings(name, text)) > 0 })
		}
	}
	for name, text := range texts {
		if list := r.warnings(name, text); text == "" && len(list) != 0 || text != "" && (len(list) != 1 || list[0].Count > 1) {
			t.Errorf("%s: reported %v, want %q once", name, list, text)
		}
	}
}

// warnings are the Events on a deployment that have a text.
func (r *rig) warnings(name, text string) []corev1.Event {
	r.t.Helper()
	events := &corev1.EventList{}
	if err := r.List(r.t.Context(), events, client.InNamespace(r.namespace)); err != nil {
		r.t.Fatal(err)
	}

	return slices.DeleteFunc(events.Items, func(e corev1.Event) bool {
		return e.InvolvedObject.Name != name || e.Type != corev1.EventTypeWarning || !strings.Contains(e.Message, text)
	})
}

func TestExtras(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(_ *rig, c *autoscaler.Config) { c.GPULabel = "gpu" })
	ctx := t.Context()
	label, err := r.GPULabel(ctx, &externalgrpc.GPULabelRequest{})
	if err != nil || label.GetLabel() != "gpu" {
		t.Errorf("GPULabel: %v, %v", label, err)
	}
	if _, err := r.GetAvailableGPUTypes(ctx, &externalgrpc.GetAvailableGPUTypesRequest{}); err != nil {
		t.Error(err)
	}
	if _, err := r.Cleanup(ctx, &externalgrpc.CleanupRequest{}); err != nil {
		t.Error(err)
	}
	if _, err := r.Refresh(ctx, &externalgrpc.RefreshRequest{}); err != nil {
		t.Error("Cleanup of one cluster-autoscaler is nothing to another:", err)
	}
	_, err = r.PricingNodePrice(ctx, &externalgrpc.PricingNodePriceRequest{})
	r.wantCode(err, codes.Unimplemented)
	_, err = r.PricingPodPrice(ctx, &externalgrpc.PricingPodPriceRequest{})
	r.wantCode(err, codes.Unimplemented)
}
