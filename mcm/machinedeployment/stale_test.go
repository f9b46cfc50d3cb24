package machinedeployment_test

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A lagging client shows the MachineSets of the moment at which it was stopped,
// as a cache does whose watch is late. Writes go through.
type lagging struct {
	client.Client

	mu      sync.Mutex
	stopped bool
	then    *v1alpha1.MachineSetList
	lists   int // of the stopped cache
}

func (l *lagging) stop(t *testing.T, on bool) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopped, l.then, l.lists = on, nil, 0
}

func (l *lagging) asked() int {
	l.mu.Lock()
	defer l.mu.Unlock()

	return l.lists
}

func (l *lagging) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	sets, ok := list.(*v1alpha1.MachineSetList)
	if !ok {
		return l.Client.List(ctx, list, opts...)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.stopped {
		return l.Client.List(ctx, list, opts...)
	}
	l.lists++
	if l.then == nil {
		l.then = &v1alpha1.MachineSetList{}
		if err := l.Client.List(ctx, l.then, opts...); err != nil {
			return err
		}
	}
	l.then.DeepCopyInto(sets)

	return nil
}

// TestStaleCache has the controller work with a cache that shows none of its own
// writes: it may make no second set, nor a plan from sets as they were.
func TestStaleCache(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	lag := &lagging{}
	r.wrap = func(c client.Client) client.Client { lag.Client = c; return lag }
	r.start(t)
	d := r.deployment(4)
	lag.stop(t, true)
	r.create(t, d)
	waitForPasses := func(n int) {
		t.Helper()
		for i := lag.asked(); lag.asked() < i+n; {
			r.change(t, d, func(d *v1alpha1.MachineDeployment) {
				metav1.SetMetaDataAnnotation(&d.ObjectMeta, "test.invalid/look", fmt.Sprint(lag.asked()))
			})
			if !poll(t, func() bool { return lag.asked() > i }) {
				t.Fatal("the controller does not look at its sets")
			}
		}
	}
	r.until(t, "a set", d, func(*v1alpha1.MachineDeployment) bool { return len(r.sets(t)) == 1 })
	waitForPasses(5)
	if sets := r.sets(t); len(sets) != 1 {
		t.Errorf("there are %d sets", len(sets))
	}
	lag.stop(t, false)
	r.complete(t, d)

	lag.stop(t, true)
	r.change(t, d, class("large"))
	r.until(t, "the new set", d, func(*v1alpha1.MachineDeployment) bool { return r.sets(t)["large"] != nil })
	waitForPasses(5)
	if got := r.replicas(t); !maps.Equal(got, map[string]int32{"small": 4, "large": 1}) {
		t.Errorf("sets were changed by what they were: %v", got)
	}
	// The old set looks like the only one, and nobody else has written it: no lock tells.
	r.change(t, d, func(d *v1alpha1.MachineDeployment) { d.Spec.Paused, d.Spec.Replicas = true, 8 })
	waitForPasses(5)
	if got := r.replicas(t); got["small"] != 4 {
		t.Errorf("the old set was scaled as if there were no new one: %v", got)
	}
	lag.stop(t, false)
	r.until(t, "more of the new set", d, func(*v1alpha1.MachineDeployment) bool {
		return maps.Equal(r.replicas(t), map[string]int32{"small": 4, "large": 5})
	})
	r.change(t, d, func(d *v1alpha1.MachineDeployment) { d.Spec.Paused = false })
	r.complete(t, d)
}
