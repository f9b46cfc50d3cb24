package overshoot

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// conflictRetry is the time to a retry after a conflict. The event of the other write may
// have come before our own write failed.
const conflictRetry = 200 * time.Millisecond

// mark sets or removes an object's label, and removes the request to end the freeze.
func mark(o client.Object, frozen bool) {
	labels, annotations := o.GetLabels(), o.GetAnnotations()
	delete(labels, v1alpha1.LabelKeyFreeze)
	delete(annotations, v1alpha1.AnnotationKeyUnfreeze)
	if frozen {
		if labels == nil {
			labels = map[string]string{}
		}
		labels[v1alpha1.LabelKeyFreeze] = v1alpha1.LabelValueTrue
	}
	o.SetLabels(labels)
	o.SetAnnotations(annotations)
}

// storeMetadata stores changed labels and annotations. It returns a conflict if the object
// has changed since it was read.
func storeMetadata(ctx context.Context, c client.Client, after, before client.Object) (changed bool, err error) {
	if equality.Semantic.DeepEqual(after.GetLabels(), before.GetLabels()) &&
		equality.Semantic.DeepEqual(after.GetAnnotations(), before.GetAnnotations()) {
		return false, nil
	}
	if err := c.Patch(ctx, after, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return false, fmt.Errorf("store the freeze label of %s: %w", client.ObjectKeyFromObject(after), err)
	}

	return true, nil
}

// storeStatus stores a changed status. It returns a conflict if the object has changed since
// it was read: the list of conditions has several writers.
func storeStatus(ctx context.Context, c client.Client, after, before client.Object) error {
	if err := c.Status().Patch(ctx, after, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("store condition Frozen of %s: %w", client.ObjectKeyFromObject(after), err)
	}

	return nil
}
