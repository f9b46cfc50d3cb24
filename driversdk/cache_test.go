package driversdk

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestServe_Cache(t *testing.T) {
	t.Parallel()
	d := &testDriver{}
	w := start(t, d, nil)
	class := &driverv1.ClassReference{
		Class:  w.store.setClass("c", "1", `{"size":"one"}`),
		Secret: w.store.setSecret("s", "1", map[string]string{"k": "one"}),
	}
	machines := 0
	step := func(reason, size, key string, fetched map[string]int) {
		t.Helper()
		machines++
		if result := w.ask(create(machine(fmt.Sprintf("m%d", machines)), class)).result(); result.GetStatus().GetCode() != OK {
			t.Fatalf("%s: %v", reason, result.GetStatus())
		}
		req := d.last(t)
		if got := req.Class.Spec.Size; got != size {
			t.Errorf("%s: want class %q, have %q", reason, size, got)
		}
		if got := string(req.Class.Secret["k"]); got != key {
			t.Errorf("%s: want secret %q, have %q", reason, key, got)
		}
		if diff := cmp.Diff(fetched, w.store.counts()); diff != "" {
			t.Errorf("%s: fetches so far (-want +got):\n%s", reason, diff)
		}
	}

	step("a miss is fetched", "one", "one", map[string]int{"class": 1, "secret": 1})
	step("what was fetched is kept", "one", "one", map[string]int{"class": 1, "secret": 1})

	class.Class = w.store.setClass("c", "2", `{"size":"two"}`)
	step("a new version is never served from an old one [REF-1]", "two", "one", map[string]int{"class": 2, "secret": 1})

	class.Secret = w.store.setSecret("s", "2", map[string]string{"k": "two"})
	step("the same for a secret", "two", "two", map[string]int{"class": 2, "secret": 2})

	recreated := proto.CloneOf(class.Class)
	recreated.Uid = "another"
	w.store.mu.Lock()
	w.store.classes["c"].Reference = recreated
	w.store.mu.Unlock()
	class.Class = recreated
	step("another object of the same name is another object", "two", "two", map[string]int{"class": 3, "secret": 2})

	changed(w, driverv1.Changed_KIND_CLASS, class.Class)
	step("a changed class is dropped [CHANGED-1]", "two", "two", map[string]int{"class": 4, "secret": 2})
	changed(w, driverv1.Changed_KIND_SECRET, class.Secret)
	step("a changed secret is dropped", "two", "two", map[string]int{"class": 4, "secret": 3})

	unnamed := proto.CloneOf(class.Class)
	unnamed.ResourceVersion = ""
	class.Class = unnamed
	step("who names no version gets a fresh one", "two", "two", map[string]int{"class": 5, "secret": 3})
}

// changed sends the notice and waits until the replica has seen it.
func changed(w *world, kind driverv1.Changed_Kind, ref *driverv1.ObjectReference) {
	w.t.Helper()
	payload, err := bus.Encode(&driverv1.Envelope{Body: &driverv1.Envelope_Changed{
		Changed: &driverv1.Changed{Kind: kind, Reference: ref},
	}}, "")
	if err != nil {
		w.t.Fatal(err)
	}
	const notices = "machinebus_driver_changes_total"
	before := w.figure(notices, nil)
	if err := w.nc.Publish("mcm.v1."+testCluster+".changed."+testProvider, payload); err != nil {
		w.t.Fatal(err)
	}
	bustest.Eventually(w.t, "the notice of a change", func() bool { return w.figure(notices, nil) > before })
}

func testCache() *cache[string] { return newCache[string](func(bool) {}) }

func found(value string, version objectVersion) func(context.Context) (string, objectVersion, error) {
	return func(context.Context) (string, objectVersion, error) { return value, version, nil }
}

func TestCache_OneFetchForMany(t *testing.T) {
	t.Parallel()
	c := testCache()
	key, v1 := objectKey{"c", "ns", "n"}, objectVersion{"u", "1"}
	release, fetches := make(chan struct{}), make(chan struct{}, 100)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			got, err := c.get(t.Context(), key, v1, func(context.Context) (string, objectVersion, error) {
				fetches <- struct{}{}
				<-release

				return "value", v1, nil
			})
			if got != "value" || err != nil {
				t.Errorf("want the value, have %q, %v", got, err)
			}
		})
	}
	<-fetches
	close(release)
	wg.Wait()
	c.wait()
	if n := len(fetches); n != 0 {
		t.Errorf("want one fetch for all who wait, have %d more", n)
	}
}

func TestCache_WaiterLeavesAlone(t *testing.T) {
	t.Parallel()
	c := testCache()
	key, v1 := objectKey{"c", "ns", "n"}, objectVersion{"u", "1"}
	release := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := c.get(ctx, key, v1, func(ctx context.Context) (string, objectVersion, error) {
		<-release
		if ctx.Err() != nil {
			return "", v1, ctx.Err()
		}

		return "value", v1, nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled caller does not wait: have %v", err)
	}
	close(release)
	c.wait()
	got, err := c.get(t.Context(), key, v1, found("fetched again", v1))
	if got != "value" || err != nil {
		t.Errorf("its fetch goes on for the others: have %q, %v", got, err)
	}
}

func TestCache_DropDuringFetch(t *testing.T) {
	t.Parallel()
	c := testCache()
	key, v1 := objectKey{"c", "ns", "n"}, objectVersion{"u", "1"}
	_, _ = c.get(t.Context(), key, v1, func(context.Context) (string, objectVersion, error) {
		c.drop(key)

		return "old", v1, nil
	})
	c.wait()
	if got, _ := c.get(t.Context(), key, v1, found("new", v1)); got != "new" {
		t.Errorf("what was being fetched when its notice of change came is not kept: have %q", got)
	}
}

func TestCache_FailureIsNotKept(t *testing.T) {
	t.Parallel()
	c := testCache()
	key, v1 := objectKey{"c", "ns", "n"}, objectVersion{"u", "1"}
	boom := errors.New("boom")
	if _, err := c.get(t.Context(), key, v1, func(context.Context) (string, objectVersion, error) {
		return "", v1, boom
	}); !errors.Is(err, boom) {
		t.Errorf("want the fetch's error, have %v", err)
	}
	c.wait()
	if got, err := c.get(t.Context(), key, v1, found("value", v1)); got != "value" || err != nil {
		t.Errorf("the next one asks again: have %q, %v", got, err)
	}
}

func TestCache_Bound(t *testing.T) {
	t.Parallel()
	c := testCache()
	c.limit = 2
	v1 := objectVersion{"u", "1"}
	get := func(name, value string) string {
		got, _ := c.get(t.Context(), objectKey{"c", "ns", name}, v1, found(value, v1))
		c.wait()

		return got
	}
	get("a", "1")
	get("b", "1")
	get("a", "2") // used: b is now the oldest
	get("c", "1")
	if len(c.entries) != 2 {
		t.Errorf("want 2 entries, have %d", len(c.entries))
	}
	if got := get("a", "2"); got != "1" {
		t.Errorf("a was used last and is kept: have %q", got)
	}
	if got := get("b", "2"); got != "2" {
		t.Errorf("b was used least and is gone: have %q", got)
	}
}
