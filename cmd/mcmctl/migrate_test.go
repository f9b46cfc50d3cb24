package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/cmd/driver-virtual/virtual"
	"github.com/machinebus/machinebus/driversdk"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// serveVirtual runs driver-virtual's driver until the test ends.
func serveVirtual(t *testing.T, url string, clusters ...string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	cfg := driversdk.Config{
		Provider: virtual.Provider, Kind: virtual.Kind, APIVersions: []string{virtual.APIVersion}, Clusters: clusters,
		NATS: driversdk.NATSConfig{URLs: []string{url}}, DrainTimeout: time.Second, Logger: bustest.Quiet(),
	}
	go func() { done <- driversdk.Serve(ctx, cfg, &virtual.Driver{Identity: driversdk.IdentityToken}) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("driversdk.Serve(...): %v", err)
		}
	})
	fleet := newFleet(anyCluster)
	stop, err := bus.WatchSessions(connectTo(t, url), anyCluster, fleet.onSession)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	bustest.Eventually(t, "sessions of the driver", func() bool { return len(fleet.list(time.Now())) >= max(1, len(clusters)) })
}

func content(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}

	return string(text)
}

func TestMigrate(t *testing.T) {
	t.Parallel()
	url := startBus(t)
	serveVirtual(t, url)
	out, _, err := mcmctl(t, "migrate", "--nats-url", url, "--provider", "Virtual", "-f", "testdata/oldclass.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(content(t, "testdata/newclass.yaml"), out); diff != "" {
		t.Errorf("what an API server has set must go, everything else must stay (-want +got):\n%s", diff)
	}

	var piped output
	root := newRoot()
	root.SetArgs([]string{"migrate", "--nats-url", url, "--cluster", "default", "--provider", "virtual", "-f", "-"})
	root.SetIn(bytes.NewBufferString(content(t, "testdata/oldclass.yaml")))
	root.SetOut(&piped)
	if err := root.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	if piped.String() != out {
		t.Errorf("standard input gives something else than the file:\n%s", piped.String())
	}
}

// TestMigrate_MixedFleet asks while replicas of an older version run as well, one of
// which gets every other request.
func TestMigrate_MixedFleet(t *testing.T) {
	t.Parallel()
	url := startBus(t)
	startReplica(t, url, replica.Config{Provider: virtual.Provider, Slots: 1}, ok)
	serveVirtual(t, url)
	for range 8 {
		_, _, err := mcmctl(t, "migrate", "--nats-url", url, "--cluster", "default", "--provider", "virtual", "-f", "testdata/oldclass.yaml")
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestMigrate_Refused(t *testing.T) {
	t.Parallel()
	url := startBus(t)
	serveVirtual(t, url, "east", "west")
	startReplica(t, url, replica.Config{Provider: "older", Slots: 1, Clusters: []string{"east"}}, ok)
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}

		return path
	}
	const old = "testdata/oldclass.yaml"
	wrongKind := file("kind.yaml", strings.ReplaceAll(content(t, old), "VirtualMachineClass", "AWSMachineClass"))
	unknown := file("unknown.yaml", content(t, old)+"  spot: true\n")
	cases := map[string]struct {
		args []string
		want string
	}{
		"no provider":      {[]string{"-f", old}, "--provider is needed"},
		"no class":         {[]string{"--provider", "virtual"}, "either as -f file or as resource/name"},
		"two classes":      {[]string{"--provider", "virtual", "-f", old, "a/b"}, "either as -f file or as resource/name"},
		"force alone":      {[]string{"--provider", "virtual", "-f", old, "--force-conflicts"}, "needs --apply"},
		"no file":          {[]string{"--provider", "virtual", "-f", dir + "/none"}, "no such file"},
		"no object":        {[]string{"--provider", "virtual", "-f", file("text", "hello")}, "want one object as YAML or JSON"},
		"no name":          {[]string{"--provider", "virtual", "-f", file("nameless", "{kind: A, apiVersion: b}")}, "needs apiVersion, kind and metadata.name"},
		"no such driver":   {[]string{"--provider", "aws", "-f", old}, "no driver replica of provider aws was heard; there are replicas of: older, virtual"},
		"older driver":     {[]string{"--provider", "older", "-f", old}, "does not implement migrateclass: use a version that does"},
		"several clusters": {[]string{"--provider", "virtual", "-f", old}, "choose one with --cluster: east, west"},
		"wrong kind": {
			[]string{"--provider", "virtual", "--cluster", "east", "-f", wrongKind},
			"AWSMachineClass shop/small: InvalidArgument: kind AWSMachineClass: want VirtualMachineClass",
		},
		"unknown field": {[]string{"--provider", "virtual", "--cluster", "west", "-f", unknown}, `unknown field "spot"`},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, _, err := mcmctl(t, append([]string{"migrate", "--nats-url", url}, tc.args...)...)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("want an error with %q, got: %v", tc.want, err)
			}
			if out != "" {
				t.Errorf("printed all the same: %s", out)
			}
		})
	}
}

// TestMigrate_Cluster reads the old class from an API server and stores the new
// one there.
func TestMigrate_Cluster(t *testing.T) {
	t.Parallel()
	old := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(content(t, "testdata/oldclass.yaml")), &old.Object); err != nil {
		t.Fatal(err)
	}
	old.SetUID("")
	old.SetResourceVersion("")
	for _, o := range []client.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, old} {
		if err := control.client.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, control.kubeconfig, 0o600); err != nil {
		t.Fatal(err)
	}
	url := startBus(t)
	serveVirtual(t, url)
	migrate := func(args ...string) (string, error) {
		out, _, err := mcmctl(t, append([]string{
			"migrate", "--nats-url", url, "--cluster", "default", "--provider", "virtual", "--kubeconfig", kubeconfig, "-n", "shop",
		}, args...)...)

		return out, err
	}
	out, err := migrate("virtualmachineclass/small")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(content(t, "testdata/newclass.yaml"), out); diff != "" {
		t.Errorf("printed (-want +got):\n%s", diff)
	}
	for range 2 {
		out, err := migrate("virtualmachineclasses.old.example.org/small", "--apply")
		if err != nil || out != "machineclass shop/small applied\n" {
			t.Fatalf("apply, again and again: %q, %v", out, err)
		}
	}
	class := &v1alpha1.MachineClass{}
	if err := control.client.Get(t.Context(), client.ObjectKey{Namespace: "shop", Name: "small"}, class); err != nil {
		t.Fatal(err)
	}
	if class.Provider != "virtual" || class.SecretRef == nil || class.SecretRef.Name != "small" || len(class.Finalizers) > 0 {
		t.Errorf("stored otherwise than migrated: %+v", class)
	}

	class.Provider = "other"
	if err := control.client.Update(t.Context(), class, client.FieldOwner("other")); err != nil {
		t.Fatal(err)
	}
	if _, err := migrate("virtualmachineclass/small", "--apply"); err == nil || !strings.Contains(err.Error(), "conflict") {
		t.Errorf("want a conflict over a field that another manager has changed, got: %v", err)
	}
	if _, err := migrate("virtualmachineclass/small", "--apply", "--force-conflicts"); err != nil {
		t.Error(err)
	}
	for arg, want := range map[string]string{
		"small": "want resource/name", "virtualmachineclass/none": "not found", "gcpmachineclass/small": "the cluster has no resource gcpmachineclass",
	} {
		if _, err := migrate(arg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: want an error with %q, got: %v", arg, want, err)
		}
	}
}
