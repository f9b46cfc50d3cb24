package machine

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// maxOperationTimeout bounds what a class may ask for: a replica's slot is taken
// for as long.
const maxOperationTimeout = 24 * time.Hour

// validateClass returns an error if no instance can be made of a class, whatever its
// driver says.
func validateClass(class *v1alpha1.MachineClass) error {
	if _, err := classTimeout(class, 0); err != nil {
		return err
	}
	if class.NodeTemplate == nil {
		return nil
	}
	var missing []string
	for _, resource := range []corev1.ResourceName{corev1.ResourceCPU, "gpu", corev1.ResourceMemory} {
		if _, ok := class.NodeTemplate.Capacity[resource]; !ok {
			missing = append(missing, "capacity."+string(resource))
		}
	}
	for field, value := range map[string]string{
		"instanceType": class.NodeTemplate.InstanceType, "region": class.NodeTemplate.Region, "zone": class.NodeTemplate.Zone,
	} {
		if value == "" {
			missing = append(missing, field)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	slices.Sort(missing)

	return dispatch.Errorf(dispatch.InvalidArgument, "MachineClass %s: nodeTemplate lacks %s: set it, or leave out nodeTemplate",
		class.Name, strings.Join(missing, ", "))
}

// classTimeout is how long an operation on an instance of a class may take: what
// the class says, or else otherwise, which comes with an error too.
func classTimeout(class *v1alpha1.MachineClass, otherwise time.Duration) (time.Duration, error) {
	if class == nil {
		return otherwise, nil
	}
	text, ok := class.Annotations[v1alpha1.AnnotationKeyOperationTimeout]
	if !ok {
		return otherwise, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < time.Second || d > maxOperationTimeout {
		return otherwise, dispatch.Errorf(dispatch.InvalidArgument, "MachineClass %s: annotation %s is %q: "+
			"want a duration from 1s to %s, such as 15m", class.Name, v1alpha1.AnnotationKeyOperationTimeout, text, "24h")
	}

	return d, nil
}

// faults are what is wrong with a machine's fields without keeping it from being
// made: what they ask for is left out.
func faults(m *v1alpha1.Machine) []string {
	var all []string
	add := func(field, format string, args ...any) { all = append(all, field+": "+fmt.Sprintf(format, args...)) }
	if text, ok := m.Annotations[v1alpha1.AnnotationKeyEffectiveCreationTimeout]; ok {
		if d, err := time.ParseDuration(text); err != nil || d <= 0 {
			add("annotation "+v1alpha1.AnnotationKeyEffectiveCreationTimeout,
				"%q is not used: want a positive duration, such as 20m", text)
		}
	}
	_, labels := validLabels(m.Spec.NodeTemplateSpec.Labels)
	_, annotations := validAnnotations(m.Spec.NodeTemplateSpec.Annotations)
	_, taints := validTaints(m.Spec.NodeTemplateSpec.Spec.Taints)

	return slices.Concat(all, labels, annotations, taints)
}

// validLabels returns the labels that a Node may have, and what is wrong with the
// others.
func validLabels(labels map[string]string) (valid map[string]string, wrong []string) {
	valid = make(map[string]string, len(labels))
	for key, value := range labels {
		err := slices.Concat(validation.IsQualifiedName(key), validation.IsValidLabelValue(value))
		if len(err) == 0 {
			valid[key] = value

			continue
		}
		wrong = append(wrong, fmt.Sprintf("spec.nodeTemplate.metadata.labels: %q=%q is left out: %s", key, value, err[0]))
	}
	slices.Sort(wrong)

	return valid, wrong
}

// validAnnotations is validLabels for annotations.
func validAnnotations(annotations map[string]string) (valid map[string]string, wrong []string) {
	valid = make(map[string]string, len(annotations))
	for key, value := range annotations {
		if err := validation.IsQualifiedName(strings.ToLower(key)); len(err) > 0 {
			wrong = append(wrong, fmt.Sprintf("spec.nodeTemplate.metadata.annotations: %q is left out: %s", key, err[0]))

			continue
		}
		valid[key] = value
	}
	slices.Sort(wrong)

	return valid, wrong
}

// validTaints is validLabels for taints.
func validTaints(taints []corev1.Taint) (valid []corev1.Taint, wrong []string) {
	for _, t := range taints {
		err := slices.Concat(validation.IsQualifiedName(t.Key), validation.IsValidLabelValue(t.Value))
		if !slices.Contains([]corev1.TaintEffect{
			corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute,
		}, t.Effect) {
			err = append(err, "effect must be NoSchedule, PreferNoSchedule or NoExecute")
		}
		if len(err) == 0 {
			valid = append(valid, t)

			continue
		}
		wrong = append(wrong, fmt.Sprintf("spec.nodeTemplate.spec.taints: %s is left out: %s", t.ToString(), err[0]))
	}

	return valid, wrong
}
