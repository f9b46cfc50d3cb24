package fetch

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	toolscache "k8s.io/client-go/tools/cache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// An Announcer announces a change to the replicas of a provider; bus.Announcer is one.
type Announcer interface {
	Changed(provider string, change *driverv1.Changed) error
}

// AnnounceChanges announces to drivers every update and deletion of their classes and
// secrets, for as long as the informers run. A lost announcement does no harm: operations
// name the versions they need.
func (h *Handler) AnnounceChanges(ctx context.Context, informers cache.Informers, announcer Announcer) error {
	classes, err := informers.GetInformer(ctx, &v1alpha1.MachineClass{})
	if err != nil {
		return fmt.Errorf("watch classes: %w", err)
	}
	secrets, err := informers.GetInformer(ctx, &corev1.Secret{})
	if err != nil {
		return fmt.Errorf("watch secrets: %w", err)
	}
	announce := func(provider string, kind driverv1.Changed_Kind, o client.Object) {
		err := announcer.Changed(provider, &driverv1.Changed{Kind: kind, Reference: reference(o)})
		if err != nil {
			ctrl.LoggerFrom(ctx).V(1).Info("cannot announce a change; drivers read the new version with their next operation", "err", err.Error())
		}
	}
	_, err = classes.AddEventHandler(onChange(func(o client.Object) {
		class, ok := o.(*v1alpha1.MachineClass)
		if !ok {
			return
		}
		if provider, err := dispatch.Provider(class, h.DefaultProvider); err == nil {
			announce(provider, driverv1.Changed_KIND_CLASS, class)
		}
	}))
	if err != nil {
		return fmt.Errorf("watch classes: %w", err)
	}
	_, err = secrets.AddEventHandler(onChange(func(o client.Object) {
		for _, provider := range h.providersOf(ctx, o) {
			announce(provider, driverv1.Changed_KIND_SECRET, o)
		}
	}))
	if err != nil {
		return fmt.Errorf("watch secrets: %w", err)
	}

	return nil
}

// providersOf returns the providers whose classes refer to a secret.
func (h *Handler) providersOf(ctx context.Context, secret client.Object) []string {
	list := &v1alpha1.MachineClassList{}
	if err := h.Reader.List(ctx, list); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "cannot list the classes that refer to a secret; its change is not announced")

		return nil
	}
	seen := map[string]bool{}
	var providers []string
	for i := range list.Items {
		class := &list.Items[i]
		provider, err := dispatch.Provider(class, h.DefaultProvider)
		if err == nil && !seen[provider] && slices.Contains(v1alpha1.SecretsOf(class), client.ObjectKeyFromObject(secret)) {
			seen[provider] = true
			providers = append(providers, provider)
		}
	}

	return providers
}

// onChange calls f for updates and deletions. No driver has an older version of a new
// object.
func onChange(f func(client.Object)) toolscache.ResourceEventHandler {
	return toolscache.ResourceEventHandlerFuncs{
		UpdateFunc: func(before, after any) {
			b, ok1 := before.(client.Object)
			a, ok2 := after.(client.Object)
			if ok1 && ok2 && b.GetResourceVersion() != a.GetResourceVersion() {
				f(a)
			}
		},
		DeleteFunc: func(o any) {
			if gone, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			if object, ok := o.(client.Object); ok {
				f(object)
			}
		},
	}
}
