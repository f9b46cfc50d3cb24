package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/go-logr/logr"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/cmd/internal/natsflags"
	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// natsOptions holds the flags for the bus, on which drivers serve node groups. They are
// named as in mcm.
type natsOptions struct {
	config  bus.Config
	cluster string
}

func (n *natsOptions) addFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&n.config.URLs, "nats-url", nil,
		"NATS servers on which drivers serve node groups of their own clouds (env NATS_URL); without, only MachineDeployments are served")
	natsflags.Add(fs, &n.config)
	fs.StringVar(&n.cluster, "cluster-name", "default", "name of the control plane on the bus; the same as mcm's flag")
}

// complete reads the URL from the environment, as it may hold a password that a list of
// processes must not show.
func (n *natsOptions) complete() {
	if v := os.Getenv("NATS_URL"); v != "" && len(n.config.URLs) == 0 {
		n.config.URLs = strings.Split(v, ",")
	}
}

func (n *natsOptions) validate() error {
	c := &n.config
	if len(c.URLs) == 0 && (c.Creds != "" || c.CA != "" || c.Cert != "" || c.Key != "") {
		return errors.New("--nats-creds, --nats-ca, --nats-cert and --nats-key need --nats-url")
	}
	if err := bus.ValidToken("cluster", n.cluster); err != nil {
		return fmt.Errorf("--cluster-name: %w", err)
	}

	return nil
}

// connect joins the bus. It returns nil groups without --nats-url. It does not wait for
// NATS; the groups appear once NATS can be reached. stop ends the connection.
func (n *natsOptions) connect(ctx context.Context) (groups *autoscaler.Provided, stop func(), err error) {
	if len(n.config.URLs) == 0 {
		return nil, func() {}, nil
	}
	log := slog.New(logr.ToSlogHandler(klog.Background().WithName("nats")))
	host, err := os.Hostname()
	if err != nil {
		return nil, nil, fmt.Errorf("look up the name of this host: %w", err)
	}
	cfg := n.config
	cfg.Name, cfg.Logger = "mcm-autoscaler "+host, log
	conn, err := bus.Connect(ctx, cfg)
	if err != nil {
		return nil, nil, err
	}
	// By this name it hears the answers to gateways, and needs to be allowed no others.
	client, err := caller.New(conn, caller.Config{Cluster: n.cluster, Name: "autoscaler", Logger: log})
	if err != nil {
		conn.Close()

		return nil, nil, err
	}

	return autoscaler.NewProvided(dispatch.NewNodeGroups(client, klog.Background()), nil), func() { client.Close(); conn.Close() }, nil
}
