package overshoot

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

// indexController indexes machines and sets by the uid of the object that controls them.
const indexController = "overshoot.controller"

func controllerOf(o client.Object) []string {
	if ref := metav1.GetControllerOfNoCopy(o); ref != nil {
		return []string{string(ref.UID)}
	}

	return nil
}

// SetupWithManager adds the controller of sets to a manager. It counts a set's machines when
// one is created, and periodically. It also counts those of a frozen set when a machine is
// deleted or when the spec of the set or of its deployment changes: these may end the
// freeze. Other sets may have too many machines for a moment then, while they shrink.
func (r *SetReconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	if err := mgr.GetFieldIndexer().IndexField(ctx, &v1alpha1.Machine{}, indexController, controllerOf); err != nil {
		return fmt.Errorf("index machines by controller: %w", err)
	}
	created := predicate.Funcs{
		UpdateFunc: func(event.UpdateEvent) bool { return false },
		DeleteFunc: func(e event.DeleteEvent) bool { return r.inFrozenSet(ctx, e.Object) },
	}

	return ctrl.NewControllerManagedBy(mgr).
		Named("freeze").
		For(&v1alpha1.MachineSet{}, builder.WithPredicates(changed())).
		Watches(&v1alpha1.Machine{}, handler.EnqueueRequestsFromMapFunc(controllerRequest(v1alpha1.KindMachineSet)),
			builder.WithPredicates(created)).
		Watches(&v1alpha1.MachineDeployment{}, handler.EnqueueRequestsFromMapFunc(r.frozenSetsOf),
			builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		WithOptions(controller.Options{RateLimiter: backoff.UpTo(r.Settings.Period)}).
		Complete(r)
}

// frozenSetsOf maps a deployment to its frozen sets.
func (r *SetReconciler) frozenSetsOf(ctx context.Context, deployment client.Object) []reconcile.Request {
	list := &v1alpha1.MachineSetList{}
	err := r.Client.List(ctx, list, client.InNamespace(deployment.GetNamespace()),
		client.MatchingLabels{v1alpha1.LabelKeyFreeze: v1alpha1.LabelValueTrue}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil // the next periodic count makes up for it
	}
	var requests []reconcile.Request
	for i := range list.Items {
		if set := &list.Items[i]; metav1.IsControlledBy(set, deployment) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(set)})
		}
	}

	return requests
}

// inFrozenSet reports whether a machine belongs to a frozen set.
func (r *SetReconciler) inFrozenSet(ctx context.Context, machine client.Object) bool {
	ref := metav1.GetControllerOfNoCopy(machine)
	if ref == nil || ref.Kind != v1alpha1.KindMachineSet {
		return false
	}
	set := &v1alpha1.MachineSet{}
	err := r.Client.Get(ctx, client.ObjectKey{Namespace: machine.GetNamespace(), Name: ref.Name}, set, client.UnsafeDisableDeepCopy)

	return err == nil && isFrozen(set) // after an error the next periodic count makes up for it
}

// SetupWithManager adds the controller of deployments to a manager.
func (r *DeploymentReconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	if err := mgr.GetFieldIndexer().IndexField(ctx, &v1alpha1.MachineSet{}, indexController, controllerOf); err != nil {
		return fmt.Errorf("index machine sets by controller: %w", err)
	}

	return ctrl.NewControllerManagedBy(mgr).
		Named("freeze-deployment").
		For(&v1alpha1.MachineDeployment{}, builder.WithPredicates(changed())).
		Watches(&v1alpha1.MachineSet{}, handler.EnqueueRequestsFromMapFunc(controllerRequest(v1alpha1.KindMachineDeployment)),
			builder.WithPredicates(changed())).
		WithOptions(controller.Options{RateLimiter: backoff.UpTo(r.Settings.Period)}).
		Complete(r)
}

// changed passes updates that may begin or end a freeze: of the label, of the annotation
// that asks to end it, and of the spec of a frozen object. A changed condition is corrected
// by the next periodic count.
func changed() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		_, before := e.ObjectOld.GetAnnotations()[v1alpha1.AnnotationKeyUnfreeze]
		_, after := e.ObjectNew.GetAnnotations()[v1alpha1.AnnotationKeyUnfreeze]

		return before != after || isFrozen(e.ObjectOld) != isFrozen(e.ObjectNew) ||
			isFrozen(e.ObjectNew) && e.ObjectOld.GetGeneration() != e.ObjectNew.GetGeneration() ||
			e.ObjectOld.GetResourceVersion() == e.ObjectNew.GetResourceVersion() // a resync
	}}
}

// controllerRequest maps an object to the object of a kind that controls it.
func controllerRequest(kind string) handler.MapFunc {
	return func(_ context.Context, o client.Object) []reconcile.Request {
		ref := metav1.GetControllerOfNoCopy(o)
		if ref == nil || ref.Kind != kind {
			return nil
		}

		return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: o.GetNamespace(), Name: ref.Name}}}
	}
}
