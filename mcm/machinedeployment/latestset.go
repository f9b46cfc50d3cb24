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
	"github.com/machinebus/machinebus/mcm/steps"
)

// latestSet makes the set of the current template, and keeps it up to date.
type latestSet struct {
	*ownedSets
	scaling  *scaling
	progress *progress
}

// findLatestSet finds the set of the current template, the oldest if there are
// several, and brings it up to date with what a deployment changes without a
// rollout.
func (l *latestSet) findLatestSet(ctx context.Context) (steps.Next, error) {
	l.sorted = true
	for _, set := range l.sets {
		if l.latest == nil && sameTemplate(&set.Spec.Template, &l.deployment.Spec.Template) {
			l.latest = set
		} else {
			l.old = append(l.old, set)
		}
	}
	if l.latest == nil {
		return steps.Proceed, nil
	}
	if !l.latest.DeletionTimestamp.IsZero() {
		return steps.Wait, nil // its end starts the next pass, which makes another
	}
	before := l.latest.DeepCopy()
	l.applyTemplate(l.latest)
	if !equality.Semantic.DeepEqual(before, l.latest) {
		if err := l.patchSet(ctx, l.latest, before); err != nil {
			return steps.Wait, err
		}
	}

	return steps.Proceed, l.publishRevision(ctx)
}

// applyTemplate sets what the latest set has from the deployment, replicas apart.
func (l *latestSet) applyTemplate(set *v1alpha1.MachineSet) {
	spec := l.deployment.Spec.Template.Spec.DeepCopy()
	set.Spec.Template.Spec.NodeTemplateSpec = spec.NodeTemplateSpec
	set.Spec.Template.Spec.MachineConfiguration = spec.MachineConfiguration
	set.Spec.Template.Spec.Class.Kind = spec.Class.Kind
	set.Spec.MinReadySeconds = l.deployment.Spec.MinReadySeconds
	set.Spec.AutoPreserveFailedMachineMax = l.deployment.Spec.AutoPreserveFailedMachineMax
	set.Annotations = shareAnnotations(set.Annotations, l.deployment.Annotations)
	last := int64(0)
	for _, old := range l.old {
		last = max(last, revisionOf(old.Annotations))
	}
	raiseRevision(set, last+1)
}

// publishRevision notes the latest set's revision on the deployment.
func (l *latestSet) publishRevision(ctx context.Context) error {
	revision := revisionOf(l.latest.Annotations)
	if revisionOf(l.deployment.Annotations) != revision {
		if err := l.turnRollout(ctx); err != nil {
			return err
		}
	}
	metav1.SetMetaDataAnnotation(&l.deployment.ObjectMeta, v1alpha1.AnnotationKeyRevision, strconv.FormatInt(revision, 10))

	return l.patch(ctx)
}

// turnRollout is for a rollout that turns to another set before it is complete: that has a
// deadline of its own. The condition says so before the deployment shows the set's
// revision: after that a next pass could not know it any more, should this one fail.
func (l *latestSet) turnRollout(ctx context.Context) error {
	current := conditionOf(&l.deployment.Status, v1alpha1.MachineDeploymentProgressing)
	if current == nil || rolledOut(current) || l.progress.showsPause(current) {
		return nil
	}
	l.progress.turned = true
	l.progress.reportStart()

	return l.storeStatus(ctx)
}

// createLatestSet makes the set of the current template. It returns false when it
// has to be tried again.
func (l *latestSet) createLatestSet(ctx context.Context, replicas int32) (bool, error) {
	// A stale cache does not show sets that another manager has made since, for example.
	if current, err := l.matchesAPIServer(ctx); !current || err != nil {
		return false, err
	}
	set, err := l.newMachineSet(replicas)
	if err != nil {
		return false, err
	}
	err = l.control.Create(ctx, set)
	switch {
	case apierrors.IsAlreadyExists(err):
		return false, l.handleTakenName(ctx, set)
	case err != nil:
		l.progress.fault = fmt.Sprintf("Failed to create new machine set %q: %v", set.Name, err)
		l.warnf(v1alpha1.EventMachineSetCreateError, "%s", l.progress.fault)

		return false, fmt.Errorf("create machine set %s: %w", client.ObjectKeyFromObject(set), err)
	}
	l.ledger.wrote(set)
	l.latest, l.progress.created = set, set.Name
	l.sets = append(l.sets, set)
	if replicas > 0 {
		l.sayf(v1alpha1.EventScalingMachineSet, v1alpha1.EventFormatScaledUp, set.Name, replicas)
	}

	return true, l.publishRevision(ctx)
}

// matchesAPIServer reports whether the API server has the same template and sets of the
// deployment as this pass.
func (o *ownedSets) matchesAPIServer(ctx context.Context) (bool, error) {
	d := &v1alpha1.MachineDeployment{}
	if err := o.live.Get(ctx, client.ObjectKeyFromObject(o.deployment), d); err != nil {
		return false, fmt.Errorf("read deployment %s: %w", client.ObjectKeyFromObject(o.deployment), err)
	}
	sets, err := o.liveSets(ctx)
	if err != nil {
		return false, err
	}
	same := d.UID == o.deployment.UID && d.Generation == o.deployment.Generation && len(sets) == len(o.sets)
	known := map[string]bool{}
	for _, set := range o.sets {
		known[string(set.UID)] = true
	}
	for _, set := range sets {
		same = same && known[string(set.UID)]
	}
	if !same {
		o.LookAgain(steps.ConflictRetry)
	}

	return same, nil
}

func (l *latestSet) newMachineSet(replicas int32) (*v1alpha1.MachineSet, error) {
	sum, err := hash(&l.deployment.Spec.Template, l.deployment.Status.CollisionCount)
	if err != nil {
		return nil, err
	}
	template := l.deployment.Spec.Template.DeepCopy()
	if template.Labels == nil {
		template.Labels = map[string]string{}
	}
	template.Labels[v1alpha1.LabelKeyMachineTemplateHash] = sum
	selector := l.deployment.Spec.Selector.DeepCopy()
	selector.MatchLabels = maps.Clone(selector.MatchLabels)
	if selector.MatchLabels == nil {
		selector.MatchLabels = map[string]string{}
	}
	selector.MatchLabels[v1alpha1.LabelKeyMachineTemplateHash] = sum
	set := &v1alpha1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: l.deployment.Namespace, Name: setName(l.deployment.Name, sum),
			Labels: maps.Clone(template.Labels), OwnerReferences: []metav1.OwnerReference{*l.controllerRef()},
		},
		Spec: v1alpha1.MachineSetSpec{Selector: selector, Template: *template},
	}
	l.applyTemplate(set)
	l.noteReplicas(set, replicas)

	return set, nil
}

// handleTakenName looks at the set that has the name which the new one was to have.
func (l *latestSet) handleTakenName(ctx context.Context, want *v1alpha1.MachineSet) error {
	set := &v1alpha1.MachineSet{}
	if err := l.live.Get(ctx, client.ObjectKeyFromObject(want), set); err != nil {
		return fmt.Errorf("read machine set %s: %w", client.ObjectKeyFromObject(want), err)
	}
	if metav1.IsControlledBy(set, l.deployment) && sameTemplate(&set.Spec.Template, &want.Spec.Template) {
		l.ledger.wrote(set) // made by an earlier leader, for example

		return nil
	}
	count := int32(1)
	if l.deployment.Status.CollisionCount != nil {
		count = *l.deployment.Status.CollisionCount + 1
	}
	l.deployment.Status.CollisionCount = &count
	l.LookAgain(steps.ConflictRetry)
	l.log.Info("name of the new machine set is taken", "machineset", set.Name, "collisions", count)

	return nil
}
