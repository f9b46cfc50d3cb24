package machine

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// nodeTemplate puts on a Node what its machine and the machine's class say.
type nodeTemplate struct {
	*object
	node   *machineNode
	target client.Client
}

// claimNode writes on the Node whose it is and what its template says, and keeps
// it from being deleted behind the machine's back.
func (t *nodeTemplate) claimNode(ctx context.Context) error {
	if t.node.found == nil || !t.node.found.DeletionTimestamp.IsZero() {
		return nil
	}
	node := t.node.found.DeepCopy()
	t.applyTemplate(node)
	metav1.SetMetaDataLabel(&node.ObjectMeta, v1alpha1.LabelKeyMachineName, t.machine.Name)
	controllerutil.AddFinalizer(node, v1alpha1.FinalizerNameNode)
	if equality.Semantic.DeepEqual(node.ObjectMeta, t.node.found.ObjectMeta) && equality.Semantic.DeepEqual(node.Spec, t.node.found.Spec) {
		return nil
	}
	err := t.target.Patch(ctx, node, client.MergeFromWithOptions(t.node.found, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		return fmt.Errorf("claim node %s: %w", node.Name, err)
	}
	t.node.found = node

	return nil
}

// applyTemplate has a Node carry the labels, annotations and taints of its
// machine's nodeTemplate, and lose those that the template had before and has no
// more. What others put there stays. What was applied last stands on the Node.
func (t *nodeTemplate) applyTemplate(node *corev1.Node) {
	text, had := node.Annotations[v1alpha1.AnnotationKeyLastAppliedNodeTemplate]
	var last v1alpha1.NodeTemplateSpec
	if had {
		if err := json.Unmarshal([]byte(text), &last); err != nil {
			t.log.Info("what was applied to the node is unreadable; nothing is taken away from it", "node", node.Name, "err", err.Error())
			last = v1alpha1.NodeTemplateSpec{}
		}
	}
	var want v1alpha1.NodeTemplateSpec
	want.Labels, _ = validLabels(t.machine.Spec.NodeTemplateSpec.Labels)
	want.Annotations, _ = validAnnotations(t.machine.Spec.NodeTemplateSpec.Annotations)
	want.Spec.Taints, _ = validTaints(t.machine.Spec.NodeTemplateSpec.Spec.Taints)
	// Those are not the template's to give.
	delete(want.Labels, v1alpha1.LabelKeyMachineName)
	delete(want.Annotations, v1alpha1.AnnotationKeyLastAppliedNodeTemplate)

	node.Labels = merge(node.Labels, last.Labels, want.Labels)
	node.Annotations = merge(node.Annotations, last.Annotations, want.Annotations)
	node.Spec.Taints = mergeTaints(node.Spec.Taints, last.Spec.Taints, want.Spec.Taints)
	if !had && len(want.Labels) == 0 && len(want.Annotations) == 0 && len(want.Spec.Taints) == 0 {
		return
	}
	applied, err := json.Marshal(want)
	if err != nil {
		t.log.Error(err, "what was applied to the node cannot be noted", "node", node.Name)

		return
	}
	metav1.SetMetaDataAnnotation(&node.ObjectMeta, v1alpha1.AnnotationKeyLastAppliedNodeTemplate, string(applied))
}

// merge is a three-way merge of labels or annotations.
func merge(have, last, want map[string]string) map[string]string {
	merged := maps.Clone(have)
	for key := range last {
		if _, wanted := want[key]; !wanted {
			delete(merged, key)
		}
	}
	if merged == nil && len(want) > 0 {
		merged = map[string]string{}
	}
	maps.Copy(merged, want)

	return merged
}

// mergeTaints is merge for taints, of which a Node has one for each key and
// effect.
func mergeTaints(have, last, want []corev1.Taint) []corev1.Taint {
	in := func(taints []corev1.Taint, t corev1.Taint) int {
		return slices.IndexFunc(taints, func(other corev1.Taint) bool { return t.MatchTaint(&other) })
	}
	merged := slices.DeleteFunc(slices.Clone(have), func(t corev1.Taint) bool {
		return in(last, t) >= 0 && in(want, t) < 0
	})
	for _, t := range want {
		switch i := in(merged, t); {
		case i < 0:
			merged = append(merged, t)
		case merged[i].Value != t.Value:
			merged[i] = t
		default: // with the time at which it was added, perhaps
		}
	}

	return merged
}
