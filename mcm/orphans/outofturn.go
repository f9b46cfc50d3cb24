package orphans

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

// suspects are the classes to look at out of turn. It is safe for concurrent use.
type suspects struct {
	news chan struct{} // holds one entry while there are classes

	mu      sync.Mutex
	classes map[client.ObjectKey]bool
}

// Watch makes Start look out of turn at the class of a machine for which a driver answers
// OutOfRange (several instances match the machine) or AlreadyExists (another instance has
// the machine's name). It must be called before Start; every replica of a manager may.
func (c *Collector) Watch(ctx context.Context, informers cache.Informers) error {
	informer, err := informers.GetInformer(ctx, &v1alpha1.Machine{})
	if err != nil {
		return fmt.Errorf("watch machines: %w", err)
	}
	c.suspects = &suspects{news: make(chan struct{}, 1), classes: map[client.ObjectKey]bool{}}
	_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{UpdateFunc: func(before, after any) {
		old, isMachine := before.(*v1alpha1.Machine)
		m, isToo := after.(*v1alpha1.Machine)
		if isMachine && isToo && hintsAtOrphan(m) && !hintsAtOrphan(old) {
			c.suspects.add(client.ObjectKey{Namespace: m.Namespace, Name: m.Spec.Class.Name})
		}
	}})
	if err != nil {
		return fmt.Errorf("watch machines: %w", err)
	}

	return nil
}

// hintsAtOrphan reports whether a machine's last operation ended with a code that hints at
// an instance without a machine. It looks for OutOfRange in the description, as the machine
// controller manager does: errorCode is not set for deletions.
func hintsAtOrphan(m *v1alpha1.Machine) bool {
	last := &m.Status.LastOperation

	return strings.Contains(last.Description, v1alpha1.ErrorCodeOutOfRange) || last.ErrorCode == dispatch.AlreadyExists.String()
}

// wake returns a channel that gets a value when there are classes to take; nil, which
// never does, before Watch.
func (h *suspects) wake() <-chan struct{} {
	if h == nil {
		return nil
	}

	return h.news
}

func (h *suspects) add(class client.ObjectKey) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.classes[class] = true
	select {
	case h.news <- struct{}{}:
	default:
	}
}

func (h *suspects) take() map[client.ObjectKey]bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	taken := h.classes
	h.classes = map[client.ObjectKey]bool{}

	return taken
}

// passOutOfTurn looks at the providers of suspect classes, at all classes of each: any of
// them may list the instances in question.
func (c *Collector) passOutOfTurn(ctx context.Context) {
	log := ctrl.LoggerFrom(ctx).WithName("orphans")
	var providers []string
	for key := range c.suspects.take() {
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
			log.Info("cannot look for orphans of the class out of turn; the next regular look covers it", "class", key, "err", err.Error())

			continue
		}
		log.Info("looking for instances without a machine: a driver answered OutOfRange or AlreadyExists",
			"class", key, "provider", provider)
		providers = append(providers, provider)
	}
	if len(providers) > 0 {
		slices.Sort(providers)
		c.Pass(ctx, slices.Compact(providers)...)
	}
}
