package fetch

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus"
)

// seedKey is the key of the Secret that holds the seed.
const seedKey = "seed"

// ControlPlaneKey returns the key with which this control plane seals secrets. It reads
// the named Secret, and creates it with a new key if it does not exist. All replicas of a
// manager share the key.
func ControlPlaneKey(ctx context.Context, c client.Client, name client.ObjectKey) (*bus.SealKey, error) {
	key, err := readKey(ctx, c, name)
	if !apierrors.IsNotFound(err) {
		return key, err
	}
	if key, err = bus.NewSealKey(); err != nil {
		return nil, err
	}
	seed, err := key.Seed()
	if err != nil {
		return nil, err
	}
	err = c.Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name},
		Data:       map[string][]byte{seedKey: seed},
	})
	if apierrors.IsAlreadyExists(err) {
		return readKey(ctx, c, name) // another replica was faster
	}
	if err != nil {
		return nil, fmt.Errorf("store the control plane's key in Secret %s: %w", name, err)
	}

	return key, nil
}

func readKey(ctx context.Context, c client.Client, name client.ObjectKey) (*bus.SealKey, error) {
	secret := &corev1.Secret{}
	if err := c.Get(ctx, name, secret); err != nil {
		return nil, fmt.Errorf("read the control plane's key from Secret %s: %w", name, err)
	}
	key, err := bus.ParseSealKey(secret.Data[seedKey])
	if err != nil {
		return nil, fmt.Errorf("Secret %s, key %q: %w (restore it from a backup; or delete the Secret, restart mcm, give pinned drivers the new public key, and restart all other drivers)", name, seedKey, err)
	}

	return key, nil
}
