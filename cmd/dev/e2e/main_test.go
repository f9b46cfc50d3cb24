package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// shared is what all tests use. TestMain sets it before any runs.
var shared struct {
	bin, dir string
	cluster  *stack.DevCluster
	kube     client.Client
}

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == hostileRole {
		fmt.Fprintln(os.Stderr, runHostile(os.Args[2:]))
		os.Exit(1)
	}
	code, err := runTests(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		code = 1
	}
	os.Exit(code)
}

func runTests(m *testing.M) (code int, err error) {
	shared.bin = "../../../.out/bin"
	if bin := os.Getenv("E2E_BIN"); bin != "" {
		shared.bin = bin
	}
	missing := stack.Missing(shared.bin, "devcluster", "mcm", "virtual-cloud", "driver-virtual", "mcmctl", "mcm-autoscaler", "mcm-grpc-bridge", "nats-server")
	if len(missing) > 0 {
		return 1, fmt.Errorf("not built: %s in %s; run: make test-e2e", strings.Join(missing, ", "), shared.bin)
	}
	shared.dir, err = filepath.Abs("../../../.out/run/e2e")
	if err != nil {
		return 1, err
	}
	if err := os.MkdirAll(filepath.Dir(shared.dir), 0o700); err != nil {
		return 1, err
	}
	release, err := stack.Lock(shared.dir + ".lock")
	if err != nil {
		return 1, fmt.Errorf("other end-to-end tests use %s: %w", shared.dir, err)
	}
	defer release()
	site, err := stack.NewSite(stack.SiteOptions{Bin: shared.bin, Dir: shared.dir})
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, site.Close()) }()
	if shared.cluster, shared.kube, err = startCluster(context.Background(), site); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

// startCluster starts a dev cluster with our CRDs.
func startCluster(ctx context.Context, site *stack.Site) (*stack.DevCluster, client.Client, error) {
	cluster, err := site.StartDevCluster(ctx)
	if err != nil {
		return nil, nil, err
	}
	kube, err := stack.NewClient(cluster.Kubeconfig)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_, err = stack.ApplyCRDs(ctx, kube, "../../../deploy/crds")
	return cluster, kube, err
}
