package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"strconv"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/cli"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"
)

const apiServerName = "kube-apiserver"

const loopback = "127.0.0.1"

// serviceIPRange is kubeadm's default; its first address is the "kubernetes" service.
const (
	serviceIPRange = "10.96.0.0/16"
	serviceIP      = "10.96.0.1"
)

func apiServerMain() int { return cli.Run(app.NewAPIServerCommand()) }

// apiServerArgs returns the flags of an API server that authenticates by token file, client certificate and bootstrap
// token, and authorizes as kubeadm's does.
func apiServerArgs(port int, etcdURL, tokenFile string, p pki) []string {
	const issuer = "https://kubernetes.default.svc.cluster.local"
	return []string{
		"--etcd-servers=" + etcdURL,
		"--bind-address=" + loopback,
		"--advertise-address=" + loopback,
		"--secure-port=" + strconv.Itoa(port),
		"--endpoint-reconciler-type=none",
		"--tls-cert-file=" + p.serverCert,
		"--tls-private-key-file=" + p.serverKey,
		"--client-ca-file=" + p.caCert,
		"--token-auth-file=" + tokenFile,
		"--enable-bootstrap-token-auth=true",
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--allow-privileged=true",
		"--service-account-issuer=" + issuer,
		"--service-account-key-file=" + p.serviceAccountKey,
		"--service-account-signing-key-file=" + p.serviceAccountKey,
		"--service-cluster-ip-range=" + serviceIPRange,
	}
}

// apiServer is the API server in this process.
type apiServer struct {
	cancel context.CancelFunc
	done   chan struct{}
	err    error // valid once done is closed
}

// startAPIServer starts a server on l, which it then owns. It returns before the server is ready. Only one is possible
// per process, as the server keeps feature gates and metrics in globals.
func startAPIServer(l net.Listener, args []string) (*apiServer, error) {
	s := options.NewServerRunOptions()
	fs := pflag.NewFlagSet(apiServerName, pflag.ContinueOnError)
	for _, named := range s.Flags().FlagSets {
		fs.AddFlagSet(named)
	}
	if err := fs.Parse(args); err != nil {
		return nil, fmt.Errorf("flags: %w", err)
	}
	if err := s.GenericServerRunOptions.ComponentGlobalsRegistry.Set(); err != nil {
		return nil, fmt.Errorf("feature gates: %w", err)
	}
	var verbosity klog.Level
	if err := verbosity.Set(strconv.FormatUint(uint64(s.Logs.Verbosity), 10)); err != nil {
		return nil, fmt.Errorf("log verbosity: %w", err)
	}
	rest.SetDefaultWarningHandler(rest.NoWarnings{}) // its own loopback client triggers deprecation warnings
	s.SecureServing.Listener = l

	// This is kube-apiserver's own command without its signal handler: it must stop before etcd, not with etcd.
	ctx, cancel := context.WithCancel(context.Background())
	completed, err := s.Complete(ctx)
	if err != nil {
		cancel()
		return nil, fmt.Errorf("options: %w", err)
	}
	if errs := completed.Validate(); len(errs) > 0 {
		cancel()
		return nil, fmt.Errorf("options: %w", errors.Join(errs...))
	}
	a := &apiServer{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(a.done)
		a.err = app.Run(ctx, completed)
	}()
	return a, nil
}

// stop ends the server, and gives up waiting after the limit.
func (a *apiServer) stop(limit time.Duration) error {
	a.cancel()
	select {
	case <-a.done:
		return nil
	case <-time.After(limit):
		return fmt.Errorf("%s did not stop within %s", apiServerName, limit)
	}
}

// logTo redirects the logs of the API server and its libraries from stderr to w. w must never be closed, as klog ends
// the process when it cannot write.
func logTo(w io.Writer) error {
	fs := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(fs)
	for name, value := range map[string]string{
		"logtostderr":     "false",
		"alsologtostderr": "false",
		"stderrthreshold": "FATAL",
		"one_output":      "true", // otherwise each line is written once per severity below its own
	} {
		if err := fs.Set(name, value); err != nil {
			return fmt.Errorf("set up logging: %w", err)
		}
	}
	klog.SetOutput(w)
	log.SetOutput(w) // errors of net/http
	return nil
}
