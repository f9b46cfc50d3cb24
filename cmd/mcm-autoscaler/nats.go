package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/go-logr/logr"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// natsOptions say how to reach the drivers that serve node groups. The flags are
// mcm's.
type natsOptions struct {
	urls                 []string
	creds, ca, cert, key string
	allowInsecure        bool
	cluster              string
}

func (n *natsOptions) addFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&n.urls, "nats-url", nil,
		"NATS servers on which drivers serve node groups of their own clouds; none means that there are only MachineDeployments")
	fs.StringVar(&n.creds, "nats-creds", "", "credentials file for NATS")
	fs.StringVar(&n.ca, "nats-ca", "", "PEM file with the CA of NATS")
	fs.StringVar(&n.cert, "nats-cert", "", "PEM file with the client certificate for NATS")
	fs.StringVar(&n.key, "nats-key", "", "PEM file with the key of --nats-cert")
	fs.BoolVar(&n.allowInsecure, "nats-allow-insecure", false, "allow NATS beyond loopback without TLS or without authentication")
	fs.StringVar(&n.cluster, "cluster-name", "default", "name of the control plane on the bus, as in mcm's flag")
}

func (n *natsOptions) validate() error {
	if len(n.urls) == 0 && (n.creds != "" || n.ca != "" || n.cert != "" || n.key != "") {
		return errors.New("--nats-creds, --nats-ca, --nats-cert and --nats-key need --nats-url")
	}
	if err := bus.ValidToken("cluster", n.cluster); err != nil {
		return fmt.Errorf("--cluster-name: %w", err)
	}

	return nil
}

// connect joins the bus. The returned groups are nil without --nats-url; stop ends
// the connection. NATS may come later: its groups do then.
func (n *natsOptions) connect(ctx context.Context) (groups *autoscaler.Provided, stop func(), err error) {
	if len(n.urls) == 0 {
		return nil, func() {}, nil
	}
	log := slog.New(logr.ToSlogHandler(klog.Background().WithName("nats")))
	host, err := os.Hostname()
	if err != nil {
		return nil, nil, fmt.Errorf("this host's name: %w", err)
	}
	conn, err := bus.Connect(ctx, bus.Config{
		URLs: n.urls, Name: "mcm-autoscaler " + host, Creds: n.creds, CA: n.ca, Cert: n.cert, Key: n.key,
		AllowInsecure: n.allowInsecure, Logger: log,
	})
	if err != nil {
		return nil, nil, err
	}
	client, err := bus.NewNodeGroupClient(conn, n.cluster, log)
	if err != nil {
		conn.Close()

		return nil, nil, err
	}

	return autoscaler.NewProvided(dispatch.NewNodeGroups(client), nil), func() { client.Close(); conn.Close() }, nil
}
