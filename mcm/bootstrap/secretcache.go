package bootstrap

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// maxSecrets bounds a secretCache: a manager that does not lead creates tokens but
// deletes none.
const maxSecrets = 10_000

// A secretCache holds the metadata of the Secrets that this process created, so that it
// can delete them without reading them. Others cost one more request. The zero value is
// empty; it is safe for concurrent use.
type secretCache struct {
	mu      sync.Mutex
	secrets map[types.UID]*corev1.Secret // by uid of the machine
}

func (c *secretCache) add(machine types.UID, secret *corev1.Secret) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.secrets == nil || len(c.secrets) >= maxSecrets {
		c.secrets = map[types.UID]*corev1.Secret{}
	}
	c.secrets[machine] = &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: secret.Namespace, Name: secret.Name, UID: secret.UID},
	}
}

// take returns the Secret of a machine's token and forgets it; nil for none.
func (c *secretCache) take(machine types.UID) *corev1.Secret {
	c.mu.Lock()
	defer c.mu.Unlock()
	secret := c.secrets[machine]
	delete(c.secrets, machine)

	return secret
}
