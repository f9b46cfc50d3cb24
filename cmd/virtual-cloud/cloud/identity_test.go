package cloud

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

func TestRepeatedCreates(t *testing.T) {
	t.Parallel()
	const calls = 20
	tests := map[string]struct {
		reason   string
		identity cloudapi.Identity
		override cloudapi.Identity
		effect   cloudapi.Effect
		codes    map[string]int // how the calls end
		stats    cloudapi.Stats
	}{
		"token": {
			reason:   "one token is one instance, for each of the callers",
			identity: cloudapi.IdentityToken, effect: cloudapi.EffectEnd,
			codes: map[string]int{"OK": calls},
			stats: cloudapi.Stats{Created: 1, Live: 1, Existing: calls - 1},
		},
		"token, effect at the start": {
			reason:   "the same, when the instance is there before the first answer",
			identity: cloudapi.IdentityToken, effect: cloudapi.EffectStart,
			codes: map[string]int{"OK": calls},
			stats: cloudapi.Stats{Created: 1, Live: 1, Existing: calls - 1},
		},
		"unique name": {
			reason:   "one create wins, the others learn that the name is taken",
			identity: cloudapi.IdentityUniqueName, effect: cloudapi.EffectEnd,
			codes: map[string]int{"OK": 1, cloudapi.CodeAlreadyExists: calls - 1},
			stats: cloudapi.Stats{Created: 1, Live: 1},
		},
		"none": {
			reason:   "each create makes an instance, and the duplicates are counted",
			identity: cloudapi.IdentityNone, effect: cloudapi.EffectEnd,
			codes: map[string]int{"OK": calls},
			stats: cloudapi.Stats{
				Created: calls, Live: calls,
				Duplicates: calls - 1, DuplicatesByUID: calls - 1, DuplicatesByName: calls - 1, DuplicatesEver: calls - 1,
			},
		},
		"none, overridden to token": {
			reason:   "a request may choose another mode than the cloud's",
			identity: cloudapi.IdentityNone, override: cloudapi.IdentityToken, effect: cloudapi.EffectEnd,
			codes: map[string]int{"OK": calls},
			stats: cloudapi.Stats{Created: 1, Live: 1, Existing: calls - 1},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, Options{Identity: tc.identity, Knobs: cloudapi.Knobs{CreateEffect: tc.effect, BootDelay: hour}})
			var (
				work  sync.WaitGroup
				mu    sync.Mutex
				codes = map[string]int{}
				ids   = map[string]bool{}
			)
			for range calls {
				work.Go(func() {
					req := withToken(machine("m"), "t")
					req.Identity = tc.override
					i, err := b.client.Create(t.Context(), req)
					mu.Lock()
					defer mu.Unlock()
					codes[codeOf(err)]++
					if err == nil {
						ids[i.ID] = true
					} else if apiErr := asError(err); apiErr.InstanceID == "" {
						t.Errorf("%v names no instance", err)
					}
				})
			}
			work.Wait()

			if diff := cmp.Diff(tc.codes, codes); diff != "" {
				t.Errorf("%s: codes (-want +got):\n%s", tc.reason, diff)
			}
			if len(ids) != tc.stats.Created {
				t.Errorf("%s: %d instances were returned, want %d", tc.reason, len(ids), tc.stats.Created)
			}
			got := b.cloud.Stats()
			got.Requests, got.Refused, got.MaxConcurrentCreates, got.Pending = nil, nil, 0, 0
			if diff := cmp.Diff(tc.stats, got); diff != "" {
				t.Errorf("%s: stats (-want +got):\n%s", tc.reason, diff)
			}
		})
	}
}

// hour is longer than any test.
const hour = cloudapi.Duration(time.Hour)

func TestTokenLife(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCloud(t, Options{Identity: cloudapi.IdentityToken})
		first, _, err := c.Create(withToken(machine("m"), "t"))
		if err != nil {
			t.Fatal(err)
		}
		other := withToken(machine("other"), "t")
		if _, _, err := c.Create(other); codeOf(err) != cloudapi.CodeTokenMismatch {
			t.Errorf("the token for another name: %v, want %s", err, cloudapi.CodeTokenMismatch)
		}
		if _, _, err := c.Create(machine("m")); codeOf(err) != cloudapi.CodeInvalidArgument {
			t.Errorf("no token: %v, want %s", err, cloudapi.CodeInvalidArgument)
		}
		renewed := withToken(machine("m"), "t")
		renewed.UserData = []byte("a newer bootstrap token")
		if again, existing, err := c.Create(renewed); err != nil || !existing || again.ID != first.ID {
			t.Errorf("the token with newer user data: %v, existing %v, %v; want the first instance", again.ID, existing, err)
		}

		if _, err := c.Delete(first.ID); err != nil {
			t.Fatal(err)
		}
		advance(tokenLife - 1)
		if _, _, err := c.Create(withToken(machine("m"), "t")); codeOf(err) != cloudapi.CodeTokenUsed {
			t.Errorf("within 24 h after deletion: %v, want %s", err, cloudapi.CodeTokenUsed)
		}
		advance(1)
		second, existing, err := c.Create(withToken(machine("m"), "t"))
		if err != nil || existing || second.ID == first.ID {
			t.Errorf("24 h after deletion: %v, existing %v, %v; want a new instance", second.ID, existing, err)
		}
	})
}

func TestFailedCreateFreesItsToken(t *testing.T) {
	t.Parallel()
	c := newCloud(t, Options{Identity: cloudapi.IdentityToken, Knobs: cloudapi.Knobs{Quota: 1}})
	if _, _, err := c.Create(withToken(machine("a"), "a")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Create(withToken(machine("b"), "b")); codeOf(err) != cloudapi.CodeQuotaExceeded {
		t.Fatalf("above the quota: %v, want %s", err, cloudapi.CodeQuotaExceeded)
	}
	if _, err := c.Patch(cloudapi.KnobsPatch{Quota: new(2)}); err != nil {
		t.Fatal(err)
	}
	if _, existing, err := c.Create(withToken(machine("b"), "b")); err != nil || existing {
		t.Errorf("the same token with room: existing %v, %v; want a new instance", existing, err)
	}
}

func TestNameIsFreeAfterDeletion(t *testing.T) {
	t.Parallel()
	c := newCloud(t, Options{Identity: cloudapi.IdentityUniqueName})
	first, _, err := c.Create(machine("m"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Delete(first.ID); err != nil {
		t.Fatal(err)
	}
	if second, _, err := c.Create(machine("m")); err != nil || second.ID == first.ID {
		t.Errorf("create after deletion: %v, %v; want a new instance", second.ID, err)
	}
}
