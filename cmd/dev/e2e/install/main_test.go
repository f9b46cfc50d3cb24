package install

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// patience bounds every wait. It says nothing about how long things take: they
// are only given up then.
const patience = 2 * time.Minute

// shared is what all tests use. TestMain sets it before any runs.
var shared struct {
	bin, dir string
	cluster  *stack.DevCluster
	kube     client.Client
}

func TestMain(m *testing.M) {
	code, err := runTests(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "install:", err)
		code = 1
	}
	os.Exit(code)
}

func runTests(m *testing.M) (code int, err error) {
	shared.bin = "../../../../.out/bin"
	if bin := os.Getenv("E2E_BIN"); bin != "" {
		shared.bin = bin
	}
	missing := stack.Missing(shared.bin, "devcluster", "mcm", "mcmctl", "mcm-autoscaler", "mcm-grpc-bridge", "virtual-cloud", "driver-virtual", "nats-server")
	if len(missing) > 0 {
		return 1, fmt.Errorf("not built: %s in %s; run: make test-e2e", strings.Join(missing, ", "), shared.bin)
	}
	if shared.dir, err = filepath.Abs("../../../../.out/run/e2e-install"); err != nil {
		return 1, err
	}
	if err := os.MkdirAll(filepath.Dir(shared.dir), 0o700); err != nil {
		return 1, err
	}
	release, err := stack.Lock(shared.dir + ".lock")
	if err != nil {
		return 1, fmt.Errorf("other tests use %s: %w", shared.dir, err)
	}
	defer release()
	site, err := stack.NewSite(stack.SiteOptions{Bin: shared.bin, Dir: shared.dir})
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, site.Close()) }()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if shared.cluster, err = site.StartDevCluster(ctx); err != nil {
		return 1, err
	}
	if shared.kube, err = stack.NewClient(shared.cluster.Kubeconfig); err != nil {
		return 1, err
	}
	if _, err := stack.ApplyCRDs(ctx, shared.kube, "../../../../deploy/crds"); err != nil {
		return 1, err
	}

	return m.Run(), nil
}
