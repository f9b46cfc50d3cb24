package machineclass

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// A Driver checks whether it can use a class. Validate waits for an answer without a
// timeout. dispatch.Classes is a Driver.
type Driver interface {
	Validate(ctx context.Context, provider string, class dispatch.Class) (warnings []string, err error)
}

// A Validator has the driver check each class that is new or changed, or whose secrets
// changed, and records the answer as Events on the class. The answer has no other effect:
// machines of a refused class fail with the driver's error.
type Validator struct {
	client          client.Client
	events          record.EventRecorder
	driver          Driver
	defaultProvider string
	ctx             context.Context //nolint:containedctx // a question outlives the pass that began it

	mu      sync.Mutex
	asked   map[client.ObjectKey]*question
	running sync.WaitGroup
}

// A question is about one version of a class.
type question struct {
	version string
	cancel  context.CancelFunc
}

// NewValidator returns a Validator that reads from c, a manager's client, and
// whose questions end with ctx.
func NewValidator(ctx context.Context, c client.Client, events record.EventRecorder, driver Driver, defaultProvider string) *Validator {
	return &Validator{
		client: c, events: events, driver: driver, defaultProvider: defaultProvider, ctx: ctx,
		asked: map[client.ObjectKey]*question{},
	}
}

// SetupWithManager adds the controller to a manager. It must be called after that of
// SecretReconciler, because it uses the same index.
func (v *Validator) SetupWithManager(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).
		Named("machineclass-validate").
		For(&v1alpha1.MachineClass{}, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(v.classesOf)).
		Complete(v)
}

// Wait returns when all questions have ended after NewValidator's ctx ended.
func (v *Validator) Wait() { v.running.Wait() }

// Reconcile asks about one class, unless it has asked about this version already.
func (v *Validator) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	class := &v1alpha1.MachineClass{}
	err := v.client.Get(ctx, req.NamespacedName, class)
	if apierrors.IsNotFound(err) || !class.DeletionTimestamp.IsZero() {
		v.forget(req.NamespacedName)

		return reconcile.Result{}, nil
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	d := dispatch.Class{Object: class}
	secret, known, err := v.secret(ctx, class, class.SecretRef)
	if err != nil || !known {
		return reconcile.Result{}, err
	}
	credentials, known, err := v.secret(ctx, class, class.CredentialsSecretRef)
	if err != nil || !known {
		return reconcile.Result{}, err
	}
	if secret != nil {
		d.Secret = secret
	}
	if credentials != nil {
		d.Credentials = credentials
	}
	v.ask(ctx, req.NamespacedName, d, version(class, secret, credentials))

	return reconcile.Result{}, nil
}

// secret reads a secret of the class; known is false if the class refers to a secret that
// does not exist yet or is not allowed. Machines of the class report that.
func (v *Validator) secret(ctx context.Context, class *v1alpha1.MachineClass, ref *corev1.SecretReference) (*corev1.Secret, bool, error) {
	if ref == nil || ref.Name == "" {
		return nil, true, nil
	}
	key, allowed := v1alpha1.SecretKey(class, ref)
	if !allowed {
		return nil, false, nil
	}
	secret := &corev1.Secret{}
	if err := v.client.Get(ctx, key, secret); err != nil {
		return nil, false, client.IgnoreNotFound(err)
	}

	return secret, true, nil
}

// version returns a hash of everything that a driver sees of a class, without its metadata.
func version(class *v1alpha1.MachineClass, secrets ...*corev1.Secret) string {
	h := sha256.New()
	write := func(text string) { fmt.Fprintf(h, "%d:%s", len(text), text) }
	write(string(class.UID))
	write(strconv.FormatInt(class.Generation, 10))
	for _, secret := range secrets {
		write("secret")
		if secret == nil {
			continue
		}
		write(string(secret.UID))
		for _, key := range slices.Sorted(maps.Keys(secret.Data)) {
			write(key)
			write(string(secret.Data[key]))
		}
	}

	return hex.EncodeToString(h.Sum(nil))
}

// ask starts a question about a class, and cancels an earlier one about another version.
func (v *Validator) ask(ctx context.Context, key client.ObjectKey, class dispatch.Class, version string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if before, ok := v.asked[key]; ok {
		if before.version == version {
			return
		}
		before.cancel()
	}
	asking, cancel := context.WithCancel(v.ctx)
	v.asked[key] = &question{version: version, cancel: cancel}
	asking = ctrl.LoggerInto(asking, ctrl.LoggerFrom(ctx))
	v.running.Go(func() {
		defer cancel()
		v.checkUntilAnswered(asking, class)
	})
}

func (v *Validator) forget(key client.ObjectKey) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if before, ok := v.asked[key]; ok {
		before.cancel()
		delete(v.asked, key)
	}
}

// classesOf maps a secret to the classes that refer to it.
func (v *Validator) classesOf(ctx context.Context, secret client.Object) []reconcile.Request {
	list := &v1alpha1.MachineClassList{}
	key := client.ObjectKeyFromObject(secret)
	if err := v.client.List(ctx, list, client.MatchingFields{indexSecretsOfClass: key.String()}); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "cannot list the classes of a secret", "secret", key)

		return nil
	}
	requests := make([]reconcile.Request, 0, len(list.Items))
	for i := range list.Items {
		requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
	}

	return requests
}
