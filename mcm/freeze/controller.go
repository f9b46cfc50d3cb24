package freeze

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
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

// SetupWithManager adds the controller of sets to a manager.
func (r *SetReconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	if err := mgr.GetFieldIndexer().IndexField(ctx, &v1alpha1.Machine{}, indexController, controllerOf); err != nil {
		return fmt.Errorf("index machines by controller: %w", err)
	}

	return ctrl.NewControllerManagedBy(mgr).
		Named("freeze").
		For(&v1alpha1.MachineSet{}, builder.WithPredicates(changed())).
		Watches(&v1alpha1.Machine{}, handler.EnqueueRequestsFromMapFunc(controllerRequest(v1alpha1.KindMachineSet)),
			builder.WithPredicates(predicate.Funcs{UpdateFunc: func(event.UpdateEvent) bool { return false }})).
		Watches(&v1alpha1.MachineDeployment{}, handler.EnqueueRequestsFromMapFunc(r.setsOf),
			builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Complete(r)
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
		Complete(r)
}

// changed drops changes of what other controllers write to status; the condition
// Frozen is put right at the next look.
func changed() predicate.Predicate {
	return predicate.Or(predicate.GenerationChangedPredicate{}, predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return !equality.Semantic.DeepEqual(e.ObjectOld.GetLabels(), e.ObjectNew.GetLabels()) ||
			!equality.Semantic.DeepEqual(e.ObjectOld.GetAnnotations(), e.ObjectNew.GetAnnotations()) ||
			e.ObjectOld.GetResourceVersion() == e.ObjectNew.GetResourceVersion() // a resync
	}})
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

func (r *SetReconciler) setsOf(ctx context.Context, deployment client.Object) []reconcile.Request {
	list := &v1alpha1.MachineSetList{}
	if err := r.Client.List(ctx, list, client.InNamespace(deployment.GetNamespace()), client.UnsafeDisableDeepCopy); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "cannot list the sets of a deployment", "deployment", deployment.GetName())

		return nil
	}
	var requests []reconcile.Request
	for i := range list.Items {
		if metav1.IsControlledBy(&list.Items[i], deployment) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
		}
	}

	return requests
}
