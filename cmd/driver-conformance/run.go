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

// errBroken is not printed: the report shows what is wrong.
var errBroken = errors.New("the driver breaks the contract")

const help = `Check a driver against the contract of machinebus, clause by clause.

The arguments after -- are the driver's command line. The driver gets this program's
environment, and in it NATS_URL, CLUSTER, PROVIDER and CONTROL_PLANE_KEY, the public key
for opening seals. Checks of restarts stop it with SIGTERM, for which it has a minute,
and start it again. At the end it is killed. Its output goes to --driver-log.

  driver-conformance --provider virtual --class class.yaml --secret secret.yaml \
      -- ./driver-virtual --drain-timeout 5s

Without a command, start one replica of the driver yourself within --wait. Without
--nats-url and the variable NATS_URL this program runs a NATS server with JetStream: on a
free port if it starts the driver, else on 127.0.0.1:4222.

The suite plays the manager. It creates and deletes instances, raises the driver's epoch,
replaces its claims and deletes the operations stream. Use a NATS and a cloud account of
its own, never those of a real mcm.

Only the node groups of --node-group and --other-node-group are changed. To check all
clauses, use one that may grow by two and must keep at least one instance.

Class and secrets are files with a MachineClass and Secrets, as for kubectl apply.

The report has a line for each clause: pass, FAIL, except, skip, or mcm if it binds only
the manager. A pass means that no violation was seen. A clause is skipped if it does not
bind the driver, or if it does but could not be checked. Clauses in a row that do not bind
it for one reason share a line. The end of the report lists both kinds with the reasons.
The latter count as broken with --strict. Often they only need a flag: --other-cluster,
--node-group, --other-node-group, --secret, or the command line after --.

RESULT-3, STATUS-3, FENCE-3 and IDENTITY-1 need access to the driver's cloud, which only a
Go test can give (Config.Cloud of driversdk/drivertest); exclude them from --strict with
--may-skip.

Some drivers cannot keep a clause, such as one whose cloud has no tags. List those clauses
in a file for --except, each with the reason and what it costs the operator:

  - clause: CREATE-2
    why: the cloud has no tags, so an instance does not show whose it is
    cost: two clusters must not use the same machine names

Such a clause is reported as except, with both texts, and does not count as broken. A check
that does not end, a driver that answers no more and an instance that stays are no
exceptions. If the clause passes all the same, the report says that the exception is not
needed.

The outcome of a create may stay unknown. At the end of the check, instances that come
within --late-instance are deleted. The report then says what to look for in the cloud.

Exit codes:
  0  no clause is broken, but for exceptions
  1  some clauses are broken, or instances were left
  2  the driver could not be checked completely: a flag or file is invalid, no driver
     came, it refuses the class or its cloud the credentials, it exited, the check was
     interrupted, or the report could not be written`

// options holds the flags.
type options struct {
	nats      bus.Config
	url       string
	class     string
	secrets   []string
	bootstrap map[string]string
	except    string
	driverLog string
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
				return fmt.Errorf("unexpected argument %q: put the driver's command line after --", args[0])
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
	f.StringVar(&o.class, "class", "", "YAML `file` with the MachineClass of the instances to create")
	f.StringArrayVar(&o.secrets, "secret", nil, "YAML `file` with Secrets that the class refers to; may be repeated")
	f.StringToStringVar(&o.bootstrap, "bootstrap", nil,
		"values for `placeholders` of user data, such as '<<BOOTSTRAP_TOKEN>>=abcdef.0123456789abcdef'")
	f.StringVar(&o.config.Cluster, "cluster", "default", "`name` of the control plane to play")
	f.StringVar(&o.config.OtherCluster, "other-cluster", "",
		"`name` of a second control plane that the driver serves, to check that it separates them")
	f.StringVar(&o.config.NodeGroup, "node-group", "",
		"`id` of a node group of the driver's cloud, for a driver that serves them; it is resized and gets its size back at the end")
	f.StringVar(&o.config.OtherNodeGroup, "other-node-group", "",
		"`id` of a second node group, to check that the driver separates them; resized only if it has no instance")
	f.StringVar(&o.url, "nats-url", "", "`URLs` of the NATS servers, separated by commas (env NATS_URL); without, this program runs a server")
	natsflags.Add(f, &o.nats) // the user needs the permissions of mcm
	f.DurationVar(&o.config.Timeout, "timeout", time.Minute, "how long one operation may take")
	f.DurationVar(&o.config.Wait, "wait", 30*time.Second, "how long to wait for the driver to connect to the bus")
	f.DurationVar(&o.config.LateInstance, "late-instance", 5*time.Second,
		"how long an instance may come after its create was cut off; the check waits for it at the end")
	f.IntVar(&o.config.Repeat, "repeat", 3, "how often idempotent operations are repeated")
	f.StringSliceVar(&o.config.Only, "only", nil, "`ids` of the clauses to check, separated by commas; default all")
	f.BoolVar(&o.config.Strict, "strict", false, "count a clause as broken that binds the driver but could not be checked")
	f.StringSliceVar(&o.config.MaySkip, "may-skip", nil,
		"`ids` of clauses, separated by commas, that --strict does not count as broken if they could not be checked")
	f.StringVar(&o.except, "except", "", "YAML `file` with exceptions: clauses that the driver cannot keep")
	f.StringVar(&o.driverLog, "driver-log", "", "`file` for the output of the driver that this program starts; default standard error")
	f.StringVar(&o.junit, "junit", "", "`file` for a second report in JUnit format")
	f.BoolVar(&o.list, "list", false, "list the clauses and exit; needs no other flag")

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
	if o.driverLog != "" && len(command) == 0 {
		return errors.New("--driver-log needs the driver's command line after --: this program has only the output of a driver that it starts")
	}
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
		output, err := o.driverOutput(errOut)
		if err != nil {
			return err
		}
		defer output.Close()
		driver := newDriver(command, environment, output)
		var cancel context.CancelFunc
		ctx, cancel = driver.watch(ctx)
		defer cancel()
		if err := driver.start(); err != nil {
			return err
		}
		defer driver.kill()
		o.config.Process = driver
	}
	lines := &findingLines{to: out}
	report, err := drivertest.Check(ctx, o.config, lines.add)
	if report == nil {
		return err
	}
	lines.flush()
	err = errors.Join(err, report.WriteSummary(out), o.writeJUnit(report))
	if err == nil && !report.OK() {
		err = errBroken
	}

	return err
}

// environment returns the driver's variables: NATS and the control plane to serve.
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

// driverOutput returns where the driver's output goes.
func (o *options) driverOutput(errOut io.Writer) (io.WriteCloser, error) {
	if o.driverLog == "" {
		return nopCloser{errOut}, nil
	}

	return os.OpenFile(o.driverLog, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

// serveNATS runs a NATS server in this process unless a URL is set.
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
		return errors.New("--class is missing: set it to a file with the MachineClass of the instances to create")
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
		return errors.New("no provider: set --provider, or provider in the class")
	}
	if provider != "" && provider != o.config.Provider {
		return fmt.Errorf("the class in %s has provider %s, but --provider is %s", o.class, provider, o.config.Provider)
	}
	for _, file := range o.secrets {
		secrets, err := readSecrets(file)
		if err != nil {
			return err
		}
		o.config.Secrets = slices.Concat(o.config.Secrets, secrets)
	}
	o.config.Bootstrap = o.bootstrap
	if o.except != "" {
		o.config.Except, err = readExceptions(o.except)
	}

	return err
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
