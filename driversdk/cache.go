package driversdk

import (
	"context"
	"sync"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// cacheLimit bounds the classes, and the secrets, that a replica keeps.
const cacheLimit = 1024

// objectKey names an object of some control cluster, in whatever version.
type objectKey struct{ cluster, namespace, name string }

// An objectVersion identifies a version of an object, and distinguishes the object from
// an earlier one of its name.
type objectVersion struct{ uid, resource string }

func keyOf(cluster string, ref *driverv1.ObjectReference) objectKey {
	return objectKey{cluster, ref.GetNamespace(), ref.GetName()}
}

func versionOf(ref *driverv1.ObjectReference) objectVersion {
	return objectVersion{ref.GetUid(), ref.GetResourceVersion()}
}

// A cache keeps the newest known version of objects. What it serves is never
// older than what is asked for: another version than the one asked for is
// fetched [REF-1]. It is safe for concurrent use.
type cache[V any] struct {
	limit  int
	looked func(hit bool)

	mu      sync.Mutex
	entries map[objectKey]*entry[V]
	flights map[flightKey]*flight[V]
	uses    uint64 // counts up; orders entries by their last use
	running sync.WaitGroup
}

type entry[V any] struct {
	version objectVersion
	value   V
	used    uint64
}

type flightKey struct {
	objectKey
	objectVersion
}

// A flight is one fetch that everybody who wants the same version waits for.
type flight[V any] struct {
	done  chan struct{}
	value V
	err   error
}

func newCache[V any](looked func(hit bool)) *cache[V] {
	return &cache[V]{
		limit: cacheLimit, looked: looked,
		entries: map[objectKey]*entry[V]{}, flights: map[flightKey]*flight[V]{},
	}
}

// get returns the object in the version wanted, or in the one that fetch finds.
// fetch gets a context that outlives the caller, because others may wait for it
// as well, and must bound itself.
func (c *cache[V]) get(
	ctx context.Context, key objectKey, want objectVersion,
	fetch func(context.Context) (V, objectVersion, error),
) (V, error) {
	c.mu.Lock()
	if e, ok := c.entries[key]; ok && want.resource != "" && e.version == want {
		c.uses++
		e.used = c.uses
		c.mu.Unlock()
		c.looked(true)

		return e.value, nil
	}
	id := flightKey{key, want}
	f, ok := c.flights[id]
	if !ok || want.resource == "" {
		f = &flight[V]{done: make(chan struct{})}
		if want.resource != "" { // fetches without a version are not shared
			c.flights[id] = f
		}
		c.running.Go(func() { c.fly(context.WithoutCancel(ctx), id, f, fetch) })
	}
	c.mu.Unlock()
	c.looked(false)
	select {
	case <-f.done:
		return f.value, f.err
	case <-ctx.Done():
		var none V

		return none, ctx.Err()
	}
}

func (c *cache[V]) fly(
	ctx context.Context, id flightKey, f *flight[V],
	fetch func(context.Context) (V, objectVersion, error),
) {
	defer close(f.done)
	var found objectVersion
	f.value, found, f.err = fetch(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.flights[id] != f {
		return // dropped meanwhile: what was found may be what was dropped
	}
	delete(c.flights, id)
	if f.err != nil {
		return
	}
	if _, known := c.entries[id.objectKey]; !known && len(c.entries) >= c.limit {
		c.evict()
	}
	c.uses++
	c.entries[id.objectKey] = &entry[V]{version: found, value: f.value, used: c.uses}
}

// evict forgets the entry that was not used for the longest time.
func (c *cache[V]) evict() {
	var oldest objectKey
	least := c.uses + 1
	for key, e := range c.entries {
		if e.used < least {
			oldest, least = key, e.used
		}
	}
	delete(c.entries, oldest)
}

// drop forgets an object, and what is being fetched of it [CHANGED-1].
func (c *cache[V]) drop(key objectKey) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.entries, key)
	for id := range c.flights {
		if id.objectKey == key {
			delete(c.flights, id)
		}
	}
}

// wait returns when nothing is being fetched any more.
func (c *cache[V]) wait() { c.running.Wait() }
