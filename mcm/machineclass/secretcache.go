package machineclass

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"sigs.k8s.io/controller-runtime/pkg/cache"
)

// foreignTypes are types of Secrets that no class can use. There may be many of them: Helm
// stores each release of a chart in one.
var foreignTypes = []corev1.SecretType{
	"helm.sh/release.v1",
	corev1.SecretTypeServiceAccountToken,
	corev1.SecretTypeDockercfg,
	corev1.SecretTypeDockerConfigJson,
	corev1.SecretTypeTLS,
	corev1.SecretTypeBootstrapToken,
}

// SecretCache makes a manager's cache omit Secrets of foreign types; the API server filters
// them.
func SecretCache() cache.ByObject {
	var selectors []fields.Selector
	for _, foreign := range foreignTypes {
		selectors = append(selectors, fields.OneTermNotEqualSelector("type", string(foreign)))
	}

	return cache.ByObject{Field: fields.AndSelectors(selectors...)}
}
