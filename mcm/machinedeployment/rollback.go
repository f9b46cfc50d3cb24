package machinedeployment

import (
	"context"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// rollBack gives the deployment the template of an earlier revision, if that was
// asked for. The change of the template starts the next pass.
func (p *pass) rollBack(ctx context.Context) (steps.Next, error) {
	if p.deployment.Spec.RollbackTo == nil || p.deployment.Spec.Paused {
		return steps.Proceed, nil
	}
	revision := p.deployment.Spec.RollbackTo.Revision
	p.deployment.Spec.RollbackTo = nil
	set := p.setOfRevision(revision)
	if set == nil {
		if err := p.patch(ctx); err != nil {
			return steps.Wait, err
		}
		if revision == 0 {
			p.warnf(v1alpha1.EventDeploymentRollbackRevisionNotFound, "Unable to find last revision.")
		} else {
			p.warnf(v1alpha1.EventDeploymentRollbackRevisionNotFound, "Unable to find the revision %d to roll back to.", revision)
		}

		return steps.Wait, nil
	}
	number := revisionOf(set.Annotations)
	if sameTemplate(&set.Spec.Template, &p.deployment.Spec.Template) {
		if err := p.patch(ctx); err != nil {
			return steps.Wait, err
		}
		p.warnf(v1alpha1.EventDeploymentRollbackTemplateUnchanged,
			"The rollback revision contains the same template as current deployment %q", p.deployment.Name)

		return steps.Wait, nil
	}
	template := set.Spec.Template.DeepCopy()
	delete(template.Labels, v1alpha1.LabelKeyMachineTemplateHash)
	p.deployment.Spec.Template = *template
	p.deployment.Annotations = shareAnnotations(p.deployment.Annotations, set.Annotations)
	if err := p.patch(ctx); err != nil {
		return steps.Wait, err
	}
	p.sayf(v1alpha1.EventDeploymentRollback, "Rolled back deployment %q to revision %d", p.deployment.Name, number)

	return steps.Wait, nil
}

// setOfRevision returns the set of a revision, of the last one before the current for
// 0; nil when there is none.
func (o *ownedSets) setOfRevision(revision int64) *v1alpha1.MachineSet {
	var current int64
	for _, set := range o.sets {
		current = max(current, revisionOf(set.Annotations))
	}
	var found *v1alpha1.MachineSet
	for _, set := range o.sets {
		switch n := revisionOf(set.Annotations); {
		case !set.DeletionTimestamp.IsZero():
		case revision != 0 && n == revision:
			return set
		case revision == 0 && n > 0 && n < current && (found == nil || n > revisionOf(found.Annotations)):
			found = set
		}
	}

	return found
}
