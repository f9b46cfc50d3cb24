package machineclass

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
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

// indexSecretsOfClass indexes classes by the secrets that they refer to.
const indexSecretsOfClass = "machineclass.secrets"

// A SecretReconciler protects Secrets from deletion while MachineClasses refer to them.
type SecretReconciler struct{ protector }

// NewSecretReconciler returns a SecretReconciler that reads from c, a manager's
// client.
func NewSecretReconciler(c client.Client, events record.EventRecorder) *SecretReconciler {
	return &SecretReconciler{protector{
		client: c, events: events, finalizer: v1alpha1.FinalizerNameSecret,
		kind: "secret", user: "machine class", users: "machine classes",
	}}
}

// SetupWithManager adds the controller to a manager.
func (r *SecretReconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	err := mgr.GetFieldIndexer().IndexField(ctx, &v1alpha1.MachineClass{}, indexSecretsOfClass, func(o client.Object) []string {
		var keys []string
		for _, key := range secretsOf(o) {
			keys = append(keys, key.String())
		}

		return keys
	})
	if err != nil {
		return fmt.Errorf("index classes by secret: %w", err)
	}

	return ctrl.NewControllerManagedBy(mgr).
		Named("machineclass-secret").
		For(&corev1.Secret{}, builder.WithPredicates(metadataChanged())).
		// On an update, this maps the secrets before and those after.
		Watches(&v1alpha1.MachineClass{}, handler.EnqueueRequestsFromMapFunc(requestsForSecrets), builder.WithPredicates(secretsChanged())).
		Complete(r)
}

// Reconcile looks at one secret.
func (r *SecretReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	secret := &corev1.Secret{}
	if err := r.client.Get(ctx, req.NamespacedName, secret); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	classes := &v1alpha1.MachineClassList{}
	err := r.client.List(ctx, classes, client.MatchingFields{indexSecretsOfClass: req.String()}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("list classes of secret %s: %w", req.NamespacedName, err)
	}
	names := make([]string, 0, len(classes.Items))
	for i := range classes.Items {
		names = append(names, client.ObjectKeyFromObject(&classes.Items[i]).String())
	}

	return reconcile.Result{}, r.protect(ctx, secret, names)
}

// secretsOf is v1alpha1.SecretsOf for a class, and returns nil for other objects.
func secretsOf(o client.Object) []client.ObjectKey {
	class, ok := o.(*v1alpha1.MachineClass)
	if !ok {
		return nil
	}

	return v1alpha1.SecretsOf(class)
}

func requestsForSecrets(_ context.Context, o client.Object) []reconcile.Request {
	var requests []reconcile.Request
	for _, key := range secretsOf(o) {
		requests = append(requests, reconcile.Request{NamespacedName: key})
	}

	return requests
}

// secretsChanged drops updates of classes whose references to secrets stay the same.
func secretsChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, after := secretsOf(e.ObjectOld), secretsOf(e.ObjectNew)

		return !slices.Equal(before, after)
	}}
}
