// Package kubetest runs the tests of a package against a real API server: one per test binary, with the project's CRDs
// where they are wanted. It is for tests only: it runs no controllers and no kubelet, and it fakes nothing. End-to-end
// tests start the whole cluster in processes of their own instead.
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

// Environment is an API server with the project's CRDs, for [Main]. It may be changed before that.
func Environment() *envtest.Environment {
	return &envtest.Environment{CRDDirectoryPaths: []string{File("deploy/crds")}, ErrorIfCRDPathMissing: true}
}

// Main is the whole of a TestMain: it starts the API server of env, calls ready with the way to it, runs the tests,
// calls done, stops the API server, and exits. All is in the calling goroutine. Clients made from the way are not slowed
// down.
//
// When anything but the tests fails, Main says so and exits with 1. Once ready has succeeded, done is called whatever
// the tests' outcome; clients that go on watching hinder the API server's stop.
//
// A test binary that fuzzes gets no API server, and neither ready nor done is called. Otherwise each of its worker
// processes would start one, whose etcd inherits the worker's pipe to the coordinator; a worker that is killed leaves it
// behind, and the coordinator waits for the end of that pipe for ever. Tests that need the server cannot run then: add
// -run='^$' to -fuzz.
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
	// The dev cluster's etcd and API server heed it, should this process be killed.
	if err := os.Setenv("DEVCLUSTER_DIE_WITH_PARENT", "1"); err != nil {
		return 0, err
	}
	// What has been started before a failure runs, too.
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

// fuzzing tells whether the test binary coordinates fuzzing or is a worker of that.
func fuzzing() bool {
	set := func(name, unset string) bool {
		f := flag.Lookup(name)

		return f != nil && f.Value.String() != unset
	}

	return set("test.fuzz", "") || set("test.fuzzworker", "false")
}
