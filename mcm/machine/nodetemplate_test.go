package machine_test

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// template is what a Node has of its machine's template, and of others.
type template struct {
	Labels, Annotations map[string]string
	Taints              []corev1.Taint
	Applied             string
}

// templated waits until a Node has what is wanted.
func (r *rig) templated(t *testing.T, name string, want template) {
	t.Helper()
	var diff string
	if !poll(t, func() bool {
		node := r.node(t, name)
		got := template{Labels: node.Labels, Annotations: node.Annotations, Applied: node.Annotations[v1alpha1.AnnotationKeyLastAppliedNodeTemplate]}
		delete(got.Labels, v1alpha1.LabelKeyMachineName)
		delete(got.Annotations, v1alpha1.AnnotationKeyLastAppliedNodeTemplate)
		for _, taint := range node.Spec.Taints {
			if taint.Key != corev1.TaintNodeNotReady { // the API server's own
				got.Taints = append(got.Taints, corev1.Taint{Key: taint.Key, Value: taint.Value, Effect: taint.Effect})
			}
		}
		diff = cmp.Diff(want, got)

		return diff == ""
	}) {
		t.Fatalf("node (-want +got):\n%s", diff)
	}
}

func TestNodeTemplate(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.machine("a")
	m.Spec.NodeTemplateSpec = v1alpha1.NodeTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"pool": "one", "gone": "soon"}, Annotations: map[string]string{"note": "one"}},
		Spec: corev1.NodeSpec{Taints: []corev1.Taint{
			{Key: "pool", Value: "one", Effect: corev1.TaintEffectNoSchedule}, {Key: "gone", Effect: corev1.TaintEffectNoExecute},
		}},
	}
	r.create(t, m)
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: m.Name, Labels: map[string]string{"foreign": "stays", "pool": "kubelets"}, Annotations: map[string]string{"foreign": "stays"},
		},
		Spec: corev1.NodeSpec{ProviderID: "virtual://" + m.Name, Taints: []corev1.Taint{
			{Key: "foreign", Effect: corev1.TaintEffectNoSchedule}, {Key: "pool", Value: "kubelets", Effect: corev1.TaintEffectNoSchedule},
		}},
	}
	r.create(t, node)
	t.Cleanup(func() { r.forceDelete(t, node) })
	r.condition(t, node, ready(corev1.ConditionTrue))
	want := template{
		Labels:      map[string]string{"foreign": "stays", "pool": "one", "gone": "soon"},
		Annotations: map[string]string{"foreign": "stays", "note": "one"},
		Taints: []corev1.Taint{
			{Key: "foreign", Effect: corev1.TaintEffectNoSchedule},
			{Key: "pool", Value: "one", Effect: corev1.TaintEffectNoSchedule},
			{Key: "gone", Effect: corev1.TaintEffectNoExecute},
		},
		Applied: `{"metadata":{"labels":{"gone":"soon","pool":"one"},"annotations":{"note":"one"}},` +
			`"spec":{"taints":[{"key":"pool","value":"one","effect":"NoSchedule"},{"key":"gone","effect":"NoExecute"}]}}`,
	}
	r.templated(t, m.Name, want)

	// What the template has no more goes; what others wrote stays.
	r.change(t, m, func() {
		m.Spec.NodeTemplateSpec.Labels = map[string]string{"pool": "two"}
		m.Spec.NodeTemplateSpec.Annotations = nil
		m.Spec.NodeTemplateSpec.Spec.Taints = []corev1.Taint{{Key: "pool", Value: "two", Effect: corev1.TaintEffectNoSchedule}}
	})
	want = template{
		Labels: map[string]string{"foreign": "stays", "pool": "two"}, Annotations: map[string]string{"foreign": "stays"},
		Taints: []corev1.Taint{
			{Key: "foreign", Effect: corev1.TaintEffectNoSchedule}, {Key: "pool", Value: "two", Effect: corev1.TaintEffectNoSchedule},
		},
		Applied: `{"metadata":{"labels":{"pool":"two"}},"spec":{"taints":[{"key":"pool","value":"two","effect":"NoSchedule"}]}}`,
	}
	r.templated(t, m.Name, want)

	// What is removed from the Node comes back.
	r.change(t, node, func() { delete(node.Labels, "pool"); node.Spec.Taints = nil })
	want.Taints = want.Taints[1:]
	r.templated(t, m.Name, want)
}

// The annotation may be another manager's, with more in it than we write.
func TestNodeTemplateTakenOver(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.machine("a")
	r.create(t, m)
	before, err := json.Marshal(v1alpha1.NodeTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Name: "x", Labels: map[string]string{"old": "1"}}, Spec: corev1.NodeSpec{PodCIDR: "10.0.0.0/24"},
	})
	if err != nil {
		t.Fatal(err)
	}
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: m.Name, Labels: map[string]string{"old": "1", "foreign": "1"},
			Annotations: map[string]string{v1alpha1.AnnotationKeyLastAppliedNodeTemplate: string(before)},
		},
		Spec: corev1.NodeSpec{ProviderID: "virtual://" + m.Name},
	}
	r.create(t, node)
	t.Cleanup(func() { r.forceDelete(t, node) })
	r.templated(t, m.Name, template{
		Labels: map[string]string{"foreign": "1"}, Annotations: map[string]string{}, Applied: `{"metadata":{}}`,
	})
}

// What the API server would refuse is left out, and said; the rest is applied.
func TestNodeTemplateFaults(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.machine("a")
	m.Annotations = map[string]string{v1alpha1.AnnotationKeyEffectiveCreationTimeout: "soon"}
	m.Spec.NodeTemplateSpec = v1alpha1.NodeTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{
			Labels:      map[string]string{"good": "1", "not good": "1", "bad-value": "-"},
			Annotations: map[string]string{"good": "1", "not good": "1"},
		},
		Spec: corev1.NodeSpec{Taints: []corev1.Taint{
			{Key: "good", Effect: corev1.TaintEffectNoSchedule}, {Key: "bad", Effect: "Never"}, {Key: "", Effect: corev1.TaintEffectNoSchedule},
		}},
	}
	r.create(t, m)
	r.join(t, m)
	r.phase(t, m, v1alpha1.MachineRunning)
	r.templated(t, m.Name, template{
		Labels: map[string]string{"good": "1"}, Annotations: map[string]string{"good": "1"},
		Taints:  []corev1.Taint{{Key: "good", Effect: corev1.TaintEffectNoSchedule}},
		Applied: `{"metadata":{"labels":{"good":"1"},"annotations":{"good":"1"}},"spec":{"taints":[{"key":"good","effect":"NoSchedule"}]}}`,
	})
	for _, part := range []string{
		"annotation node.machine.sapcloud.io/effective-creation-timeout: \"soon\" is not used: want a positive duration",
		`spec.nodeTemplate.metadata.labels: "not good"="1" is left out: name part must consist of`,
		`spec.nodeTemplate.metadata.labels: "bad-value"="-" is left out: a valid label must be`,
		`spec.nodeTemplate.metadata.annotations: "not good" is left out: name part must consist of`,
		"spec.nodeTemplate.spec.taints: bad:Never is left out: effect must be NoSchedule, PreferNoSchedule or NoExecute",
		"spec.nodeTemplate.spec.taints: :NoSchedule is left out: name part must be non-empty",
	} {
		r.event(t, m, "InvalidField", part)
	}
}
