package machinedeployment

import (
	"context"
	"fmt"
	"maps"
	"strconv"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// findLatest finds the set of the current template, the oldest if there are
// several, and brings it up to date with what a deployment changes without a
// rollout.
func (p *pass) findLatest(ctx context.Context) (bool, error) {
	p.sorted = true
	for _, set := range p.sets {
		if p.latest == nil && sameTemplate(&set.Spec.Template, &p.deployment.Spec.Template) {
			p.latest = set
		} else {
			p.old = append(p.old, set)
		}
	}
	if p.latest == nil {
		return true, nil
	}
	if !p.latest.DeletionTimestamp.IsZero() {
		return false, nil // its end starts the next pass, which makes another
	}
	before := p.latest.DeepCopy()
	p.shape(p.latest)
	if !equality.Semantic.DeepEqual(before, p.latest) {
		if err := p.patchSet(ctx, p.latest, before); err != nil {
			return false, err
		}
	}

	return true, p.noteRevision(ctx)
}

// shape sets what the latest set has from the deployment, replicas apart.
func (p *pass) shape(set *v1alpha1.MachineSet) {
	spec := p.deployment.Spec.Template.Spec.DeepCopy()
	set.Spec.Template.Spec.NodeTemplateSpec = spec.NodeTemplateSpec
	set.Spec.Template.Spec.MachineConfiguration = spec.MachineConfiguration
	set.Spec.Template.Spec.Class.Kind = spec.Class.Kind
	set.Spec.MinReadySeconds = p.deployment.Spec.MinReadySeconds
	set.Spec.AutoPreserveFailedMachineMax = p.deployment.Spec.AutoPreserveFailedMachineMax
	set.Annotations = shareAnnotations(set.Annotations, p.deployment.Annotations)
	last := int64(0)
	for _, old := range p.old {
		last = max(last, revisionOf(old.Annotations))
	}
	raiseRevision(set, last+1)
}

// noteRevision has the deployment tell the latest set's revision.
func (p *pass) noteRevision(ctx context.Context) error {
	revision := revisionOf(p.latest.Annotations)
	if revisionOf(p.deployment.Annotations) != revision {
		if err := p.turn(ctx); err != nil {
			return err
		}
	}
	metav1.SetMetaDataAnnotation(&p.deployment.ObjectMeta, v1alpha1.AnnotationKeyRevision, strconv.FormatInt(revision, 10))

	return p.patch(ctx)
}

// turn is for a rollout that turns to another set before it is complete: that has a
// deadline of its own. It says so before the deployment tells the set's revision,
// by which the next pass would not know any more, should this one fail.
func (p *pass) turn(ctx context.Context) error {
	current := conditionOf(&p.deployment.Status, v1alpha1.MachineDeploymentProgressing)
	if current == nil || rolledOut(current) || p.tellsPause(current) {
		return nil
	}
	p.turned = true
	p.tellBegin()

	return p.storeStatus(ctx)
}

// createLatest makes the set of the current template. It returns false when it
// has to be tried again.
func (p *pass) createLatest(ctx context.Context, replicas int32) (bool, error) {
	// Of sets that somebody else has made since, for one, a stale cache does not tell.
	if current, err := p.upToDate(ctx); !current || err != nil {
		return false, err
	}
	set, err := p.newSet(replicas)
	if err != nil {
		return false, err
	}
	err = p.Control.Create(ctx, set)
	switch {
	case apierrors.IsAlreadyExists(err):
		return false, p.taken(ctx, set)
	case err != nil:
		p.fault = fmt.Sprintf("Failed to create new machine set %q: %v", set.Name, err)
		p.warnf(v1alpha1.EventMachineSetCreateError, "%s", p.fault)

		return false, fmt.Errorf("create machine set %s: %w", client.ObjectKeyFromObject(set), err)
	}
	p.ledger.wrote(set)
	p.latest, p.created = set, set.Name
	p.sets = append(p.sets, set)
	if replicas > 0 {
		p.notef(v1alpha1.EventScalingMachineSet, v1alpha1.EventFormatScaledUp, set.Name, replicas)
	}

	return true, p.noteRevision(ctx)
}

// upToDate tells whether what this pass has seen of the deployment's template and
// sets is what the API server has.
func (p *pass) upToDate(ctx context.Context) (bool, error) {
	d := &v1alpha1.MachineDeployment{}
	if err := p.Live.Get(ctx, client.ObjectKeyFromObject(p.deployment), d); err != nil {
		return false, fmt.Errorf("read deployment %s: %w", client.ObjectKeyFromObject(p.deployment), err)
	}
	sets, err := p.liveSets(ctx)
	if err != nil {
		return false, err
	}
	same := d.UID == p.deployment.UID && d.Generation == p.deployment.Generation && len(sets) == len(p.sets)
	known := map[string]bool{}
	for _, set := range p.sets {
		known[string(set.UID)] = true
	}
	for _, set := range sets {
		same = same && known[string(set.UID)]
	}
	if !same {
		p.lookAgain(conflictRetry)
	}

	return same, nil
}

func (p *pass) newSet(replicas int32) (*v1alpha1.MachineSet, error) {
	sum, err := hash(&p.deployment.Spec.Template, p.deployment.Status.CollisionCount)
	if err != nil {
		return nil, err
	}
	template := p.deployment.Spec.Template.DeepCopy()
	if template.Labels == nil {
		template.Labels = map[string]string{}
	}
	template.Labels[v1alpha1.LabelKeyMachineTemplateHash] = sum
	selector := p.deployment.Spec.Selector.DeepCopy()
	selector.MatchLabels = maps.Clone(selector.MatchLabels)
	if selector.MatchLabels == nil {
		selector.MatchLabels = map[string]string{}
	}
	selector.MatchLabels[v1alpha1.LabelKeyMachineTemplateHash] = sum
	set := &v1alpha1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.deployment.Namespace, Name: setName(p.deployment.Name, sum),
			Labels: maps.Clone(template.Labels), OwnerReferences: []metav1.OwnerReference{*p.controllerRef()},
		},
		Spec: v1alpha1.MachineSetSpec{Selector: selector, Template: *template},
	}
	p.shape(set)
	p.noteReplicas(set, replicas)

	return set, nil
}

// taken looks at the set that has the name which the new one was to have.
func (p *pass) taken(ctx context.Context, want *v1alpha1.MachineSet) error {
	set := &v1alpha1.MachineSet{}
	if err := p.Live.Get(ctx, client.ObjectKeyFromObject(want), set); err != nil {
		return fmt.Errorf("read machine set %s: %w", client.ObjectKeyFromObject(want), err)
	}
	if metav1.IsControlledBy(set, p.deployment) && sameTemplate(&set.Spec.Template, &want.Spec.Template) {
		p.ledger.wrote(set) // made by an earlier leader, for one

		return nil
	}
	count := int32(1)
	if p.deployment.Status.CollisionCount != nil {
		count = *p.deployment.Status.CollisionCount + 1
	}
	p.deployment.Status.CollisionCount = &count
	p.lookAgain(conflictRetry)
	p.log.Info("name of the new machine set is taken", "machineset", set.Name, "collisions", count)

	return nil
}
