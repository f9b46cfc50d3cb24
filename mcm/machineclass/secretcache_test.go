package machineclass_test

import (
	"context"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/kubetest"
	"github.com/machinebus/machinebus/mcm/machineclass"
)

// What others keep in Secrets never comes into mcm's memory.
func TestSecretCache(t *testing.T) {
	t.Parallel()
	c, namespace := kubetest.Namespace(t, apiServer)
	for name, kind := range map[string]corev1.SecretType{
		"plain": corev1.SecretTypeOpaque, "none": "", "own": "example.com/cloud", "basic": corev1.SecretTypeBasicAuth,
		"release": "helm.sh/release.v1", "pull": corev1.SecretTypeDockerConfigJson, "tls": corev1.SecretTypeTLS,
		"old-pull": corev1.SecretTypeDockercfg, "bootstrap": corev1.SecretTypeBootstrapToken,
	} {
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Type: kind, Data: map[string][]byte{
			"username": []byte("u"), "password": []byte("p"), "tls.crt": {}, "tls.key": {},
			corev1.DockerConfigJsonKey: []byte("{}"), corev1.DockerConfigKey: []byte("{}"),
		}}
		if err := c.Create(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
	}
	cached, err := cache.New(apiServer, cache.Options{
		Scheme: kubetest.Scheme(), DefaultNamespaces: map[string]cache.Config{namespace: {}},
		ByObject: map[client.Object]cache.ByObject{&corev1.Secret{}: machineclass.SecretCache()},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- cached.Start(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	if !cached.WaitForCacheSync(t.Context()) {
		t.Fatal("the cache does not start")
	}
	list := &corev1.SecretList{}
	if err := cached.List(t.Context(), list); err != nil {
		t.Fatal(err)
	}
	var names []string
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
	}
	slices.Sort(names)
	if diff := cmp.Diff([]string{"basic", "none", "own", "plain"}, names); diff != "" {
		t.Errorf("-want, +cached:\n%s", diff)
	}
}
