// Command devcluster is a Kubernetes control plane in one binary, for development and tests: etcd and
// kube-apiserver in one process, kube-controller-manager and kube-scheduler as children of it, and kubectl. It binds
// loopback ports only and uses real TLS and RBAC, so a program that works against it has met a real API server.
//
// It is not for production (etcd does not fsync) and runs no kubelet. It is a module of its own, so that importers of
// the main module do not get its dependencies.
//
// The binary acts as one of its parts when it is called by that part's name, through a symlink or as first argument:
// etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubectl.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/component-base/version"
)

// dieWithParent is an environment variable: if set, a part ends when its parent process has ended or was killed. It is
// for tests, as parts have only Kubernetes' own flags.
const dieWithParent = "DEVCLUSTER_DIE_WITH_PARENT"

func init() { //nolint:gochecknoinits // only before main is the main goroutine sure to be on the main thread
	// Pdeathsig is sent when the thread that forked ends. The main goroutine starts all children, and the main thread
	// lives as long as the process.
	runtime.LockOSThread()
}

func main() {
	if part, args, ok := dispatch(os.Args); ok {
		os.Args = args // the parts' commands read os.Args themselves
		if os.Getenv(dieWithParent) != "" {
			if err := watchParent(func() { os.Exit(1) }); err != nil {
				report(os.Stderr, fmt.Errorf("%s: %w", dieWithParent, err))
				os.Exit(1)
			}
		}
		os.Exit(part())
	}
	// Packages of Kubernetes add flags to the global set, which cobra would show on every command.
	pflag.CommandLine = pflag.NewFlagSet("devcluster", pflag.ContinueOnError)
	if err := rootCommand().Execute(); err != nil {
		report(os.Stderr, err)
		os.Exit(1)
	}
}

// parts are the programs in this binary. Each reads os.Args, blocks, and returns an exit code.
var parts = map[string]func() int{
	"etcd":                etcdMain,
	apiServerName:         apiServerMain,
	controllerManagerName: controllerManagerMain,
	schedulerName:         schedulerMain,
	"kubectl":             kubectlMain,
}

// dispatch returns the part that args name, by program name or else by first argument, and its arguments.
func dispatch(args []string) (part func() int, partArgs []string, ok bool) {
	if len(args) == 0 {
		return nil, nil, false
	}
	if part, ok := parts[filepath.Base(args[0])]; ok {
		return part, args, true
	}
	if len(args) > 1 {
		if part, ok := parts[args[1]]; ok {
			return part, args[1:], true
		}
	}
	return nil, nil, false
}

func rootCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "devcluster",
		Short: "A Kubernetes control plane in one binary, for development and tests",
		Long: `A Kubernetes control plane in one binary, for development and tests.

"devcluster run" starts a cluster. "devcluster kubectl ..." runs kubectl; likewise etcd, kube-apiserver,
kube-controller-manager and kube-scheduler. A symlink with one of these names runs that program, too.`,
		Version:       version.Get().GitVersion,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          noArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(runCommand(), assetsCommand())
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w; see %q", err, cmd.CommandPath()+" --help")
	})
	return cmd
}

// noArgs is cobra.NoArgs with a hint.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("%q has no command or argument %q; see %q", cmd.CommandPath(), args[0], cmd.CommandPath()+" --help")
}
