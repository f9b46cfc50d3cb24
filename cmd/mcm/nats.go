package main

import (
	"context"
	"log/slog"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/embedded"
)

// connect joins the bus: an external NATS, or an embedded one that it starts.
// The returned stop ends both.
func (n *natsOptions) connect(ctx context.Context) (conn *bus.Conn, stop func(), err error) {
	log := slog.New(logr.ToSlogHandler(klog.Background().WithName("nats")))
	cfg := n.config
	cfg.Name, cfg.InboxPrefix, cfg.Logger = "mcm "+identity(), bus.ManagerInboxPrefix, log
	stopServer := func() {}
	if len(n.config.URLs) == 0 {
		server, err := embedded.Start(embedded.Options{
			Listen: n.listen, StoreDir: n.storeDir, ConfigFile: n.configFile, MonitorPort: n.monitorPort,
			AllowInsecure: n.config.AllowInsecure, Logger: log, Quit: ctx.Done(),
		})
		if err != nil {
			return nil, nil, err
		}
		klog.Background().Info("embedded NATS takes drivers", "url", server.URL(), "jetstream", n.storeDir != "")
		cfg.InProcess, cfg.FailFast, stopServer = server, true, server.Stop
	}
	if conn, err = bus.Connect(ctx, cfg); err != nil {
		stopServer()

		return nil, nil, err
	}

	return conn, func() { conn.Close(); stopServer() }, nil
}

// stream says how operations streams are made, nil that none are.
func (n *natsOptions) stream() *bus.StreamConfig {
	if n.streamStorage == storageNone {
		return nil
	}

	return &bus.StreamConfig{Replicas: n.streamReplicas, Memory: n.streamStorage == storageMemory}
}
