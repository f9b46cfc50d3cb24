package autoscaler_test

import (
	"bytes"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/autoscaler"
)

// These tests speak to the gateway in bytes, with the numbers that the
// cluster-autoscaler's versions have compiled in, and not through our own contract.

// A rawCodec passes bytes as they are.
type rawCodec struct{}

func (rawCodec) Name() string                       { return "proto" }
func (rawCodec) Marshal(v any) ([]byte, error)      { return *v.(*[]byte), nil }
func (rawCodec) Unmarshal(data []byte, v any) error { *v.(*[]byte) = bytes.Clone(data); return nil }

func (r *rig) raw(method string, request []byte) ([]byte, error) {
	var reply []byte
	err := r.conn.Invoke(r.t.Context(), "/clusterautoscaler.cloudprovider.v1.externalgrpc.CloudProvider/"+method,
		&request, &reply, grpc.ForceCodec(rawCodec{}))

	return reply, err
}

func field(b []byte, number protowire.Number, content []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, number, protowire.BytesType), content)
}

func varint(b []byte, number protowire.Number, v uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, number, protowire.VarintType), v)
}

func double(b []byte, number protowire.Number, v float64) []byte {
	return protowire.AppendFixed64(protowire.AppendTag(b, number, protowire.Fixed64Type), math.Float64bits(v))
}

// oldDuration is a metav1.Duration: nanoseconds. newDuration is protobuf's own.
func oldDuration(d time.Duration) []byte { return varint(nil, 1, uint64(d)) }
func newDuration(d time.Duration) []byte { return varint(nil, 1, uint64(d/time.Second)) }

func TestWire_Sizes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.deployment("a", 3, size("1", "5"))
	r.refresh(1, 0)
	id := []byte(r.id("a"))

	group := field(nil, 1, id)
	group = varint(varint(group, 2, 1), 3, 5)
	group = field(group, 4, []byte("MachineDeployment "+r.id("a")+" of class small"))
	cases := map[string]struct{ request, want []byte }{
		"NodeGroups":                  {nil, field(nil, 1, group)},
		"NodeGroupForNode":            {field(nil, 1, field(nil, 2, []byte("foreign"))), field(nil, 1, nil)},
		"NodeGroupTargetSize":         {field(nil, 1, id), varint(nil, 1, 3)},
		"NodeGroupIncreaseSize":       {field(varint(nil, 1, 2), 2, id), nil},
		"NodeGroupDecreaseTargetSize": {field(varint(nil, 1, math.MaxUint64), 2, id), nil}, // -1
		"NodeGroupDeleteNodes":        {field(field(nil, 1, field(nil, 1, []byte("requested://a/gone"))), 2, id), nil},
		"NodeGroupNodes":              {field(nil, 1, id), nil},
		"Refresh":                     {nil, nil},
		"Cleanup":                     {nil, nil},
		"GPULabel":                    {nil, nil},
		"GetAvailableGPUTypes":        {nil, nil},
	}
	for _, method := range []string{
		"NodeGroups", "NodeGroupForNode", "NodeGroupTargetSize", "NodeGroupIncreaseSize", "NodeGroupDecreaseTargetSize",
		"NodeGroupDeleteNodes", "NodeGroupNodes", "Refresh", "Cleanup", "GPULabel", "GetAvailableGPUTypes",
	} {
		got, err := r.raw(method, cases[method].request)
		if err != nil || !bytes.Equal(got, cases[method].want) {
			t.Errorf("%s: got %x, %v; want %x", method, got, err, cases[method].want)
		}
	}
	if got := r.stored("a").Spec.Replicas; got != 4 {
		t.Errorf("%d replicas after 3 + 2 - 1", got)
	}
}

func TestWire_Instances(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.deployment("a", 1, size("1", "5"))
	r.machine("a", "m1", func(m *v1alpha1.Machine) {
		m.Status.LastOperation = v1alpha1.LastOperation{
			Type: v1alpha1.MachineOperationCreate, State: v1alpha1.MachineStateFailed, ErrorCode: "ResourceExhausted", Description: "none left " + strings.Repeat("ä", 1000), // cut to 512 bytes
		}
	})
	fault := field(field(nil, 1, []byte("ResourceExhausted")), 2, []byte("none left "+strings.Repeat("ä", 251)+"…"))
	fault = varint(fault, 3, 1)
	want := field(nil, 1, field(field(nil, 1, []byte("requested://"+r.namespace+"/m1")), 2, field(varint(nil, 1, 2), 2, fault)))
	var got []byte
	r.eventually("the failed machine is listed", func() bool {
		r.refresh(1, 1)
		var err error
		if got, err = r.raw("NodeGroupNodes", field(nil, 1, []byte(r.id("a")))); err != nil {
			t.Fatal(err)
		}

		return len(got) >= len(want)
	})
	if !bytes.Equal(got, want) {
		t.Errorf("got %x, want %x", got, want)
	}
}

// Prices are asked for with --expander=price: Unimplemented, and no other code, has
// the cluster-autoscaler go on without.
func TestWire_Prices(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	node, at := field(nil, 2, []byte("n")), newDuration(time.Minute) // a time is seconds, as well
	pod := field(nil, 1, nil)
	for name, tc := range map[string]struct {
		method  string
		request []byte
	}{
		"node, until 1.34.1": {"PricingNodePrice", field(field(field(nil, 1, node), 2, at), 3, at)},
		"node, since 1.35":   {"PricingNodePrice", field(field(field(nil, 1, node), 4, at), 5, at)},
		"pod, until 1.34.1":  {"PricingPodPrice", field(field(field(nil, 1, pod), 2, at), 3, at)},
		"pod, since 1.35":    {"PricingPodPrice", field(field(field(nil, 4, pod), 5, at), 6, at)},
	} {
		if _, err := r.raw(tc.method, tc.request); status.Code(err) != codes.Unimplemented {
			t.Errorf("%s: %v, want Unimplemented", name, err)
		}
	}
}

func TestWire_Options(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.deployment("plain", 1, size("1", "5"))
	r.deployment("faulty", 1, map[string]string{
		autoscaler.AnnotationKeyMax: "5", "cluster.x-k8s.io/autoscaling-options-scaledownunneededtime": "soon",
	})
	r.deployment("own", 1, map[string]string{
		autoscaler.AnnotationKeyMax: "5",
		"cluster.x-k8s.io/autoscaling-options-scaledownutilizationthreshold": "0.25",
		"cluster.x-k8s.io/autoscaling-options-scaledownunneededtime":         "7m",
		"autoscaler.gardener.cloud/scale-down-unneeded-time":                 "3m", // wins
		"autoscaler.gardener.cloud/scale-down-gpu-utilization-threshold":     "0.125",
	})
	r.refresh(3, 0)
	shared := func(utilization, gpu float64) []byte { return double(double(nil, 1, utilization), 2, gpu) }
	older := func(b []byte, unneeded, unready, provision time.Duration) []byte {
		return field(field(field(b, 3, oldDuration(unneeded)), 4, oldDuration(unready)), 5, oldDuration(provision))
	}
	newer := func(b []byte, unneeded, unready, provision time.Duration) []byte {
		return field(field(field(b, 8, newDuration(unneeded)), 9, newDuration(unready)), 10, newDuration(provision))
	}
	request := func(name string, defaults []byte) []byte {
		return field(field(nil, 1, []byte(r.id(name))), 2, defaults)
	}
	const minute = time.Minute
	// Whatever has no value of its own comes back as it was given, in both dialects.
	want := older(shared(0.25, 0.125), 3*minute, 20*minute, 15*minute)
	want = varint(want, 6, 1)
	want = newer(varint(want, 7, 1), 3*minute, 20*minute, 15*minute)
	want = field(nil, 1, want)
	for version, defaults := range map[string][]byte{
		"until 1.34.1": varint(varint(older(shared(0.5, 0.5), 10*minute, 20*minute, 15*minute), 6, 1), 7, 1),
		"since 1.35":   newer(varint(varint(shared(0.5, 0.5), 6, 1), 7, 1), 10*minute, 20*minute, 15*minute),
	} {
		got, err := r.raw("NodeGroupGetOptions", request("own", defaults))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: got %x, %v; want %x", version, got, err, want)
		}
		for _, name := range []string{"plain", "faulty"} {
			_, err := r.raw("NodeGroupGetOptions", request(name, defaults))
			r.wantCode(err, codes.Unimplemented)
		}
	}
	_, err := r.raw("NodeGroupGetOptions", field(nil, 1, []byte(r.id("own"))))
	r.wantCode(err, codes.Unimplemented) // without defaults an answer would have holes
	before129 := field(field(shared(0.5, 0.5), 3, oldDuration(10*minute)), 4, oldDuration(20*minute))
	_, err = r.raw("NodeGroupGetOptions", request("own", before129))
	r.wantCode(err, codes.Unimplemented) // nodes would have no time to come: it cannot read field 5
}

// template takes a reply apart, which must say the same in both dialects.
func template(t *testing.T, reply []byte) *corev1.Node {
	t.Helper()
	fields := map[protowire.Number][]byte{}
	for len(reply) > 0 {
		number, kind, n := protowire.ConsumeTag(reply)
		if n < 0 || kind != protowire.BytesType {
			t.Fatalf("not a reply: %x", reply)
		}
		content, m := protowire.ConsumeBytes(reply[n:])
		if m < 0 {
			t.Fatalf("not a reply: %x", reply)
		}
		fields[number], reply = content, reply[n+m:]
	}
	if len(fields) != 2 || len(fields[1]) == 0 || !bytes.Equal(fields[1], fields[2]) {
		t.Fatalf("fields 1 and 2 must hold the same node; there are %d fields", len(fields))
	}
	node := &corev1.Node{}
	if err := node.Unmarshal(fields[1]); err != nil {
		t.Fatal(err)
	}

	return node
}

func TestWire_Template(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create(&v1alpha1.MachineClass{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "small"}, ProviderSpec: runtime.RawExtension{Raw: []byte(`{}`)},
		NodeTemplate: &v1alpha1.NodeTemplate{
			Capacity: corev1.ResourceList{
				"cpu": resource.MustParse("2"), "memory": resource.MustParse("8Gi"), "gpu": resource.MustParse("1"),
			},
			VirtualCapacity: corev1.ResourceList{"example.org/licenses": resource.MustParse("4")},
			InstanceType:    "m5.large", Region: "moon", Zone: "moon-a", Architecture: new("arm64"),
		},
	})
	const capacity = "capacity.cluster-autoscaler.kubernetes.io/"
	r.deployment("by-class", 0, size("0", "5"))
	d := r.deployment("by-annotations", 0, map[string]string{
		autoscaler.AnnotationKeyMax: "5",
		capacity + "cpu":            "16", capacity + "memory": "64Gi", capacity + "maxPods": "30", capacity + "ephemeral-disk": "100Gi",
		capacity + "gpu-type": "amd.com/gpu", capacity + "gpu-count": "4",
		capacity + "labels": "pool=b, team=demo", capacity + "taints": "dedicated=batch:NoSchedule",
	})
	d.Spec.Template.Spec.Class.Name = "none"
	d.Spec.Template.Spec.NodeTemplateSpec.Labels = map[string]string{"pool": "a", "kept": "yes"}
	d.Spec.Template.Spec.NodeTemplateSpec.Spec.Taints = []corev1.Taint{
		{Key: "dedicated", Value: "web", Effect: "NoSchedule"}, {Key: "kept", Effect: "NoExecute"},
	}
	if err := r.Update(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	r.deployment("other-gpu", 0, map[string]string{autoscaler.AnnotationKeyMax: "5", capacity + "gpu-type": "amd.com/gpu"})
	odd := r.deployment("by-labels", 0, map[string]string{autoscaler.AnnotationKeyMax: "5", "cluster-autoscaler.kubernetes.io/node-zone": "moon-z"})
	odd.Spec.Template.Spec.NodeTemplateSpec.Labels = map[string]string{
		"kubernetes.io/os": "windows", "kubernetes.io/arch": "s390x", "topology.kubernetes.io/zone": "moon-b", "node.kubernetes.io/instance-type": "own",
	}
	if err := r.Update(t.Context(), odd); err != nil {
		t.Fatal(err)
	}
	unknown := r.deployment("unknown", 0, size("0", "5"))
	unknown.Spec.Template.Spec.Class.Name = "none"
	if err := r.Update(t.Context(), unknown); err != nil {
		t.Fatal(err)
	}
	r.deployment("faulty", 0, map[string]string{autoscaler.AnnotationKeyMax: "5", capacity + "cpu": "lots"})
	r.refresh(6, 0)
	ask := func(name string) *corev1.Node {
		t.Helper()
		reply, err := r.raw("NodeGroupTemplateNodeInfo", field(nil, 1, []byte(r.id(name))))
		if err != nil {
			t.Fatalf("%s: %v: a group that is listed and has no template ends all scaling up", name, err)
		}

		return template(t, reply)
	}
	r.eventually("the class and the changed deployments are seen", func() bool {
		r.refresh(6, 0)
		byClass, unknown, byAnnotations, byLabels := ask("by-class"), ask("unknown"), ask("by-annotations"), ask("by-labels")

		return len(byClass.Spec.Taints) == 0 && len(unknown.Spec.Taints) == 1 && len(byAnnotations.Spec.Taints) == 2 &&
			byLabels.Labels["kubernetes.io/os"] == "windows"
	})
	type want struct {
		Labels   map[string]string
		Capacity map[corev1.ResourceName]string
		Taints   []corev1.Taint
	}
	none := want{
		Labels:   map[string]string{"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"},
		Capacity: map[corev1.ResourceName]string{"cpu": "0", "memory": "0", "pods": "0"},
		Taints:   []corev1.Taint{{Key: "machinebus.io/no-template", Effect: "NoSchedule"}},
	}
	for name, w := range map[string]want{
		"by-class": {
			Labels: map[string]string{
				"kubernetes.io/os": "linux", "kubernetes.io/arch": "arm64", "node.kubernetes.io/instance-type": "m5.large",
				"topology.kubernetes.io/region": "moon", "topology.kubernetes.io/zone": "moon-a",
			},
			Capacity: map[corev1.ResourceName]string{"cpu": "2", "memory": "8Gi", "pods": "110", "nvidia.com/gpu": "1", "example.org/licenses": "4"},
		},
		"by-labels": {
			Labels: map[string]string{
				"kubernetes.io/os": "windows", "kubernetes.io/arch": "s390x", "node.kubernetes.io/instance-type": "own",
				"topology.kubernetes.io/region": "moon", "topology.kubernetes.io/zone": "moon-b",
			},
			Capacity: map[corev1.ResourceName]string{"cpu": "2", "memory": "8Gi", "pods": "110", "nvidia.com/gpu": "1", "example.org/licenses": "4"},
		},
		"other-gpu": {
			Labels: map[string]string{
				"kubernetes.io/os": "linux", "kubernetes.io/arch": "arm64", "node.kubernetes.io/instance-type": "m5.large",
				"topology.kubernetes.io/region": "moon", "topology.kubernetes.io/zone": "moon-a",
			},
			Capacity: map[corev1.ResourceName]string{"cpu": "2", "memory": "8Gi", "pods": "110", "amd.com/gpu": "1", "example.org/licenses": "4"},
		},
		// Nothing is known of these, so nothing fits.
		"unknown": none,
		"faulty":  none,
		"by-annotations": {
			Labels: map[string]string{"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", "pool": "b", "team": "demo", "kept": "yes"},
			Capacity: map[corev1.ResourceName]string{
				"cpu": "16", "memory": "64Gi", "pods": "30", "ephemeral-storage": "100Gi", "amd.com/gpu": "4",
			},
			Taints: []corev1.Taint{{Key: "kept", Effect: "NoExecute"}, {Key: "dedicated", Value: "batch", Effect: "NoSchedule"}},
		},
	} {
		node := ask(name)
		got := want{Labels: node.Labels, Capacity: map[corev1.ResourceName]string{}, Taints: node.Spec.Taints}
		for resource, q := range node.Status.Capacity {
			got.Capacity[resource] = q.String()
		}
		if diff := cmp.Diff(w, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if diff := cmp.Diff(node.Status.Capacity, node.Status.Allocatable); diff != "" {
			t.Errorf("%s: pods need what is allocatable:\n%s", name, diff)
		}
		if len(node.Status.Conditions) != 1 || node.Status.Conditions[0].Type != corev1.NodeReady || node.Status.Conditions[0].Status != "True" {
			t.Errorf("%s: it must be ready: %v", name, node.Status.Conditions)
		}
	}
	_, err := r.raw("NodeGroupTemplateNodeInfo", field(nil, 1, []byte(r.id("gone"))))
	r.wantCode(err, codes.NotFound)
}
