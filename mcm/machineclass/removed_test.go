package machineclass_test

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/lastgood"
	"github.com/machinebus/machinebus/mcm/machineclass"
)

// watch runs a Removed over the rig's namespace, without the controllers that
// would keep its objects.
func (r *rig) watch(t *testing.T) (*machineclass.Removed, cache.Cache) {
	t.Helper()
	objects, err := cache.New(apiServer, cache.Options{Scheme: scheme, DefaultNamespaces: map[string]cache.Config{r.namespace: {}}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- objects.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	removed := machineclass.NewRemoved(objects)
	if err := removed.Watch(ctx, objects); err != nil {
		t.Fatal(err)
	}

	return removed, objects
}

// knows waits until exactly the named classes and secrets, of those that the test
// uses, are remembered.
func (r *rig) knows(t *testing.T, removed *machineclass.Removed, want ...string) {
	t.Helper()
	wanted := map[string]bool{}
	for _, name := range want {
		wanted[name] = true
	}
	var have map[string]bool
	if !poll(func() bool {
		have = map[string]bool{}
		same := true
		for _, name := range []string{"used", "unused", "boot", "keys", "other"} {
			key := client.ObjectKey{Namespace: r.namespace, Name: name}
			have[name] = removed.Class(key) != nil || removed.Secret(key) != nil
			same = same && have[name] == wanted[name]
		}

		return same
	}) {
		t.Fatalf("remembered are %v, want %q", have, want)
	}
}

func TestRemoved(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	removed, objects := r.watch(t)
	boot := r.secret("boot")
	boot.Data = map[string][]byte{"userData": []byte("x")}
	used, unused := r.class("used", "boot", "keys"), r.class("unused", "other")
	first, second := r.machine("m1", "MachineClass", "used"), r.machine("m2", "MachineClass", "used")
	for _, o := range []client.Object{boot, r.secret("keys"), r.secret("other"), used, unused, first, second} {
		r.create(t, o)
	}
	if !poll(func() bool { // the last of them is seen
		return objects.Get(t.Context(), client.ObjectKeyFromObject(second), second.DeepCopy()) == nil
	}) {
		t.Fatal("the cache does not fill")
	}
	for _, o := range []client.Object{r.secret("boot"), r.secret("other"), r.class("unused")} {
		r.delete(t, o)
	}
	r.knows(t, removed, "boot")
	r.delete(t, r.class("used"))
	r.knows(t, removed, "boot", "used")
	r.delete(t, r.secret("keys")) // after its class
	r.knows(t, removed, "boot", "used", "keys")
	if s := removed.Secret(client.ObjectKeyFromObject(boot)); s.UID != boot.UID || string(s.Data["userData"]) != "x" {
		t.Errorf("remembered is secret %s with %d keys", s.UID, len(s.Data))
	}
	r.create(t, r.class("used", "boot"))
	r.create(t, &corev1.Secret{ObjectMeta: r.meta("boot")})
	r.knows(t, removed, "keys") // no class needs it, but that is seen with the next machine that goes
	r.delete(t, r.class("used"))
	r.knows(t, removed, "used", "keys")
	r.delete(t, first)
	r.knows(t, removed, "used")
	r.delete(t, second)
	r.knows(t, removed)
}

// A class that was edited may have been accepted with another secret.
func TestRemovedSecretOfTheLastAcceptedClass(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	class := r.class("used", "boot")
	r.create(t, class)
	if _, err := lastgood.Accept(class); err != nil {
		t.Fatal(err)
	}
	class.SecretRef.Name = "other"
	if err := r.Update(t.Context(), class); err != nil {
		t.Fatal(err)
	}
	r.create(t, r.secret("boot"))
	r.create(t, r.machine("m1", "MachineClass", "used"))
	removed, objects := r.watch(t)
	if !objects.WaitForCacheSync(t.Context()) {
		t.Fatal("the cache does not fill")
	}
	r.delete(t, r.secret("boot"))
	r.knows(t, removed, "boot")
}
