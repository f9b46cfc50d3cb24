package main

import (
	"context"
	"fmt"
	"net"

	"github.com/machinebus/machinebus/cmd/internal/tracing"
	"github.com/machinebus/machinebus/cmd/mcm-grpc-bridge/bridge"
)

// run serves until ctx ends and the replicas have drained.
func run(ctx context.Context, o *options) error {
	if err := o.complete(); err != nil {
		return err
	}
	log := o.replica.Logger
	stop, err := tracing.Start(ctx, "mcm-grpc-bridge", version, func(err error) { log.Error("spans not sent", "err", err) })
	if err != nil {
		return err
	}
	defer stop()
	options, err := o.grpc()
	if err != nil {
		return err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", o.listen)
	if err != nil {
		return fmt.Errorf("--grpc-listen: %w (another program may use the address: choose another)", err)
	}
	defer l.Close()
	server := bridge.New(bridge.Config{Replica: o.replica, Kinds: o.kinds})
	if o.replica.Listen != "" {
		end, err := serveHealth(ctx, o.replica.Listen, server.Gatherer(), server.Ready, log)
		if err != nil {
			return err
		}
		defer end()
	}
	log.Info("serving drivers", "address", l.Addr().String(), "tls", o.tls.Cert != "", "kinds", o.kinds.String())

	return server.Serve(ctx, l, options...)
}
