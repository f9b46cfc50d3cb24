package cloud

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

func (b *bundle) createInBackground(ctx context.Context, t *testing.T, names ...string) <-chan error {
	t.Helper()
	errs := make(chan error, len(names))
	for _, name := range names {
		go func() {
			_, err := b.client.Create(ctx, machine(name))
			errs <- err
		}()
	}

	return errs
}

func TestHoldAndRelease(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{Knobs: cloudapi.Knobs{Hold: []string{"a-*", "b-*"}, BootDelay: hour}})
	errs := b.createInBackground(t.Context(), t, "a-1", "a-2", "b-1")
	eventually(t, "three creates are held", func() bool { return b.cloud.Stats().Held == 3 })
	b.mustCreate(t, machine("free")) // nothing holds it

	if n, err := b.admin.Release(t.Context(), "a-1"); err != nil || n != 1 {
		t.Fatalf("release: %d, %v; want 1", n, err)
	}
	if err := <-errs; err != nil {
		t.Fatal(err)
	}
	b.patch(t, cloudapi.KnobsPatch{Hold: &[]string{"b-*"}}) // lets a-2 go
	if err := <-errs; err != nil {
		t.Fatal(err)
	}
	got := names(b.cloud.List(cloudapi.Filter{}))
	if diff := cmp.Diff([]string{"free", "a-1", "a-2"}, got); diff != "" {
		t.Errorf("instances (-want +got):\n%s", diff)
	}
	if s := b.cloud.Stats(); s.Held != 1 || s.MaxConcurrentCreates != 4 {
		t.Errorf("%d held, at most %d at once; want 1 and 4", s.Held, s.MaxConcurrentCreates)
	}
	b.patch(t, cloudapi.KnobsPatch{Hold: &[]string{}})
	if err := <-errs; err != nil {
		t.Fatal(err)
	}
}

func TestClientGoneUndoesNothing(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{Knobs: cloudapi.Knobs{Hold: []string{"*"}}})
	ctx, goAway := context.WithCancel(t.Context())
	errs := b.createInBackground(ctx, t, "m")
	eventually(t, "the create is held", func() bool { return b.cloud.Stats().Held == 1 })
	goAway()
	if err := <-errs; !errors.Is(err, context.Canceled) {
		t.Fatalf("the client's error: %v, want that it was cancelled", err)
	}
	b.patch(t, cloudapi.KnobsPatch{Hold: &[]string{}})
	eventually(t, "the instance exists", func() bool { return b.cloud.Stats().Created == 1 })
	eventually(t, "the log records that the client disconnected", func() bool {
		return slices.Contains(b.events(t), "create client_gone")
	})
}
