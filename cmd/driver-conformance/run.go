package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/cmd/internal/natsflags"
	"github.com/machinebus/machinebus/driversdk/drivertest"
)

// errBroken: the report says what is wrong.
var errBroken = errors.New("the driver breaks the contract")

const help = `Check a driver against the contract of machinebus, clause by clause.

What comes after -- is the driver's command line. It is started with this program's
environment, in which NATS_URL, CLUSTER, PROVIDER and CONTROL_PLANE_KEY (what seals are
opened with) are set, stopped by SIGTERM, for which it has a minute, and started again
by the checks that are about that, and killed at the end:

  driver-conformance --provider virtual --class class.yaml --secret secret.yaml \
      -- ./driver-virtual --drain-timeout 5s

Without a command, start the driver yourself, one replica, within --wait. Without
--nats-url and NATS_URL in the environment a NATS server with JetStream runs inside this
program: on a free port when it starts the driver, else on 127.0.0.1:4222.

The suite plays the manager. It makes and removes instances, raises the epoch that
the driver remembers, replaces its claims and deletes the operations stream: give it a
NATS and a cloud account of its own, and never those that a real mcm is on.

No node group is touched but those that are named. One that may grow by two, and must
keep at least one instance, lets all clauses be checked.

Class and secrets are files with a MachineClass and Secrets, as for kubectl apply.

Each clause has a line of the report: pass, FAIL, skip, or mcm if it binds the manager
alone. A pass says that nothing wrong was seen. A clause is skipped when it does not bind
the driver, or when it does and could not be looked at; the end of the report lists
both, with the reasons. Those of the second kind count as broken with --strict. What they
lack is often a flag: --other-cluster, --node-group, --other-node-group, the command
line after --, a secret. RESULT-3, STATUS-3, FENCE-3 and IDENTITY-1 take a look into
the driver's cloud. No flag lends that: a Go test does, by driversdk/drivertest
(Config.Cloud), and here --may-skip has --strict let them pass.

Exit code 0: no clause is broken; 1: some are, or instances were left; 2: the driver
could not be checked, or not to the end. That is so when a flag or a file makes no sense,
when no driver comes, when it ends by itself, after an interrupt, and when the report
cannot be written.`

// options are the flags.
type options struct {
	nats      bus.Config
	url       string
	class     string
	secrets   []string
	bootstrap map[string]string
	junit     string
	list      bool
	config    drivertest.Config
}

func newCommand() *cobra.Command {
	o := &options{}
	cmd := &cobra.Command{
		Use:   "driver-conformance --provider <name> --class <file> [--secret <file>]... [-- <driver> [<argument>]...]",
		Short: "Check a driver against the contract of machinebus",
		Long:  help,
		Args: func(cmd *cobra.Command, args []string) error {
			if cmd.ArgsLenAtDash() > 0 || cmd.ArgsLenAtDash() < 0 && len(args) > 0 {
				return fmt.Errorf("unexpected argument %q: the driver's command line comes after --", args[0])
			}

			return nil
		},
		SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.list {
				return listClauses(cmd.OutOrStdout())
			}

			return o.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), args)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.config.Provider, "provider", "", "`name` that the driver serves (default: that of the class)")
	f.StringVar(&o.class, "class", "", "YAML `file` with the MachineClass to make instances of")
	f.StringArrayVar(&o.secrets, "secret", nil, "YAML `file` with Secrets that the class refers to; may be given several times")
	f.StringToStringVar(&o.bootstrap, "bootstrap", nil,
		"what replaces `placeholders` of user data, such as '<<BOOTSTRAP_TOKEN>>=abcdef.0123456789abcdef'")
	f.StringVar(&o.config.Cluster, "cluster", "default", "`name` of the control plane to play")
	f.StringVar(&o.config.OtherCluster, "other-cluster", "", "`name` of a second control plane that the driver serves, to see that it keeps them apart")
	f.StringVar(&o.config.NodeGroup, "node-group", "",
		"`id` of a node group of the driver's cloud, for a driver that serves them: it is resized, and has its size again at the end")
	f.StringVar(&o.config.OtherNodeGroup, "other-node-group", "",
		"`id` of a second one, to see that the driver keeps them apart; resized only if it has no instance")
	f.StringVar(&o.url, "nats-url", "", "`URLs` of the NATS servers, with commas; none means NATS_URL of the environment, and without that a server in this program")
	natsflags.Add(f, &o.nats) // whose user needs the rights of mcm
	f.DurationVar(&o.config.Timeout, "timeout", time.Minute, "how long one operation may take")
	f.DurationVar(&o.config.Wait, "wait", 30*time.Second, "how long to wait for the driver to come to the bus")
	f.IntVar(&o.config.Repeat, "repeat", 3, "how often what has to be idempotent is repeated")
	f.StringSliceVar(&o.config.Only, "only", nil, "`ids` of the clauses to check, with commas; none means all")
	f.BoolVar(&o.config.Strict, "strict", false, "a clause that binds the driver, and could not be looked at, counts as broken")
	f.StringSliceVar(&o.config.MaySkip, "may-skip", nil,
		"`ids` of clauses, with commas, that --strict lets pass although they bind the driver and could not be looked at")
	f.StringVar(&o.junit, "junit", "", "`file` to write the report to in JUnit's format as well")
	f.BoolVar(&o.list, "list", false, "list the clauses and end; needs no other flag")

	return cmd
}

func listClauses(w io.Writer) error {
	for _, c := range drivertest.Clauses() {
		note := ""
		if c.Manager {
			note = " (binds mcm)"
		}
		if _, err := fmt.Fprintf(w, "%-14s  %s%s\n", c.ID, c.Says, note); err != nil {
			return err
		}
	}

	return nil
}

func (o *options) run(ctx context.Context, out, errOut io.Writer, command []string) error {
	if err := o.read(); err != nil {
		return err
	}
	if o.url == "" {
		o.url = os.Getenv("NATS_URL")
	}
	level := slog.LevelError
	o.config.Logger = slog.New(slog.NewTextHandler(errOut, &slog.HandlerOptions{Level: level}))
	stop, err := o.serveNATS(len(command) > 0, errOut)
	if err != nil {
		return err
	}
	defer stop()
	o.nats.URLs = []string{o.url}
	o.config.NATS = o.nats
	if len(command) > 0 {
		environment, err := o.environment()
		if err != nil {
			return err
		}
		driver := newDriver(command, environment, errOut)
		var cancel context.CancelFunc
		ctx, cancel = driver.watch(ctx)
		defer cancel()
		if err := driver.start(); err != nil {
			return err
		}
		defer driver.kill()
		o.config.Process = driver
	}
	report, err := drivertest.Check(ctx, o.config, func(f drivertest.Finding) { fmt.Fprintln(out, f) })
	if report == nil {
		return err
	}
	err = errors.Join(err, report.WriteSummary(out), o.writeJUnit(report))
	if err == nil && !report.OK() {
		err = errBroken
	}

	return err
}

// environment tells a driver which control plane it is to serve, and where.
func (o *options) environment() ([]string, error) {
	var err error
	if o.config.Key, err = bus.NewSealKey(); err != nil {
		return nil, err
	}
	cluster := o.config.Cluster
	if cluster == "" {
		cluster = "default"
	}

	return []string{
		"NATS_URL=" + o.url, "CLUSTER=" + cluster, "PROVIDER=" + o.config.Provider, "CONTROL_PLANE_KEY=" + o.config.Key.Public(),
	}, nil
}

// serveNATS runs a server here when no other one is named.
func (o *options) serveNATS(private bool, errOut io.Writer) (stop func(), err error) {
	if o.url != "" {
		return func() {}, nil
	}
	listen := "127.0.0.1:4222"
	if private {
		listen = "127.0.0.1:0"
	}
	srv, err := embedded.Start(embedded.Options{Listen: listen, Logger: o.config.Logger})
	if err != nil {
		return nil, err
	}
	o.url = srv.URL()
	if !private {
		fmt.Fprintf(errOut, "waiting %s for a driver of provider %s on %s\n", o.config.Wait, o.config.Provider, o.url)
	}

	return srv.Stop, nil
}

func (o *options) read() error {
	if o.class == "" {
		return errors.New("no class: give --class a file with the MachineClass to make instances of")
	}
	class, provider, err := readClass(o.class)
	if err != nil {
		return err
	}
	o.config.Class = class
	if o.config.Provider == "" {
		o.config.Provider = provider
	}
	if o.config.Provider == "" {
		return errors.New("no provider: neither --provider nor the class names one")
	}
	if provider != "" && provider != o.config.Provider {
		return fmt.Errorf("the class in %s is of provider %s, not %s", o.class, provider, o.config.Provider)
	}
	for _, file := range o.secrets {
		secrets, err := readSecrets(file)
		if err != nil {
			return err
		}
		o.config.Secrets = slices.Concat(o.config.Secrets, secrets)
	}
	o.config.Bootstrap = o.bootstrap

	return nil
}

func (o *options) writeJUnit(report *drivertest.Report) error {
	if o.junit == "" {
		return nil
	}
	var text strings.Builder
	if err := report.WriteJUnit(&text); err != nil {
		return err
	}

	return os.WriteFile(o.junit, []byte(text.String()), 0o600)
}
