package autoscaler

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// TaintNoTemplate is on the template of a group whose nodes nothing describes. The
// cluster-autoscaler shows it as the reason not to choose the group.
const TaintNoTemplate = "machinebus.io/no-template"

const (
	// capacityPrefix begins the Cluster API provider's annotations that describe a future
	// node.
	capacityPrefix = "capacity.cluster-autoscaler.kubernetes.io/"
	// plainPrefix begins other providers' annotations for cpu and memory.
	plainPrefix = "cluster-autoscaler.kubernetes.io/node-"
	// defaultPods is the default of a kubelet.
	defaultPods = "110"
	// defaultGPU is the resource for a class's "gpu".
	defaultGPU = "nvidia.com/gpu"
)

// NodeGroupTemplateNodeInfo describes a future node of the group, so that the group can grow
// from zero. The answer is in both dialects' fields. It is never empty, which would make the
// cluster-autoscaler crash, and never an error for a listed group, see unknownNode.
func (s *Server) NodeGroupTemplateNodeInfo(
	ctx context.Context, req *externalgrpc.NodeGroupTemplateNodeInfoRequest,
) (*externalgrpc.NodeGroupTemplateNodeInfoResponse, error) {
	if isProvided(req.GetId()) {
		g, err := s.provided(ctx, req.GetId())
		if err != nil {
			return nil, err
		}

		return g.template(ctx)
	}
	g, err := s.group(ctx, req.GetId())
	if err != nil {
		return nil, err
	}
	class := &v1alpha1.MachineClass{}
	key := client.ObjectKey{Namespace: g.deployment.Namespace, Name: g.deployment.Spec.Template.Spec.Class.Name}
	if err := s.cfg.Control.Get(ctx, key, class); err != nil && !apierrors.IsNotFound(err) {
		return nil, statusOf(err, "read MachineClass "+key.String())
	}
	node, err := templateNode(g.deployment, class.NodeTemplate)
	if err != nil { // groupOfLocked has reported it
		return templateResponse(g.id, unknownNode(g.deployment.Name))
	}
	var lacking error
	if node == nil {
		node = unknownNode(g.deployment.Name)
		lacking = fmt.Errorf("set nodeTemplate of MachineClass %s, or the annotations %scpu and %smemory",
			key.Name, capacityPrefix, capacityPrefix)
	}
	s.mu.Lock()
	s.reportLocked(ctx, g.deployment, EventNoNodeTemplate, "The cluster-autoscaler cannot add its first node: %v", lacking)
	s.mu.Unlock()

	return templateResponse(g.id, node)
}

// unknownNode returns a template on which no pod fits, so that the cluster-autoscaler never
// chooses the group. If one group returned an error or no template, the cluster-autoscaler
// would not add nodes to any group.
func unknownNode(group string) *corev1.Node {
	nothing := corev1.ResourceList{
		corev1.ResourceCPU: resource.Quantity{}, corev1.ResourceMemory: resource.Quantity{}, corev1.ResourcePods: resource.Quantity{},
	}

	return newTemplate(group, metav1.ObjectMeta{}, nothing, []corev1.Taint{{Key: TaintNoTemplate, Effect: corev1.TaintEffectNoSchedule}})
}

func newTemplate(group string, meta metav1.ObjectMeta, capacity corev1.ResourceList, taints []corev1.Taint) *corev1.Node {
	meta.Name = "template-of-" + group

	return &corev1.Node{
		ObjectMeta: meta, Spec: corev1.NodeSpec{Taints: taints},
		Status: corev1.NodeStatus{
			Capacity: capacity, Allocatable: capacity.DeepCopy(),
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Template"}},
		},
	}
}

// templateResponse returns the node in both dialects' fields, with defaults for pods, the
// operating system and the architecture: without them no pod would fit.
func templateResponse(group string, node *corev1.Node) (*externalgrpc.NodeGroupTemplateNodeInfoResponse, error) {
	for _, resources := range []corev1.ResourceList{node.Status.Capacity, node.Status.Allocatable} {
		if _, ok := resources[corev1.ResourcePods]; !ok {
			resources[corev1.ResourcePods] = resource.MustParse(defaultPods)
		}
	}
	labels := map[string]string{corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64"}
	maps.Copy(labels, node.Labels)
	node.Labels = labels
	content, err := node.Marshal()
	if err != nil {
		return nil, status.Errorf(codes.Internal, "node group %s: write its node: %v", group, err)
	}

	return &externalgrpc.NodeGroupTemplateNodeInfoResponse{NodeInfo: content, NodeBytes: content}, nil
}

// templateNode builds a node; it returns nil if cpu or memory is not known.
func templateNode(d *v1alpha1.MachineDeployment, class *v1alpha1.NodeTemplate) (*corev1.Node, error) {
	capacity, err1 := capacityOf(d.Annotations, class)
	extra, err2 := parseLabels(d.Annotations[capacityPrefix+"labels"])
	taints, err3 := parseTaints(d.Annotations[capacityPrefix+"taints"])
	if err := cmp.Or(err1, err2, err3); err != nil || capacity == nil {
		return nil, err
	}
	template := d.Spec.Template.Spec.NodeTemplateSpec
	labels := wellKnownLabels(d.Annotations, class)
	maps.Copy(labels, template.Labels) // the deployment's take precedence
	maps.Copy(labels, extra)

	return newTemplate(d.Name, metav1.ObjectMeta{Labels: labels, Annotations: template.Annotations}, capacity,
		mergeTaints(template.Spec.Taints, taints)), nil
}

// wellKnownLabels returns the known labels for instance type, region, zone and architecture.
func wellKnownLabels(annotations map[string]string, class *v1alpha1.NodeTemplate) map[string]string {
	labels := map[string]string{
		corev1.LabelTopologyRegion: annotations[plainPrefix+"region"], corev1.LabelTopologyZone: annotations[plainPrefix+"zone"],
	}
	if class != nil {
		for key, value := range map[string]string{
			corev1.LabelInstanceTypeStable: class.InstanceType, corev1.LabelTopologyRegion: class.Region, corev1.LabelTopologyZone: class.Zone,
		} {
			labels[key] = cmp.Or(value, labels[key])
		}
		if class.Architecture != nil {
			labels[corev1.LabelArchStable] = cmp.Or(*class.Architecture, labels[corev1.LabelArchStable])
		}
	}
	maps.DeleteFunc(labels, func(_, value string) bool { return value == "" })

	return labels
}

// capacityOf returns a node's resources, in which more specific sources replace others; nil
// if cpu or memory is missing.
func capacityOf(annotations map[string]string, class *v1alpha1.NodeTemplate) (corev1.ResourceList, error) {
	all := corev1.ResourceList{}
	set := func(name corev1.ResourceName, key string) error {
		text, ok := annotations[key]
		if !ok {
			return nil
		}
		q, err := resource.ParseQuantity(text)
		if err != nil {
			return fmt.Errorf("annotation %s: %q is no quantity: %w", key, text, err)
		}
		all[name] = q

		return nil
	}
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} { // in order: the first error stays the same
		if err := set(name, plainPrefix+string(name)); err != nil {
			return nil, err
		}
	}
	if class != nil {
		for name, q := range class.Capacity {
			if name == "gpu" {
				name = defaultGPU
			}
			if name != defaultGPU || !q.IsZero() {
				all[name] = q
			}
		}
		maps.Copy(all, class.VirtualCapacity)
	}
	gpu := corev1.ResourceName(cmp.Or(annotations[capacityPrefix+"gpu-type"], defaultGPU))
	if q, ok := all[defaultGPU]; ok { // the class's "gpu" is of the annotated type
		delete(all, defaultGPU)
		all[gpu] = q
	}
	for _, r := range []struct {
		name corev1.ResourceName
		key  string
	}{
		{corev1.ResourceCPU, "cpu"},
		{corev1.ResourceMemory, "memory"},
		{corev1.ResourceEphemeralStorage, "ephemeral-disk"},
		{corev1.ResourcePods, "maxPods"},
		{gpu, "gpu-count"},
	} {
		if err := set(r.name, capacityPrefix+r.key); err != nil {
			return nil, err
		}
	}
	if all.Cpu().IsZero() || all.Memory().IsZero() {
		return nil, nil
	}

	return all, nil
}

func parseLabels(text string) (map[string]string, error) {
	labels := map[string]string{}
	for entry := range strings.SplitSeq(text, ",") {
		if strings.TrimSpace(entry) == "" {
			continue
		}
		key, value, ok := strings.Cut(strings.TrimSpace(entry), "=")
		if !ok || key == "" {
			return nil, fmt.Errorf("annotation %slabels: %q: want key=value", capacityPrefix, entry)
		}
		labels[key] = value
	}

	return labels, nil
}

func parseTaints(text string) ([]corev1.Taint, error) {
	var taints []corev1.Taint
	for entry := range strings.SplitSeq(text, ",") {
		entry = strings.TrimSpace(entry)
		if entry == "" {
			continue
		}
		pair, effect, ok := strings.Cut(entry, ":")
		key, value, _ := strings.Cut(pair, "=")
		switch corev1.TaintEffect(effect) {
		case corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute:
		default:
			ok = false
		}
		if !ok || key == "" {
			return nil, fmt.Errorf("annotation %staints: %q: want key=value:Effect", capacityPrefix, entry)
		}
		taints = append(taints, corev1.Taint{Key: key, Value: value, Effect: corev1.TaintEffect(effect)})
	}

	return taints, nil
}

// mergeTaints adds taints to others and replaces those with the same key and effect.
func mergeTaints(base, over []corev1.Taint) []corev1.Taint {
	var all []corev1.Taint
	for _, taint := range base {
		replaced := false
		for i := range over {
			replaced = replaced || over[i].MatchTaint(&taint)
		}
		if !replaced {
			all = append(all, taint)
		}
	}

	return append(all, over...)
}
