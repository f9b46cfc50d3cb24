package machineset

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/equality"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// propagate hands those parts of the template down to the machines that need no
// new instance: what is kept on the Node, the machine's settings and the kind of
// its class.
func (p *pass) propagate(ctx context.Context) (steps.Next, error) {
	var behind, wanted []*v1alpha1.Machine
	for _, m := range p.machines {
		if !followsTemplate(p.set, m) { // most do, and are not copied in every pass
			behind, wanted = append(behind, m), append(wanted, asTemplate(p.set, m))
		}
	}
	p.errs = append(p.errs, inParallel(len(behind), func(i int) error {
		// The patch holds only these fields, so it undoes no other change even if
		// the machine has changed since it was read.
		err := p.Client.Patch(ctx, wanted[i], client.MergeFrom(behind[i]))
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("hand the template down to machine %s: %w", wanted[i].Name, err)
		}

		return nil
	})...)

	return steps.Proceed, nil
}

// followsTemplate reports whether the machine is as the template wants it.
func followsTemplate(set *v1alpha1.MachineSet, m *v1alpha1.Machine) bool {
	template := &set.Spec.Template.Spec
	settings := template.MachineConfiguration
	keepOwnTimeout(m, &settings)

	return m.Spec.Class.Kind == template.Class.Kind &&
		equality.Semantic.DeepEqual(m.Spec.MachineConfiguration, settings) &&
		equality.Semantic.DeepEqual(m.Spec.NodeTemplateSpec, template.NodeTemplateSpec)
}

// asTemplate returns a copy of the machine as the template wants it.
func asTemplate(set *v1alpha1.MachineSet, m *v1alpha1.Machine) *v1alpha1.Machine {
	want := m.DeepCopy()
	template := set.Spec.Template.Spec.DeepCopy()
	want.Spec.NodeTemplateSpec = template.NodeTemplateSpec
	want.Spec.MachineConfiguration = template.MachineConfiguration
	want.Spec.Class.Kind = template.Class.Kind
	keepOwnTimeout(m, &want.Spec.MachineConfiguration)

	return want
}

// keepOwnTimeout keeps the creation timeout of a machine that was made with its own.
func keepOwnTimeout(m *v1alpha1.Machine, settings *v1alpha1.MachineConfiguration) {
	if _, own := m.Annotations[v1alpha1.AnnotationKeyEffectiveCreationTimeout]; own {
		settings.MachineCreationTimeout = m.Spec.MachineCreationTimeout
	}
}
