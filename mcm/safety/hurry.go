package safety

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	toolscache "k8s.io/client-go/tools/cache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// A hurry holds the classes to look at without waiting for the next turn. It is
// safe for concurrent use.
type hurry struct {
	news chan struct{} // holds one entry while there are classes

	mu      sync.Mutex
	classes map[client.ObjectKey]bool
}

// Watch has the classes of machines looked at as soon as a driver answers
// OutOfRange, by which it says that several instances match one machine, or
// AlreadyExists, as another instance has the machine's name. It must be called before
// Start; every replica of a manager may.
func (c *Collector) Watch(ctx context.Context, informers cache.Informers) error {
	informer, err := informers.GetInformer(ctx, &v1alpha1.Machine{})
	if err != nil {
		return fmt.Errorf("watch machines: %w", err)
	}
	c.hurry = &hurry{news: make(chan struct{}, 1), classes: map[client.ObjectKey]bool{}}
	_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{UpdateFunc: func(before, after any) {
		old, isMachine := before.(*v1alpha1.Machine)
		m, isToo := after.(*v1alpha1.Machine)
		if isMachine && isToo && suspects(m) && !suspects(old) {
			c.hurry.add(client.ObjectKey{Namespace: m.Namespace, Name: m.Spec.Class.Name})
		}
	}})
	if err != nil {
		return fmt.Errorf("watch machines: %w", err)
	}

	return nil
}

// suspects reports whether a machine's last operation ended with a code that hints at
// an instance without a machine. For OutOfRange its text counts, as in the machine
// controller manager: it has no errorCode for deletions.
func suspects(m *v1alpha1.Machine) bool {
	last := &m.Status.LastOperation

	return strings.Contains(last.Description, v1alpha1.ErrorCodeOutOfRange) || last.ErrorCode == dispatch.AlreadyExists.String()
}

// wake tells of classes to take; it never does without a Watch.
func (h *hurry) wake() <-chan struct{} {
	if h == nil {
		return nil
	}

	return h.news
}

func (h *hurry) add(class client.ObjectKey) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.classes[class] = true
	select {
	case h.news <- struct{}{}:
	default:
	}
}

func (h *hurry) take() map[client.ObjectKey]bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	taken := h.classes
	h.classes = map[client.ObjectKey]bool{}

	return taken
}

// passOutOfTurn looks at the providers for which there is a cause. All of a
// provider's classes are: any of them may list the instances in question.
func (c *Collector) passOutOfTurn(ctx context.Context) {
	log := ctrl.LoggerFrom(ctx).WithName("safety")
	var providers []string
	for key := range c.hurry.take() {
		class := &v1alpha1.MachineClass{}
		err := c.Cache.Get(ctx, key, class)
		if apierrors.IsNotFound(err) {
			continue
		}
		provider := ""
		if err == nil {
			provider, err = dispatch.Provider(class, c.Settings.DefaultProvider)
		}
		if err != nil {
			log.Info("class not looked at out of turn", "class", key, "err", err.Error())

			continue
		}
		log.Info("looking for instances without a machine: a driver has answered OutOfRange or AlreadyExists", "class", key, "provider", provider)
		providers = append(providers, provider)
	}
	if len(providers) > 0 {
		slices.Sort(providers)
		c.Pass(ctx, slices.Compact(providers)...)
	}
}
