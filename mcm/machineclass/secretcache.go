package machineclass

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"sigs.k8s.io/controller-runtime/pkg/cache"
)

// foreignTypes are the types of Secrets that other programs keep for themselves. No class
// has a use for one, and they may be many: Helm keeps each release of a chart in one.
var foreignTypes = []corev1.SecretType{
	"helm.sh/release.v1",
	corev1.SecretTypeServiceAccountToken,
	corev1.SecretTypeDockercfg,
	corev1.SecretTypeDockerConfigJson,
	corev1.SecretTypeTLS,
	corev1.SecretTypeBootstrapToken,
}

// SecretCache has a manager's cache hold no Secrets but those that a class may refer to:
// the API server leaves out those of foreign types.
func SecretCache() cache.ByObject {
	var selectors []fields.Selector
	for _, foreign := range foreignTypes {
		selectors = append(selectors, fields.OneTermNotEqualSelector("type", string(foreign)))
	}

	return cache.ByObject{Field: fields.AndSelectors(selectors...)}
}
