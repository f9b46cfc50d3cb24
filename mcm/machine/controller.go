package machine

import (
	"context"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/backoff"
)

// Fields by which the caches find objects.
const (
	indexClass  = "spec.class.name"
	indexNode   = "metadata.labels.node"
	indexSecret = "secretRefs"
)

// A Notifier says when there is news of a machine's operation or drain;
// dispatch.Dispatcher and drain.Drainer are such.
type Notifier interface {
	Notify(f func(types.NamespacedName))
}

// SetupWithManager adds the controller to a manager. Nodes is the target
// cluster's cache, nil when there is no target cluster.
func (r *Reconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager, nodes cache.Cache, notifier Notifier, workers int) error {
	if err := r.index(ctx, mgr.GetFieldIndexer()); err != nil {
		return err
	}
	b := ctrl.NewControllerManagedBy(mgr).
		Named("machine").
		// Status and journal are this controller's own.
		For(&v1alpha1.Machine{}, builder.WithPredicates(predicate.Or[client.Object](
			predicate.GenerationChangedPredicate{}, outside()))).
		Watches(&v1alpha1.Machine{}, r.forgetMachine()).
		Watches(&v1alpha1.Machine{}, r.replacementEnded()).
		Watches(&v1alpha1.MachineClass{}, handler.EnqueueRequestsFromMapFunc(r.machinesOfClass)).
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(r.machinesOfSecret)).
		WatchesRawSource(notices(notifier)).
		WithOptions(controller.Options{MaxConcurrentReconciles: workers, RateLimiter: backoff.UpTo(time.Minute)})
	if r.Drainer != nil {
		b = b.WatchesRawSource(notices(r.Drainer))
	}
	if r.OutageGuard != nil {
		b = b.WatchesRawSource(r.afterOutage())
	}
	if nodes != nil {
		b = b.WatchesRawSource(source.Kind(nodes, &corev1.Node{},
			handler.TypedEnqueueRequestsFromMapFunc(r.machinesOfNode), nodeChanged()))
	}

	return b.Complete(r)
}

func (r *Reconciler) index(ctx context.Context, indexer client.FieldIndexer) error {
	byClass := func(o client.Object) []string {
		if m, ok := o.(*v1alpha1.Machine); ok {
			return []string{m.Spec.Class.Name}
		}

		return nil
	}
	byNode := func(o client.Object) []string { return []string{o.GetLabels()[v1alpha1.LabelKeyNode]} }
	bySecret := func(o client.Object) []string {
		var keys []string
		if c, ok := o.(*v1alpha1.MachineClass); ok {
			for _, key := range v1alpha1.SecretsOf(c) {
				keys = append(keys, key.String())
			}
		}

		return keys
	}
	for _, i := range []struct {
		object client.Object
		field  string
		keys   client.IndexerFunc
	}{
		{&v1alpha1.Machine{}, indexClass, byClass},
		{&v1alpha1.Machine{}, indexNode, byNode},
		{&v1alpha1.Machine{}, indexReplaced, replacedIn},
		{&v1alpha1.MachineClass{}, indexSecret, bySecret},
	} {
		if err := indexer.IndexField(ctx, i.object, i.field, i.keys); err != nil {
			return err
		}
	}

	return nil
}

// notices is a source of the machines that a notifier names.
func notices(notifier Notifier) source.Source {
	return source.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		notifier.Notify(func(name types.NamespacedName) { queue.Add(reconcile.Request{NamespacedName: name}) })

		return nil
	})
}

// outside passes resyncs, and changes outside of the spec that make a difference: of the
// machine's Node, whose own event may have come before, of the wish to delete it,
// by force perhaps, or to preserve it, and of a journal that could not be read.
func outside() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		DeleteFunc: func(event.DeleteEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			_, err := readJournal(e.ObjectOld)

			changed := func(label string) bool { return e.ObjectOld.GetLabels()[label] != e.ObjectNew.GetLabels()[label] }

			// A resync is an update to the same version.
			return e.ObjectOld.GetResourceVersion() == e.ObjectNew.GetResourceVersion() || err != nil ||
				changed(v1alpha1.LabelKeyNode) || changed(v1alpha1.LabelKeyForceDeletion) ||
				changed(v1alpha1.LabelKeyForceDrain) || preservationChanged(e.ObjectOld, e.ObjectNew) ||
				e.ObjectOld.GetDeletionTimestamp().IsZero() != e.ObjectNew.GetDeletionTimestamp().IsZero()
		},
	}
}

// forgetMachine has dispatcher and drainer forget a machine once no pass can see
// it any more: before, a pass over an old copy would start its operation again.
func (r *Reconciler) forgetMachine() handler.EventHandler {
	return handler.Funcs{
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, _ workqueue.TypedRateLimitingInterface[reconcile.Request]) {
			r.Dispatcher.Forget(e.Object.GetUID())
			for _, s := range subjects(e.Object.GetUID()) {
				r.said.Delete(s)
			}
			r.unfound.Delete(e.Object.GetUID())
			if r.Drainer != nil {
				r.Drainer.Forget(e.Object.GetUID())
			}
		},
	}
}

// machinesOfClass are those for which a change of their class can make a
// difference: a running machine needs its class only when it is deleted, and for
// what its Node shows of it.
func (r *Reconciler) machinesOfClass(ctx context.Context, class client.Object) []reconcile.Request {
	list := &v1alpha1.MachineList{}
	err := r.Control.List(ctx, list, client.InNamespace(class.GetNamespace()), client.MatchingFields{indexClass: class.GetName()})
	if err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "cannot list the machines of a class", "class", class.GetName())

		return nil
	}
	c, isClass := class.(*v1alpha1.MachineClass)
	shown := isClass && c.NodeTemplate != nil && len(c.NodeTemplate.VirtualCapacity) > 0
	var requests []reconcile.Request
	for i := range list.Items {
		m := &list.Items[i]
		if creating(m) || !m.DeletionTimestamp.IsZero() || shown {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(m)})
		}
	}

	return requests
}

func (r *Reconciler) machinesOfSecret(ctx context.Context, secret client.Object) []reconcile.Request {
	classes := &v1alpha1.MachineClassList{}
	err := r.Control.List(ctx, classes, client.MatchingFields{indexSecret: secret.GetNamespace() + "/" + secret.GetName()})
	if err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "cannot list the classes of a secret", "secret", secret.GetName())

		return nil
	}
	var requests []reconcile.Request
	for i := range classes.Items {
		requests = append(requests, r.machinesOfClass(ctx, &classes.Items[i])...)
	}

	return requests
}

func (r *Reconciler) machinesOfNode(ctx context.Context, node *corev1.Node) []reconcile.Request {
	list := &v1alpha1.MachineList{}
	if err := r.Control.List(ctx, list, client.MatchingFields{indexNode: node.Name}); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "cannot list the machines of a node", "node", node.Name)

		return nil
	}
	requests := make([]reconcile.Request, 0, len(list.Items))
	for i := range list.Items {
		requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
	}

	return requests
}

// nodeChanged drops a Node's heartbeats, of which there are many.
func nodeChanged() predicate.TypedPredicate[*corev1.Node] {
	return predicate.TypedFuncs[*corev1.Node]{
		UpdateFunc: func(e event.TypedUpdateEvent[*corev1.Node]) bool {
			before, after := e.ObjectOld, e.ObjectNew

			return !sameConditions(before.Status.Conditions, after.Status.Conditions) ||
				!equality.Semantic.DeepEqual(before.Spec, after.Spec) ||
				!equality.Semantic.DeepEqual(before.Status.Capacity, after.Status.Capacity) ||
				!slices.Equal(before.Finalizers, after.Finalizers) ||
				!maps.Equal(before.Labels, after.Labels) || !maps.Equal(before.Annotations, after.Annotations) ||
				before.DeletionTimestamp.IsZero() != after.DeletionTimestamp.IsZero()
		},
	}
}
