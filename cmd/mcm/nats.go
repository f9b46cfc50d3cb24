package main

import (
	"context"
	"log/slog"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
)

// connect joins the bus: an external NATS, or an embedded one that it starts.
// The returned stop ends both.
func (n *natsOptions) connect(ctx context.Context) (conn *bus.Conn, streams *caller.StreamConfig, stop func(), err error) {
	streams = &caller.StreamConfig{Replicas: n.streamReplicas, Memory: n.streamStorage == storageMemory}
	log := slog.New(logr.ToSlogHandler(klog.Background().WithName("nats")))
	cfg := n.config
	cfg.Name, cfg.InboxPrefix, cfg.Logger = "mcm "+identity(), bus.ManagerInboxPrefix, log
	stopServer := func() {}
	if len(n.config.URLs) == 0 {
		running, quit := context.WithCancel(ctx)
		server, err := embedded.Start(embedded.Options{
			Listen: n.listen, StoreDir: n.storeDir, ConfigFile: n.configFile, MonitorPort: n.monitorPort,
			AllowInsecure: n.config.AllowInsecure, Logger: log, Quit: running.Done(),
		})
		if err != nil {
			quit()

			return nil, nil, nil, err
		}
		streams.Memory = streams.Memory || server.InMemory()
		klog.Background().Info("embedded NATS accepts drivers", "url", server.URL(), "streams_in_memory", streams.Memory)
		cfg.InProcess, cfg.FailFast, stopServer = server, true, func() { quit(); server.Stop() }
		streams.Stuck = server.Mend
	}
	if conn, err = bus.Connect(ctx, cfg); err != nil {
		stopServer()

		return nil, nil, nil, err
	}

	return conn, streams, func() { conn.Close(); stopServer() }, nil
}
