package machinedeployment

import (
	"context"
	"strconv"

	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// resize gives a set its replicas, and with them what it must know of the
// deployment's: in one write, so that it never deletes machines that were marked
// for a change of replicas which it has not seen.
func (p *pass) resize(ctx context.Context, set *v1alpha1.MachineSet, replicas int32) error {
	before := set.DeepCopy()
	p.noteReplicas(set, replicas)
	if equality.Semantic.DeepEqual(before, set) {
		return nil
	}
	if err := p.patchSet(ctx, set, before); err != nil {
		return err
	}
	switch had := before.Spec.Replicas; {
	case replicas > had:
		p.notef(v1alpha1.EventScalingMachineSet, v1alpha1.EventFormatScaledUp, set.Name, replicas)
	case replicas < had:
		p.notef(v1alpha1.EventScalingMachineSet, v1alpha1.EventFormatScaledDown, set.Name, replicas)
	}

	return nil
}

func (p *pass) noteReplicas(set *v1alpha1.MachineSet, replicas int32) {
	set.Spec.Replicas = replicas
	if set.Annotations == nil {
		set.Annotations = map[string]string{}
	}
	desired := p.deployment.Spec.Replicas
	limits := limitsOf(&p.deployment.Spec)
	set.Annotations[v1alpha1.AnnotationKeyDesiredReplicas] = strconv.Itoa(int(desired))
	set.Annotations[v1alpha1.AnnotationKeyMaxReplicas] = strconv.Itoa(int(desired + limits.surge))
	if at, ok := p.deployment.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler]; ok {
		set.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler] = at
	}
}
