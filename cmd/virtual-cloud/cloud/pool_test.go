package cloud

import (
	"testing"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

func (b *bundle) mustPool(t *testing.T, name string, lower, upper int32) {
	t.Helper()
	if _, err := b.client.PutPool(t.Context(), cloudapi.Pool{Name: name, Min: lower, Max: upper, MachineType: "small", Region: "here"}); err != nil {
		t.Fatal(err)
	}
}

func (b *bundle) resize(t *testing.T, id string, expected, size int32) (int32, error) {
	t.Helper()
	p, err := b.client.ResizePool(t.Context(), "p", cloudapi.ResizeRequest{RequestID: id, Expected: expected, Size: size})
	if err != nil {
		return 0, err
	}

	return p.Size, nil
}

// waitPool waits until all instances of pool p satisfy ok, and returns them.
func (b *bundle) waitPool(t *testing.T, what string, ok func([]cloudapi.PoolInstance) bool) []cloudapi.PoolInstance {
	t.Helper()
	var list []cloudapi.PoolInstance
	eventually(t, what, func() bool {
		var err error
		if list, err = b.client.PoolInstances(t.Context(), "p"); err != nil {
			t.Fatal(err)
		}

		return ok(list)
	})

	return list
}

func have(n int) func([]cloudapi.PoolInstance) bool {
	return func(list []cloudapi.PoolInstance) bool {
		for _, i := range list {
			if i.Instance == nil {
				return false
			}
		}

		return len(list) == n
	}
}

func TestPoolIsResizedOnce(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})
	b.mustPool(t, "p", 0, 3)
	steps := []struct {
		reason         string
		id             string
		expected, size int32
		want           int32
		code           string
	}{
		{"a pool grows", "a", 0, 2, 2, ""},
		{"a request that was done changes nothing", "a", 0, 2, 2, ""},
		{"a size that is another by now", "b", 0, 2, 0, cloudapi.CodeSizeChanged},
		{"more than the maximum is refused, not cut", "c", 2, 4, 0, cloudapi.CodeOutOfBounds},
	}
	for _, s := range steps {
		if got, err := b.resize(t, s.id, s.expected, s.size); got != s.want || cloudapi.CodeOf(err) != s.code {
			t.Errorf("%s: size %d, %v; want %d, %q", s.reason, got, err, s.want, s.code)
		}
	}
	b.waitPool(t, "two instances", have(2))
	if _, err := b.resize(t, "d", 2, 1); cloudapi.CodeOf(err) != cloudapi.CodeConflict {
		t.Errorf("fewer than have come: %v, want %s", err, cloudapi.CodeConflict)
	}
}

func TestPoolGivesUpWhatHasNotCome(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{Knobs: cloudapi.Knobs{Hold: []string{"p-*"}}})
	b.mustPool(t, "p", 0, 3)
	if _, err := b.resize(t, "a", 0, 3); err != nil {
		t.Fatal(err)
	}
	if got, err := b.resize(t, "b", 3, 1); got != 1 || err != nil {
		t.Fatalf("size %d, %v", got, err)
	}
	if _, err := b.admin.Patch(t.Context(), cloudapi.KnobsPatch{Hold: &[]string{}}); err != nil {
		t.Fatal(err)
	}
	kept := b.waitPool(t, "one instance", have(1))
	var list []cloudapi.Instance
	eventually(t, "what was given up is gone", func() bool {
		list = b.cloud.List(cloudapi.Filter{})

		return len(list) == 1 && b.cloud.Stats().Created == 3
	})
	if list[0].ID != kept[0].Instance.ID {
		t.Errorf("%s is left, want %s", list[0].ID, kept[0].Instance.ID)
	}
}

func TestPoolLosesTheNamedInstances(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})
	b.mustPool(t, "p", 1, 5)
	b.mustPool(t, "other", 0, 5)
	if _, err := b.resize(t, "a", 0, 3); err != nil {
		t.Fatal(err)
	}
	list := b.waitPool(t, "three instances", have(3))
	remove := func(pool string, ids ...string) (int32, string) {
		p, err := b.client.RemoveFromPool(t.Context(), pool, cloudapi.RemoveRequest{Instances: ids})
		if err != nil {
			return 0, cloudapi.CodeOf(err)
		}

		return p.Size, ""
	}
	first, second := list[0].Instance.ProviderID, list[1].Instance.ProviderID
	for _, s := range []struct {
		reason string
		pool   string
		ids    []string
		size   int32
		code   string
	}{
		{"another pool's instance stays", "other", []string{first}, 0, cloudapi.CodeInvalidArgument},
		{"all or none: the minimum", "p", []string{first, second, list[2].Instance.ProviderID}, 0, cloudapi.CodeConflict},
		{"the size goes down with it", "p", []string{first}, 2, ""},
		{"what is gone is done", "p", []string{first, "virtual:///here/i-never"}, 2, ""},
	} {
		if size, code := remove(s.pool, s.ids...); size != s.size || code != s.code {
			t.Errorf("%s: size %d, %q; want %d, %q", s.reason, size, code, s.size, s.code)
		}
	}
	for _, left := range b.waitPool(t, "two instances", have(2)) {
		if left.Instance.ProviderID == first {
			t.Errorf("%s is still there", first)
		}
	}
}

func TestPoolSaysWhyNothingComes(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{Knobs: cloudapi.Knobs{Quota: 1}})
	b.mustCreate(t, machine("m"))
	b.mustPool(t, "p", 0, 3)
	if _, err := b.resize(t, "a", 0, 1); err != nil {
		t.Fatal(err)
	}
	list := b.waitPool(t, "a refusal", func(list []cloudapi.PoolInstance) bool { return len(list) == 1 && list[0].Code != "" })
	if list[0].Code != cloudapi.CodeQuotaExceeded {
		t.Errorf("code %s, want %s", list[0].Code, cloudapi.CodeQuotaExceeded)
	}
	p, err := b.client.RemoveFromPool(t.Context(), "p", cloudapi.RemoveRequest{Instances: []string{list[0].Slot}})
	if err != nil || p.Size != 0 {
		t.Errorf("size %v, %v; want 0", p, err)
	}
}
