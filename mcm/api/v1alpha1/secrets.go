package v1alpha1

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// SecretKey returns the Secret that a class's reference means; false when the class must not have it. A reference
// without a namespace means the class's own, and no other one is allowed: who may write classes in one namespace would
// have the controllers, which may read more than they, hand the Secrets of all others to a driver.
func SecretKey(class *MachineClass, ref *corev1.SecretReference) (key types.NamespacedName, allowed bool) {
	key = types.NamespacedName{Namespace: cmp.Or(ref.Namespace, class.Namespace), Name: ref.Name}

	return key, key.Namespace == class.Namespace
}

// SecretsOf returns the Secrets that a class refers to and may have, each once.
func SecretsOf(class *MachineClass) []types.NamespacedName {
	var keys []types.NamespacedName
	for _, ref := range []*corev1.SecretReference{class.SecretRef, class.CredentialsSecretRef} {
		if ref == nil || ref.Name == "" {
			continue
		}
		if key, allowed := SecretKey(class, ref); allowed && !slices.Contains(keys, key) {
			keys = append(keys, key)
		}
	}

	return keys
}
