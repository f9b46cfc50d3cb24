package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/component-base/version"
)

// runOptions holds the flags of "devcluster run".
type runOptions struct {
	dir                  string
	keep                 bool
	users                []string
	readyFile            string
	securePort, etcdPort int
	controllers          []string
	noControllerManager  bool
	noScheduler          bool
	dieWithParent        bool
	startTimeout         time.Duration

	apiServerArgs, controllerManagerArgs, schedulerArgs []string
}

func runCommand() *cobra.Command {
	var o runOptions
	cmd := &cobra.Command{
		Use:   "run --dir DIR",
		Short: "Run a cluster in the foreground until SIGTERM or SIGINT",
		Long: `Run a cluster in the foreground until SIGTERM or SIGINT.

Once the cluster is ready, it prints one line on stdout: "ready kubeconfig=" and the path of the admin's
kubeconfig, up to the end of the line. All logs go to DIR/*.log.`,
		Example: `  devcluster run --dir .out/cluster --users mcm --users alice:ops,viewers
  devcluster kubectl --kubeconfig .out/cluster/kubeconfig get namespaces`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.OutOrStdout()) },
	}
	f := cmd.Flags()
	f.StringVar(&o.dir, "dir", "", "directory of the cluster: empty, missing, or of an earlier run, which is deleted")
	f.BoolVar(&o.keep, "keep", false, "continue with the cluster in --dir instead of deleting it; for the same address set --secure-port")
	f.StringArrayVar(&o.users, "users", nil, "create DIR/NAME.kubeconfig for a user given as NAME or NAME:GROUP1,GROUP2, "+
		"whose rights are those that RBAC grants; may be repeated")
	f.StringVar(&o.readyFile, "ready-file", "", "file with the ready line, which exists while the cluster is ready")
	f.IntVar(&o.securePort, "secure-port", 0, "loopback port of the API server; 0 takes a free one")
	f.IntVar(&o.etcdPort, "etcd-port", 0, "loopback port of etcd, for tests that read its data; 0 takes a free one")
	f.StringSliceVar(&o.controllers, "controllers", defaultControllers, "kube-controller-manager's --controllers")
	f.BoolVar(&o.noControllerManager, "no-controller-manager", false, "do not start kube-controller-manager")
	f.BoolVar(&o.noScheduler, "no-scheduler", false, "do not start kube-scheduler")
	f.BoolVar(&o.dieWithParent, "die-with-parent", false, "stop when the process that started this one ends")
	f.DurationVar(&o.startTimeout, "start-timeout", time.Minute, "give up if the cluster is not ready after this time")
	f.StringArrayVar(&o.apiServerArgs, "apiserver-arg", nil, "one more flag for kube-apiserver, as in --apiserver-arg=--v=4; may be repeated")
	f.StringArrayVar(&o.controllerManagerArgs, "controller-manager-arg", nil, "one more flag for kube-controller-manager; may be repeated")
	f.StringArrayVar(&o.schedulerArgs, "scheduler-arg", nil, "one more flag for kube-scheduler; may be repeated")
	return cmd
}

// errNoDir is the error of commands without --dir.
var errNoDir = errors.New("--dir is missing; set it to a directory to write to")

// errStop is the cause of a requested stop.
var errStop = errors.New("asked to stop")

func (o *runOptions) run(stdout io.Writer) (err error) {
	if o.dir == "" {
		return errNoDir
	}
	users, err := parseUsers(o.users)
	if err != nil {
		return err
	}
	if err := checkControllers(o.controllers); err != nil {
		return err
	}
	if err := checkVersion(version.Get().GitVersion); err != nil {
		return err
	}
	if os.Getenv("GOGC") == "" {
		// Processor time is scarcer than memory where tests run.
		const percent = 300
		debug.SetGCPercent(percent)
	}
	ctx, end := context.WithCancelCause(context.Background())
	defer end(nil)
	stopOnSignal(func() { end(errStop) })
	if o.dieWithParent {
		if err := watchParent(func() { end(errStop) }); err != nil {
			return fmt.Errorf("--die-with-parent: %w", err)
		}
	}

	// Closed by the API server or the end of this process, never here: a server that has not been stopped would panic.
	listener, err := listen(o.securePort)
	if err != nil {
		return err
	}
	dir, err := openStateDir(o.dir, o.keep)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dir.close()) }()

	c := &cluster{options: o, dir: dir, listener: listener, users: append(systemUsers(), users...), end: end}
	defer func() { err = errors.Join(err, c.stop()) }()
	if err := c.start(ctx); err != nil {
		if errors.Is(err, errStop) {
			return errors.New("stopped before the cluster was ready")
		}
		return err
	}
	withdraw, err := o.announce(stdout, dir.kubeconfig(adminUser))
	if err != nil {
		return err
	}
	<-ctx.Done()
	err = withdraw()
	if cause := context.Cause(ctx); !errors.Is(cause, errStop) {
		err = errors.Join(cause, err)
	}
	return err
}

// checkVersion returns an error if the binary was linked without its version: clients parse the server's version, and
// would fail with confusing errors.
func checkVersion(v string) error {
	if strings.HasPrefix(v, "v0.0.0") {
		return fmt.Errorf("this binary was built without the Kubernetes version (it reports %s); "+
			"build it with the command in deploy/devcluster/README.md", v)
	}
	return nil
}

// stopOnSignal calls stop on the first SIGINT or SIGTERM. The second one ends the process as usual.
func stopOnSignal(stop func()) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-signals
		signal.Stop(signals)
		stop()
	}()
}

func listen(port int) (net.Listener, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(loopback, strconv.Itoa(port)))
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("port %d of %s is taken; choose another --secure-port, or 0 for a free one", port, loopback)
	}
	if err != nil {
		return nil, fmt.Errorf("open --secure-port: %w", err)
	}
	return l, nil
}

// announce prints that the cluster is ready and writes the ready file, which withdraw removes.
func (o *runOptions) announce(stdout io.Writer, kubeconfig string) (withdraw func() error, err error) {
	line := "ready kubeconfig=" + kubeconfig + "\n"
	withdraw = func() error { return nil }
	if o.readyFile != "" {
		if err := writeAtomically(o.readyFile, line); err != nil {
			return nil, fmt.Errorf("write --ready-file: %w", err)
		}
		withdraw = func() error { return os.Remove(o.readyFile) }
	}
	if _, err := io.WriteString(stdout, line); err != nil {
		return nil, errors.Join(fmt.Errorf("print that the cluster is ready: %w", err), withdraw())
	}
	return withdraw, nil
}

// writeAtomically writes a file so that it never exists with a part of its content.
func writeAtomically(path, content string) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	_, err = f.WriteString(content)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
