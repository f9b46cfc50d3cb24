package kubetest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// createTimeout bounds how long it may take to store a file's objects.
const createTimeout = time.Minute

// Scheme returns a new scheme with Kubernetes' own kinds and the project's.
func Scheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	utilruntime.Must(clientgoscheme.AddToScheme(scheme))
	utilruntime.Must(v1alpha1.AddToScheme(scheme))

	return scheme
}

var namespaces atomic.Int64

// Namespace creates a namespace for one test, and a client with the kinds of [Scheme].
func Namespace(tb testing.TB, cfg *rest.Config) (c client.WithWatch, name string) {
	tb.Helper()
	c, err := client.NewWithWatch(cfg, client.Options{Scheme: Scheme()})
	if err != nil {
		tb.Fatalf("make a client: %v", err)
	}
	name = fmt.Sprintf("t%d", namespaces.Add(1))
	if err := c.Create(tb.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
		tb.Fatalf("make a namespace: %v", err)
	}

	return c, name
}

// AsMCM returns a config with the identity of a deployed mcm. Its permissions are those that [Create] has stored from the
// manifests.
func AsMCM(cfg *rest.Config) *rest.Config {
	cfg = rest.CopyConfig(cfg)
	cfg.Impersonate.UserName = "system:serviceaccount:machinebus:mcm"

	return cfg
}

// Create stores the objects of a YAML file, whose name is relative to the repository's root.
func Create(cfg *rest.Config, name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), createTimeout)
	defer cancel()
	c, err := client.New(cfg, client.Options{})
	if err != nil {
		return err
	}
	file, err := os.Open(File(name))
	if err != nil {
		return err
	}
	defer file.Close()
	documents := yaml.NewYAMLReader(bufio.NewReader(file))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		object := &unstructured.Unstructured{}
		if err := sigsyaml.Unmarshal(document, &object.Object); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := c.Create(ctx, object); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
}

// File returns the path of a file, given its name relative to the repository's root. Outside of the repository it returns
// the name itself, which fails to open.
func File(name string) string {
	dir, err := os.Getwd()
	// Not by runtime.Caller: with -trimpath its paths do not exist.
	for err == nil && dir != filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return filepath.Join(dir, name)
		}
		dir = filepath.Dir(dir)
	}

	return name
}
