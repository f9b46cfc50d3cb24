package bootstrap

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// memoLimit bounds a memo: a replica that does not lead makes tokens and deletes
// none.
const memoLimit = 10_000

// A memo knows the Secrets of tokens that were made here, without what is secret
// about them, so that they can be deleted without being read. What it does not know
// costs a request. The zero memo is empty; it is safe for concurrent use.
type memo struct {
	mu   sync.Mutex
	made map[types.UID]*corev1.Secret // by uid of the machine
}

func (m *memo) add(machine types.UID, secret *corev1.Secret) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.made == nil || len(m.made) >= memoLimit {
		m.made = map[types.UID]*corev1.Secret{}
	}
	m.made[machine] = &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: secret.Namespace, Name: secret.Name, UID: secret.UID},
	}
}

// take returns the Secret of a machine's token and forgets it; nil for none.
func (m *memo) take(machine types.UID) *corev1.Secret {
	m.mu.Lock()
	defer m.mu.Unlock()
	secret := m.made[machine]
	delete(m.made, machine)

	return secret
}
