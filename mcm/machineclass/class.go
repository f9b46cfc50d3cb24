package machineclass

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// indexClassOfMachine indexes Machines by class. Package machine's index also has references
// of the wrong kind.
const indexClassOfMachine = "machineclass.class"

// A ClassReconciler protects MachineClasses from deletion while Machines refer to them.
type ClassReconciler struct{ protector }

// NewClassReconciler returns a ClassReconciler that reads from c, a manager's
// client.
func NewClassReconciler(c client.Client, events record.EventRecorder) *ClassReconciler {
	return &ClassReconciler{protector{
		client: c, events: events, finalizer: v1alpha1.FinalizerName,
		kind: "class", user: "machine", users: "machines",
	}}
}

// SetupWithManager adds the controller to a manager.
func (r *ClassReconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	err := mgr.GetFieldIndexer().IndexField(ctx, &v1alpha1.Machine{}, indexClassOfMachine, func(o client.Object) []string {
		if name, ok := classOf(o); ok {
			return []string{name}
		}

		return nil
	})
	if err != nil {
		return fmt.Errorf("index machines by class: %w", err)
	}

	return ctrl.NewControllerManagedBy(mgr).
		Named("machineclass").
		For(&v1alpha1.MachineClass{}, builder.WithPredicates(metadataChanged())).
		// On an update, this maps the class before and the class after.
		Watches(&v1alpha1.Machine{}, handler.EnqueueRequestsFromMapFunc(requestForClass), builder.WithPredicates(classChanged())).
		Complete(r)
}

// Reconcile looks at one class.
func (r *ClassReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	class := &v1alpha1.MachineClass{}
	if err := r.client.Get(ctx, req.NamespacedName, class); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	machines := &v1alpha1.MachineList{}
	options := []client.ListOption{
		client.InNamespace(class.Namespace), client.MatchingFields{indexClassOfMachine: class.Name}, client.UnsafeDisableDeepCopy,
	}
	if class.DeletionTimestamp.IsZero() {
		// The number does not matter, and each deleted machine of ten thousand starts a pass.
		options = append(options, client.Limit(1))
	}
	err := r.client.List(ctx, machines, options...)
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("list machines of class %s: %w", req.NamespacedName, err)
	}
	names := make([]string, 0, len(machines.Items))
	for i := range machines.Items {
		names = append(names, machines.Items[i].Name)
	}

	return reconcile.Result{}, r.protect(ctx, class, names)
}

// classOf returns the name of the class that a Machine refers to; false if it refers to no
// class.
func classOf(o client.Object) (string, bool) {
	m, ok := o.(*v1alpha1.Machine)
	if !ok || m.Spec.Class.Kind != v1alpha1.KindMachineClass || m.Spec.Class.Name == "" {
		return "", false
	}

	return m.Spec.Class.Name, true
}

func requestForClass(_ context.Context, o client.Object) []reconcile.Request {
	name, ok := classOf(o)
	if !ok {
		return nil
	}

	return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: o.GetNamespace(), Name: name}}}
}

// classChanged drops the many updates of Machines that keep their class.
func classChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, hadOne := classOf(e.ObjectOld)
		after, hasOne := classOf(e.ObjectNew)

		return hadOne != hasOne || before != after
	}}
}

// metadataChanged drops updates that do not affect finalizers.
func metadataChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return e.ObjectOld.GetDeletionTimestamp().IsZero() != e.ObjectNew.GetDeletionTimestamp().IsZero() ||
			!slices.Equal(e.ObjectOld.GetFinalizers(), e.ObjectNew.GetFinalizers()) ||
			e.ObjectOld.GetResourceVersion() == e.ObjectNew.GetResourceVersion() // a resync
	}}
}
