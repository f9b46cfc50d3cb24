package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/tools/clientcmd"
)

func TestRenderKubeconfig(t *testing.T) {
	t.Parallel()
	content, err := renderKubeconfig("https://127.0.0.1:1234", []byte("the CA"), user{name: "mcm", token: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	// What a client makes of it is what counts.
	got, err := clientcmd.RESTConfigFromKubeConfig(content)
	if err != nil {
		t.Fatalf("client-go refuses it: %v\n%s", err, content)
	}
	if diff := cmp.Diff(
		[]string{"https://127.0.0.1:1234", "the CA", "secret"},
		[]string{got.Host, string(got.CAData), got.BearerToken},
	); diff != "" {
		t.Errorf("-want, +got:\n%s", diff)
	}
}
