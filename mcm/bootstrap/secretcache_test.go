package bootstrap

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/machinebus/machinebus/mcm/kubetest"
)

// A replica deletes its own tokens without reading them, and reads those of others.
func TestDeleteOfOwnToken(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		before func(t *testing.T, tokens *Tokens, secret *corev1.Secret)
		reads  int64
	}{
		"made here": {"its uid is known", func(*testing.T, *Tokens, *corev1.Secret) {}, 0},
		"made elsewhere": {
			"another replica has answered the driver",
			func(_ *testing.T, tokens *Tokens, _ *corev1.Secret) { tokens.created = secretCache{} }, 1,
		},
		"gone": {
			"the token cleaner was here, and all candidates are looked for",
			func(t *testing.T, tokens *Tokens, secret *corev1.Secret) {
				t.Helper()
				if err := tokens.Target.Delete(t.Context(), secret); err != nil {
					t.Fatal(err)
				}
			}, candidates,
		},
		"replaced": {
			"another replica has made the next one",
			func(t *testing.T, tokens *Tokens, secret *corev1.Secret) {
				t.Helper()
				if err := tokens.Target.Delete(t.Context(), secret); err != nil {
					t.Fatal(err)
				}
				secret.ResourceVersion, secret.UID = "", ""
				if err := tokens.Target.Create(t.Context(), secret); err != nil {
					t.Fatal(err)
				}
			}, 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tokens, _ := newTokens(t)
			watching, err := client.NewWithWatch(kubetest.AsMCM(apiServer), client.Options{})
			if err != nil {
				t.Fatal(err)
			}
			m := newMachine("joins")
			tokens.mustEnsure(t, m)
			tc.before(t, tokens, tokens.stored(t, m.UID, 0))
			var reads atomic.Int64
			tokens.Target = interceptor.NewClient(watching, interceptor.Funcs{
				Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
					reads.Add(1)

					return c.Get(ctx, key, o, opts...)
				},
			})
			if err := tokens.Delete(t.Context(), m); err != nil {
				t.Fatal(err)
			}
			if n := reads.Load(); n != tc.reads {
				t.Errorf("%d reads, want %d: %s", n, tc.reads, tc.reason)
			}
			if tokens.stored(t, m.UID, 0) != nil {
				t.Errorf("the token is still there: %s", tc.reason)
			}
		})
	}
}

func TestSecretCacheIsBounded(t *testing.T) {
	t.Parallel()
	m := &secretCache{}
	for i := range maxSecrets + 2 {
		m.add(types.UID(fmt.Sprint(i)), &corev1.Secret{Data: map[string][]byte{keySecret: []byte("hidden")}})
	}
	if n := len(m.secrets); n > maxSecrets {
		t.Errorf("%d tokens are remembered", n)
	}
	if last := m.take(types.UID(fmt.Sprint(maxSecrets + 1))); last == nil || last.Data != nil {
		t.Errorf("the newest is remembered as %v", last)
	}
	if m.take("0") != nil {
		t.Error("the oldest is still remembered")
	}
}
