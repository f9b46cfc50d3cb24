package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

// stopLimit is how long each component may take to stop. Components in this process end with it anyway.
const stopLimit = 5 * time.Second

// cluster is a running cluster. It is not safe for concurrent use.
type cluster struct {
	options  *runOptions
	dir      *stateDir
	listener net.Listener
	users    []user
	end      context.CancelCauseFunc // ends the run if a component exits

	pki      pki
	etcd     *etcdServer
	api      *apiServer
	apiReady bool
	children []*child
}

// start returns when the cluster is ready. Even after an error stop must be called.
func (c *cluster) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.options.startTimeout, fmt.Errorf(
		"not ready within %s; raise --start-timeout if this machine is slow", c.options.startTimeout))
	defer cancel()

	if c.options.readyFile != "" {
		if err := os.Remove(c.options.readyFile); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove the old --ready-file: %w", err)
		}
	}
	if err := c.redirectLogs(); err != nil {
		return err
	}
	if err := c.writeCredentials(); err != nil {
		return err
	}
	if err := c.startEtcd(ctx); err != nil {
		return err
	}
	if err := c.startAPIServer(); err != nil {
		return c.blame(apiServerName, err)
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", c.dir.kubeconfig(adminUser))
	if err != nil {
		return fmt.Errorf("read back the admin's kubeconfig: %w", err)
	}
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return fmt.Errorf("make a client for the API server: %w", err)
	}
	if err := waitReady(ctx, client); err != nil {
		return c.blame(apiServerName, err)
	}
	c.apiReady = true
	if err := letNodesJoin(ctx, client); err != nil {
		return c.blame(apiServerName, err)
	}
	return c.startChildren(ctx, client)
}

func (c *cluster) writeCredentials() error {
	c.pki = newPKI(c.dir.internal("pki"))
	if err := c.pki.ensure(time.Now()); err != nil {
		return fmt.Errorf("make keys and certificates: %w", err)
	}
	if err := assignTokens(c.tokenFile(), c.users); err != nil {
		return fmt.Errorf("make tokens: %w", err)
	}
	caCert, err := os.ReadFile(c.pki.caCert)
	if err != nil {
		return fmt.Errorf("read the CA certificate: %w", err)
	}
	server := "https://" + c.listener.Addr().String()
	for _, u := range c.users {
		if err := writeKubeconfig(c.dir.kubeconfig(u.name), server, caCert, u); err != nil {
			return fmt.Errorf("write kubeconfig: %w", err)
		}
	}
	return nil
}

func (c *cluster) tokenFile() string { return c.dir.internal("tokens.csv") }

func (c *cluster) startEtcd(ctx context.Context) error {
	const name = "etcd"
	etcd, err := startEtcd(ctx, c.dir.internal("etcd"), c.options.etcdPort, c.dir.log(name), func(err error) {
		report(os.Stderr, c.blame(name, err))
	})
	if err != nil {
		return c.blame(name, err)
	}
	c.etcd = etcd
	go func() {
		if err, ok := <-etcd.Err(); ok {
			c.end(c.blame(name, err))
		}
	}()
	return nil
}

// redirectLogs sends the logs of this process to the API server's file, which is never closed: see logTo.
func (c *cluster) redirectLogs() error {
	logFile, err := c.dir.openLog(apiServerName)
	if err != nil {
		return fmt.Errorf("open the log: %w", err)
	}
	klog.OsExit = func(code int) {
		// klog has written the reason to stderr.
		fmt.Fprintf(os.Stderr, "devcluster: %s exited; see %s\n", apiServerName, logFile.Name())
		os.Exit(code)
	}
	return logTo(logFile)
}

func (c *cluster) startAPIServer() error {
	port := c.listener.Addr().(*net.TCPAddr).Port //nolint:errcheck,forcetypeassert // made by net.Listen("tcp", …)
	args := append(apiServerArgs(port, c.etcd.url, c.tokenFile(), c.pki), c.options.apiServerArgs...)
	api, err := startAPIServer(c.listener, args)
	if err != nil {
		return err
	}
	c.api = api
	go func() {
		<-api.done
		c.end(c.blame(apiServerName, exitError(api.err)))
	}()
	return nil
}

func (c *cluster) startChildren(ctx context.Context, client kubernetes.Interface) error {
	o := c.options
	if !o.noScheduler {
		args := append(schedulerArgs(c.dir.kubeconfig("system:"+schedulerName)), o.schedulerArgs...)
		if err := c.startChild(schedulerName, args); err != nil {
			return err
		}
	}
	if o.noControllerManager {
		return nil
	}
	kubeconfig := c.dir.kubeconfig("system:" + controllerManagerName)
	args := append(controllerManagerArgs(kubeconfig, c.pki, o.controllers), o.controllerManagerArgs...)
	if err := c.startChild(controllerManagerName, args); err != nil {
		return err
	}
	if !makesServiceAccounts(o.controllers) {
		return nil
	}
	if err := waitDefaultServiceAccount(ctx, client); err != nil {
		return c.blame(controllerManagerName, err)
	}
	return nil
}

func (c *cluster) startChild(name string, args []string) error {
	logFile, err := c.dir.openLog(name)
	if err != nil {
		return fmt.Errorf("open the log: %w", err)
	}
	defer logFile.Close() // the child has its own descriptor
	child, err := startChild(name, args, logFile)
	if err != nil {
		return err
	}
	c.children = append(c.children, child)
	go func() {
		<-child.done
		c.end(c.blame(name, exitError(child.err)))
	}()
	return nil
}

// stop ends the components in the reverse order of their start: an API server would wait for an ended etcd.
func (c *cluster) stop() error {
	c.end(errStop) // components that end from now on are not a failure
	var errs []error
	for _, child := range slices.Backward(c.children) {
		errs = append(errs, child.stop(stopLimit))
	}
	if c.api != nil && !c.apiReady {
		// An API server that is stopped while it starts dumps all stacks and ends the process. So it is left to the end
		// of the process, which etcd's data survive.
		return errors.Join(errs...)
	}
	if c.api != nil {
		errs = append(errs, c.api.stop(stopLimit))
	}
	if c.etcd != nil {
		errs = append(errs, c.etcd.stop(stopLimit))
	}
	return errors.Join(errs...)
}

// blame adds the component to an error, unless it names one already or comes from a requested stop.
func (c *cluster) blame(component string, err error) error {
	var blamed *componentError
	if errors.As(err, &blamed) || errors.Is(err, errStop) {
		return err
	}
	return &componentError{component: component, log: c.dir.log(component), err: err}
}

func exitError(err error) error {
	if err == nil {
		return errors.New("exited without an error before it was stopped")
	}
	return fmt.Errorf("exited before it was stopped: %w", err)
}
