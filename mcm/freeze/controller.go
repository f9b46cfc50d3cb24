package freeze

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

// indexController finds machines and sets by the uid of the object that controls
// them.
const indexController = "freeze.controller"

func controllerOf(o client.Object) []string {
	if ref := metav1.GetControllerOfNoCopy(o); ref != nil {
		return []string{string(ref.UID)}
	}

	return nil
}

// SetupWithManager adds the controller of sets to a manager. Sets are counted when
// a machine is made, and periodically, and those that are frozen also when a
// machine goes, or when their spec or their deployment's changes: both may end it.
// Others are not: every set that shrinks by much has too many machines for a moment.
func (r *SetReconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	if err := mgr.GetFieldIndexer().IndexField(ctx, &v1alpha1.Machine{}, indexController, controllerOf); err != nil {
		return fmt.Errorf("index machines by controller: %w", err)
	}
	made := predicate.Funcs{
		UpdateFunc: func(event.UpdateEvent) bool { return false },
		DeleteFunc: func(e event.DeleteEvent) bool { return r.ofFrozen(ctx, e.Object) },
	}

	return ctrl.NewControllerManagedBy(mgr).
		Named("freeze").
		For(&v1alpha1.MachineSet{}, builder.WithPredicates(changed())).
		Watches(&v1alpha1.Machine{}, handler.EnqueueRequestsFromMapFunc(controllerRequest(v1alpha1.KindMachineSet)),
			builder.WithPredicates(made)).
		Watches(&v1alpha1.MachineDeployment{}, handler.EnqueueRequestsFromMapFunc(r.frozenOf),
			builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		WithOptions(controller.Options{RateLimiter: backoff.UpTo(r.Settings.Period)}).
		Complete(r)
}

// frozenOf maps a deployment to its frozen sets.
func (r *SetReconciler) frozenOf(ctx context.Context, deployment client.Object) []reconcile.Request {
	list := &v1alpha1.MachineSetList{}
	err := r.Client.List(ctx, list, client.InNamespace(deployment.GetNamespace()),
		client.MatchingLabels{v1alpha1.LabelKeyFreeze: v1alpha1.LabelValueTrue}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil // the next look tells
	}
	var requests []reconcile.Request
	for i := range list.Items {
		if set := &list.Items[i]; metav1.IsControlledBy(set, deployment) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(set)})
		}
	}

	return requests
}

// ofFrozen tells whether a machine is one of a set that is frozen.
func (r *SetReconciler) ofFrozen(ctx context.Context, machine client.Object) bool {
	ref := metav1.GetControllerOfNoCopy(machine)
	if ref == nil || ref.Kind != v1alpha1.KindMachineSet {
		return false
	}
	set := &v1alpha1.MachineSet{}
	err := r.Client.Get(ctx, client.ObjectKey{Namespace: machine.GetNamespace(), Name: ref.Name}, set, client.UnsafeDisableDeepCopy)

	return err == nil && isFrozen(set) // if not, the next look tells
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

// changed passes what people and other writers do to a freeze, but for the
// condition: that is put right at the next look. A changed spec may end one.
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
