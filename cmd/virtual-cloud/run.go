package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloud"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/join"
)

// shutdownTimeout bounds the wait for running calls. They end soon after the cloud stops,
// but net/http waits 5 s for a connection without a request.
const shutdownTimeout = 10 * time.Second

// run serves until ctx ends, and returns when everything it started has ended.
func run(ctx context.Context, o *options, stdout, stderr io.Writer) error {
	logger := slog.New(slog.NewTextHandler(stderr, nil))
	if err := o.complete(); err != nil {
		return err
	}
	opts := cloud.Options{Identity: cloudapi.Identity(o.identity), Knobs: o.knobs, Logger: logger}
	if o.logFile != "" {
		file, err := os.OpenFile(o.logFile, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			return fmt.Errorf("--log: %w", err)
		}
		defer file.Close() // each entry was written at once
		opts.Log = file
	}
	listener, err := listen(o.listen, o.apiToken != "")
	if err != nil {
		return err
	}
	defer listener.Close()

	ctx, stop := context.WithCancel(ctx)
	var parts sync.WaitGroup
	defer parts.Wait()
	defer stop()
	if o.kubeconfig != "" {
		klog.SetSlogLogger(logger) // for client-go
		client, err := join.Client(o.kubeconfig)
		if err != nil {
			return fmt.Errorf("--join-kubeconfig: %w", err)
		}
		joiner := join.New(client, o.leasePeriod, logger)
		opts.Listener = joiner
		parts.Go(func() { joiner.Run(ctx) })
	}
	c, err := cloud.New(ctx, opts)
	if err != nil {
		return fmt.Errorf("%w; see \"virtual-cloud --help\"", err)
	}
	server := &http.Server{
		Handler: cloud.NewHandler(c, o.apiToken), ReadHeaderTimeout: 10 * time.Second,
		ErrorLog: slog.NewLogLogger(logger.Handler(), slog.LevelWarn),
	}
	fmt.Fprintf(stdout, "listening http://%s\n", listener.Addr())

	return serve(ctx, server, listener)
}

// serve ends the server when ctx ends. By then the cloud has ended all waits.
func serve(ctx context.Context, server *http.Server, listener net.Listener) error {
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve %s: %w", listener.Addr(), err)
	case <-ctx.Done():
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if err := server.Shutdown(last); err != nil {
		return errors.Join(fmt.Errorf("some calls were aborted: %w", err), server.Close())
	}

	return nil
}

// listen returns an error if other hosts could connect without a token.
func listen(address string, guarded bool) (net.Listener, error) {
	listener, err := net.Listen("tcp", address)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("--listen %s: the port is in use; stop the program that uses it, or give port 0 for a free one", address)
	case err != nil:
		return nil, fmt.Errorf("--listen %s: %w; give a host of this computer and a port, such as 127.0.0.1:0", address, err)
	}
	if tcp, ok := listener.Addr().(*net.TCPAddr); !guarded && (!ok || !tcp.IP.IsLoopback()) {
		return nil, errors.Join(fmt.Errorf("--listen %s: other hosts could call it without a token; "+
			"set --api-token-file, or listen on 127.0.0.1", address), listener.Close())
	}

	return listener, nil
}
