package machineclass

import (
	"context"
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	toolscache "k8s.io/client-go/tools/cache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/lastgood"
)

// Removed remembers classes and secrets that were removed by force while machines needed
// them for their deletion. It only keeps them in memory, because of the secrets, until the
// object is back or the last machine is gone. It is safe for concurrent use.
type Removed struct {
	reader client.Reader

	mu      sync.Mutex
	classes map[client.ObjectKey]*v1alpha1.MachineClass
	secrets map[client.ObjectKey]*corev1.Secret
}

// NewRemoved returns a Removed that reads from a manager's cache.
func NewRemoved(reader client.Reader) *Removed {
	return &Removed{
		reader: reader, classes: map[client.ObjectKey]*v1alpha1.MachineClass{}, secrets: map[client.ObjectKey]*corev1.Secret{},
	}
}

// Class returns a removed class as it was last seen; nil if it is not known. The caller must
// not change it.
func (r *Removed) Class(key client.ObjectKey) *v1alpha1.MachineClass {
	r.mu.Lock()
	defer r.mu.Unlock()

	return r.classes[key]
}

// Secret is Class for secrets.
func (r *Removed) Secret(key client.ObjectKey) *corev1.Secret {
	r.mu.Lock()
	defer r.mu.Unlock()

	return r.secrets[key]
}

// Watch starts to remember removals, for as long as the informers run. Every replica of a
// manager does, because every one of them answers drivers.
func (r *Removed) Watch(ctx context.Context, informers cache.Informers) error {
	for _, w := range []struct {
		object     client.Object
		came, gone func(context.Context, client.Object)
	}{
		{&v1alpha1.MachineClass{}, r.classCame, r.classGone},
		{&corev1.Secret{}, r.secretCame, r.secretGone},
		{&v1alpha1.Machine{}, nil, func(ctx context.Context, _ client.Object) { r.prune(ctx) }},
	} {
		informer, err := informers.GetInformer(ctx, w.object)
		if err != nil {
			return fmt.Errorf("watch removals of %T: %w", w.object, err)
		}
		handlers := toolscache.ResourceEventHandlerFuncs{DeleteFunc: func(o any) {
			if last, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
				o = last.Obj
			}
			if object, ok := o.(client.Object); ok {
				w.gone(ctx, object)
			}
		}}
		if w.came != nil {
			handlers.AddFunc = func(o any) {
				if object, ok := o.(client.Object); ok {
					w.came(ctx, object)
				}
			}
		}
		if _, err := informer.AddEventHandler(handlers); err != nil {
			return fmt.Errorf("watch removals of %T: %w", w.object, err)
		}
	}

	return nil
}

func (r *Removed) classCame(_ context.Context, o client.Object) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.classes, client.ObjectKeyFromObject(o))
}

func (r *Removed) secretCame(_ context.Context, o client.Object) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.secrets, client.ObjectKeyFromObject(o))
}

func (r *Removed) classGone(ctx context.Context, o client.Object) {
	class, ok := o.(*v1alpha1.MachineClass)
	if !ok || !r.used(ctx, client.ObjectKeyFromObject(o)) {
		return
	}
	r.mu.Lock()
	r.classes[client.ObjectKeyFromObject(o)] = class
	r.mu.Unlock()
	ctrl.LoggerFrom(ctx).Info("a class was removed while machines use it: create it again; mcm remembers it until it restarts",
		"class", client.ObjectKeyFromObject(o))
}

func (r *Removed) secretGone(ctx context.Context, o client.Object) {
	secret, ok := o.(*corev1.Secret)
	key := client.ObjectKeyFromObject(o)
	if !ok || !r.needed(ctx, key) {
		return
	}
	r.mu.Lock()
	r.secrets[key] = secret
	r.mu.Unlock()
	ctrl.LoggerFrom(ctx).Info("a secret was removed while machines need it: create it again; mcm remembers it until it restarts",
		"secret", key)
}

// prune forgets the classes and secrets that no machine needs any more.
func (r *Removed) prune(ctx context.Context) {
	r.mu.Lock()
	var classes, secrets []client.ObjectKey
	for key := range r.classes {
		classes = append(classes, key)
	}
	for key := range r.secrets {
		secrets = append(secrets, key)
	}
	r.mu.Unlock()
	// Read the cache without the lock. Classes come first because they need secrets.
	for _, key := range classes {
		if !r.used(ctx, key) {
			r.mu.Lock()
			delete(r.classes, key)
			r.mu.Unlock()
		}
	}
	for _, key := range secrets {
		if !r.needed(ctx, key) {
			r.mu.Lock()
			delete(r.secrets, key)
			r.mu.Unlock()
		}
	}
}

// used reports whether machines refer to a class; true if that cannot be read.
func (r *Removed) used(ctx context.Context, class client.ObjectKey) bool {
	machines := &v1alpha1.MachineList{}
	if err := r.reader.List(ctx, machines, client.InNamespace(class.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "cannot list the machines of a class", "class", class)

		return true
	}

	return slices.ContainsFunc(machines.Items, func(m v1alpha1.Machine) bool {
		return m.Spec.Class.Name == class.Name
	})
}

// needed reports whether the class of some machine refers to a secret, in its present or
// last accepted version; true if that cannot be read.
func (r *Removed) needed(ctx context.Context, secret client.ObjectKey) bool {
	list := &v1alpha1.MachineClassList{}
	if err := r.reader.List(ctx, list); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "cannot list the classes of a secret", "secret", secret)

		return true
	}
	var classes []*v1alpha1.MachineClass
	for i := range list.Items {
		classes = append(classes, &list.Items[i])
	}
	r.mu.Lock()
	for _, class := range r.classes {
		classes = append(classes, class)
	}
	r.mu.Unlock()

	return slices.ContainsFunc(classes, func(class *v1alpha1.MachineClass) bool {
		former, err := lastgood.LastAccepted(class)
		refers := slices.Contains(v1alpha1.SecretsOf(class), secret) ||
			err == nil && former != nil && slices.Contains(v1alpha1.SecretsOf(former), secret)

		return refers && r.used(ctx, client.ObjectKeyFromObject(class))
	})
}
