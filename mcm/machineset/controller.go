package machineset

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/backoff"
)

// gather is how long news of machines is gathered before their set is looked at:
// machines of one set come and go together, and each look may be a write of its
// status.
const gather = 100 * time.Millisecond

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// SetupWithManager adds the controller to a manager.
func (r *Reconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager, workers int) error {
	if err := mgr.GetFieldIndexer().IndexField(ctx, &v1alpha1.Machine{}, indexController, controllerOf); err != nil {
		return fmt.Errorf("index machines by controller: %w", err)
	}

	return ctrl.NewControllerManagedBy(mgr).
		Named("machineset").
		// Status is written here and by the freeze, whose label says the same.
		For(&v1alpha1.MachineSet{}, builder.WithPredicates(predicate.Or[client.Object](
			predicate.GenerationChangedPredicate{}, metadataChanged()))).
		Watches(&v1alpha1.Machine{}, r.machineEvents()).
		WithOptions(controller.Options{MaxConcurrentReconciles: workers, RateLimiter: backoff.UpTo(time.Minute)}).
		Complete(r)
}

// metadataChanged passes what changes in labels, annotations and finalizers
// without changing the generation.
func metadataChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, after := e.ObjectOld, e.ObjectNew

		return !equality.Semantic.DeepEqual(before.GetLabels(), after.GetLabels()) ||
			!equality.Semantic.DeepEqual(before.GetAnnotations(), after.GetAnnotations()) ||
			!equality.Semantic.DeepEqual(before.GetFinalizers(), after.GetFinalizers()) ||
			before.GetResourceVersion() == after.GetResourceVersion() // a resync
	}}
}

// machineEvents has sets looked at whose machines come, go or change.
func (r *Reconciler) machineEvents() handler.EventHandler {
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q queue) { r.enqueue(ctx, e.Object, q) },
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) { r.enqueue(ctx, e.Object, q) },
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) {
			before, ok := e.ObjectOld.(*v1alpha1.Machine)
			after, too := e.ObjectNew.(*v1alpha1.Machine)
			if !ok || !too || !matters(before, after) {
				return
			}
			if !equality.Semantic.DeepEqual(before.OwnerReferences, after.OwnerReferences) {
				r.enqueue(ctx, before, q)
			}
			r.enqueue(ctx, after, q)
		},
	}
}

// matters reports whether a change of a machine can make a difference to its set.
// The conditions of its Node and the journal of its operations make none.
func matters(before, after *v1alpha1.Machine) bool {
	return before.Generation != after.Generation ||
		before.DeletionTimestamp.IsZero() != after.DeletionTimestamp.IsZero() ||
		!equality.Semantic.DeepEqual(before.Labels, after.Labels) ||
		!equality.Semantic.DeepEqual(before.OwnerReferences, after.OwnerReferences) ||
		!equality.Semantic.DeepEqual(withoutJournal(before), withoutJournal(after)) ||
		!equality.Semantic.DeepEqual(before.Status.CurrentStatus, after.Status.CurrentStatus) ||
		fault(before) != fault(after)
}

// fault is the machine's last operation if that failed, without when.
func fault(m *v1alpha1.Machine) v1alpha1.LastOperation {
	last := m.Status.LastOperation
	if last.State != v1alpha1.MachineStateFailed {
		return v1alpha1.LastOperation{}
	}
	last.LastUpdateTime = metav1.Time{}

	return last
}

func withoutJournal(m *v1alpha1.Machine) map[string]string {
	kept := make(map[string]string, len(m.Annotations))
	for key, value := range m.Annotations {
		if key != v1alpha1.AnnotationKeyOperation {
			kept[key] = value
		}
	}

	return kept
}

// enqueue starts a pass over the machine's set, or, for a machine without a controller,
// over all sets that may adopt it.
func (r *Reconciler) enqueue(ctx context.Context, machine client.Object, q queue) {
	if ref := metav1.GetControllerOfNoCopy(machine); ref != nil {
		if ref.Kind == v1alpha1.KindMachineSet {
			add(q, machine.GetNamespace(), ref.Name)
		}

		return
	}
	sets := &v1alpha1.MachineSetList{}
	if err := r.Client.List(ctx, sets, client.InNamespace(machine.GetNamespace()), client.UnsafeDisableDeepCopy); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "cannot list the sets that may adopt a machine", "machine", machine.GetName())

		return
	}
	for i := range sets.Items {
		set := &sets.Items[i]
		selector, err := selectorOf(set)
		if err == nil && selector.Matches(labels.Set(machine.GetLabels())) {
			add(q, set.Namespace, set.Name)
		}
	}
}

func add(q queue, namespace, name string) {
	q.AddAfter(reconcile.Request{NamespacedName: client.ObjectKey{Namespace: namespace, Name: name}}, gather)
}
