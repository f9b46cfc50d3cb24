package machinedeployment

import (
	"context"
	"fmt"
	"maps"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

// gather is how long news of sets and machines is gathered before their
// deployment is looked at: each look may be a write of its status.
const gather = 100 * time.Millisecond

// indexSet finds the Machines of a MachineSet by the set's uid.
const indexSet = "machinedeployment.set"

// SetupWithManager adds the controller to a manager. Workers is the number of
// deployments looked at in parallel.
func (r *Reconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager, workers int) error {
	err := mgr.GetFieldIndexer().IndexField(ctx, &v1alpha1.Machine{}, indexSet, func(o client.Object) []string {
		if owner := metav1.GetControllerOf(o); owner != nil {
			return []string{string(owner.UID)}
		}

		return nil
	})
	if err != nil {
		return fmt.Errorf("index machines by set: %w", err)
	}

	return ctrl.NewControllerManagedBy(mgr).
		Named("machinedeployment").
		// Status is this controller's own.
		For(&v1alpha1.MachineDeployment{}, builder.WithPredicates(predicate.Or[client.Object](
			predicate.GenerationChangedPredicate{}, predicate.AnnotationChangedPredicate{}, predicate.LabelChangedPredicate{},
			deletionChanged()))).
		Watches(&v1alpha1.MachineSet{}, r.setEvents()).
		Watches(&v1alpha1.Machine{}, r.machineEvents(), builder.WithPredicates(machineChanged())).
		WithOptions(controller.Options{MaxConcurrentReconciles: workers, RateLimiter: backoff.UpTo(time.Minute)}).
		Complete(r)
}

// deletionChanged passes what says that a deployment, or its dependents, are to go.
func deletionChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return e.ObjectOld.GetDeletionTimestamp().IsZero() != e.ObjectNew.GetDeletionTimestamp().IsZero() ||
			len(e.ObjectOld.GetFinalizers()) != len(e.ObjectNew.GetFinalizers())
	}}
}

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

func add(q queue, requests []reconcile.Request) {
	for _, request := range requests {
		q.AddAfter(request, gather)
	}
}

// setEvents has the deployments of a set looked at. For a set without
// an owner these are all deployments of the namespace that select it.
func (r *Reconciler) setEvents() handler.EventHandler {
	enqueue := func(ctx context.Context, o client.Object, q queue) { add(q, r.deploymentsOfSet(ctx, o)) }

	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q queue) { enqueue(ctx, e.Object, q) },
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) {
			enqueue(ctx, e.ObjectOld, q)
			enqueue(ctx, e.ObjectNew, q)
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) {
			r.ledger.forget(e.Object)
			enqueue(ctx, e.Object, q)
		},
	}
}

func (r *Reconciler) deploymentsOfSet(ctx context.Context, set client.Object) []reconcile.Request {
	if owner := metav1.GetControllerOf(set); owner != nil {
		if owner.Kind != v1alpha1.KindMachineDeployment {
			return nil
		}

		return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: set.GetNamespace(), Name: owner.Name}}}
	}
	list := &v1alpha1.MachineDeploymentList{}
	if err := r.Control.List(ctx, list, client.InNamespace(set.GetNamespace()), client.UnsafeDisableDeepCopy); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "cannot list the deployments that may adopt a set", "machineset", set.GetName())

		return nil
	}
	var requests []reconcile.Request
	for i := range list.Items {
		if selects(list.Items[i].Spec.Selector, set.GetLabels()) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
		}
	}

	return requests
}

// machineEvents has the deployment of a machine's set looked at.
func (r *Reconciler) machineEvents() handler.EventHandler {
	enqueue := func(ctx context.Context, o client.Object, q queue) { add(q, r.deploymentOfMachine(ctx, o)) }

	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q queue) { enqueue(ctx, e.Object, q) },
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) {
			if !maps.Equal(owners(e.ObjectOld), owners(e.ObjectNew)) {
				enqueue(ctx, e.ObjectOld, q)
			}
			enqueue(ctx, e.ObjectNew, q)
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) { enqueue(ctx, e.Object, q) },
	}
}

func (r *Reconciler) deploymentOfMachine(ctx context.Context, m client.Object) []reconcile.Request {
	owner := metav1.GetControllerOf(m)
	if owner == nil || owner.Kind != v1alpha1.KindMachineSet {
		return nil
	}
	set := &v1alpha1.MachineSet{}
	key := client.ObjectKey{Namespace: m.GetNamespace(), Name: owner.Name}
	if err := r.Control.Get(ctx, key, set, client.UnsafeDisableDeepCopy); err != nil {
		return nil // without its set it has no deployment
	}
	if metav1.GetControllerOf(set) == nil {
		return nil
	}

	return r.deploymentsOfSet(ctx, set)
}

// machineChanged drops updates of Machines that make no difference to a rollout.
func machineChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, ok := e.ObjectOld.(*v1alpha1.Machine)
		after, okToo := e.ObjectNew.(*v1alpha1.Machine)
		if !ok || !okToo {
			return false
		}
		last, now := before.Status.LastOperation, after.Status.LastOperation

		return before.Status.CurrentStatus.Phase != after.Status.CurrentStatus.Phase ||
			before.Status.CurrentStatus.PreserveExpiryTime.IsZero() != after.Status.CurrentStatus.PreserveExpiryTime.IsZero() ||
			last.State != now.State || last.ErrorCode != now.ErrorCode || last.Description != now.Description ||
			before.DeletionTimestamp.IsZero() != after.DeletionTimestamp.IsZero() ||
			before.Labels[v1alpha1.LabelKeyNode] != after.Labels[v1alpha1.LabelKeyNode] ||
			!maps.Equal(owners(before), owners(after))
	}}
}

func owners(o client.Object) map[string]bool {
	uids := map[string]bool{}
	for _, ref := range o.GetOwnerReferences() {
		uids[string(ref.UID)] = true
	}

	return uids
}
