// Package kubetest runs the tests of a package against a real API server, one per test binary, with the project's CRDs if
// wanted. It runs no controllers and no kubelet, and fakes nothing. End-to-end tests start a whole cluster as processes
// instead.
package kubetest

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/go-logr/logr"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

// Tests are what [Main] runs; *testing.M is one.
type Tests interface {
	// Run returns the exit code of the program.
	Run() int
}

// Environment returns an API server with the project's CRDs, for [Main]. The caller may change it before.
func Environment() *envtest.Environment {
	return &envtest.Environment{CRDDirectoryPaths: []string{File("deploy/crds")}, ErrorIfCRDPathMissing: true}
}

// Main is a whole TestMain. It starts the API server of env, calls ready with a config for it, runs the tests, calls done,
// stops the API server and exits, all in the calling goroutine. Clients made from the config have no rate limit.
//
// If anything but the tests fails, Main prints the error and exits with 1. It calls done if ready succeeded, whatever the
// tests' outcome. Clients that still watch delay the API server's stop.
//
// A test binary that fuzzes gets no API server, and Main calls neither ready nor done. Otherwise each worker process would
// start a server whose etcd inherits the worker's pipe to the coordinator. A killed worker would leave etcd behind, and the
// coordinator would wait for the pipe's end for ever. Tests that need the server cannot run then: add -run='^$' to -fuzz.
func Main(tests Tests, env *envtest.Environment, ready func(*rest.Config) error, done ...func() error) {
	flag.Parse()
	ctrl.SetLogger(logr.Discard())
	os.Exit(run(os.Stderr, tests, env, ready, done...)) //nolint:forbidigo // it is a main, all but in name
}

func run(log io.Writer, tests Tests, env *envtest.Environment, ready func(*rest.Config) error, done ...func() error) int {
	if fuzzing() {
		return tests.Run()
	}
	code, err := runWith(tests, env, ready, done)
	if err != nil {
		fmt.Fprintln(log, "kubetest:", err)

		return max(code, 1)
	}

	return code
}

func runWith(tests Tests, env *envtest.Environment, ready func(*rest.Config) error, done []func() error) (code int, err error) {
	if os.Getenv("KUBEBUILDER_ASSETS") == "" {
		return 0, errors.New("KUBEBUILDER_ASSETS must name the directory of etcd and kube-apiserver: " +
			"`make test` sets it, or run: export KUBEBUILDER_ASSETS=$(.out/bin/devcluster assets --dir .out/envtest)")
	}
	// With this the dev cluster's etcd and API server end if this process is killed.
	if err := os.Setenv("DEVCLUSTER_DIE_WITH_PARENT", "1"); err != nil {
		return 0, err
	}
	// Also after a failed start: etcd may run already.
	defer func() {
		if stopped := env.Stop(); stopped != nil {
			err = errors.Join(err, fmt.Errorf("stop the API server: %w", stopped))
		}
	}()
	cfg, err := env.Start()
	if err != nil {
		return 0, fmt.Errorf("start an API server: %w", err)
	}
	cfg.QPS, cfg.Burst = -1, -1
	if err := ready(cfg); err != nil {
		return 0, fmt.Errorf("prepare the tests: %w", err)
	}
	code = tests.Run()
	for _, f := range done {
		err = errors.Join(err, f())
	}

	return code, err
}

// fuzzing reports whether the test binary coordinates fuzzing or is a fuzz worker.
func fuzzing() bool {
	set := func(name, unset string) bool {
		f := flag.Lookup(name)

		return f != nil && f.Value.String() != unset
	}

	return set("test.fuzz", "") || set("test.fuzzworker", "false")
}
