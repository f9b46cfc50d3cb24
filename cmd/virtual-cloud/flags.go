package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/join"
)

// options holds the flags.
type options struct {
	listen       string
	apiToken     string
	apiTokenFile string
	identity     string
	logFile      string
	kubeconfig   string
	leasePeriod  time.Duration
	createEffect string
	faults       []string
	knobs        cloudapi.Knobs
}

func command() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "virtual-cloud",
		Short: "An HTTP cloud for development and tests",
		Long: `An HTTP cloud for development and tests, which runs until SIGTERM or SIGINT.

Once it serves, it prints one line on stdout: "listening " and its URL. Instances exist in memory only: a cloud
that is started again is empty. The knobs set by flags can be changed while it runs:

  curl -X PATCH $URL/v1/admin/knobs -d '{"createLatency": "2s", "quota": 10}'`,
		Example: `  virtual-cloud --listen 127.0.0.1:8080 --boot-delay 3s --log cloud.jsonl
  virtual-cloud --identity token --fault '{"operation": "create", "next": 1, "after": true, "drop": true}'
  virtual-cloud --join-kubeconfig .out/cluster/kubeconfig`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("unexpected argument %q; see %q", args[0], cmd.CommandPath()+" --help")
			}

			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return run(cmd.Context(), &o, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w; see %q", err, cmd.CommandPath()+" --help")
	})
	o.register(cmd)

	return cmd
}

func (o *options) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.listen, "listen", "127.0.0.1:0", "host and port to serve on; port 0 takes a free one")
	f.StringVar(&o.apiToken, "api-token", "", "bearer token that every call must carry; empty admits every call")
	f.StringVar(&o.apiTokenFile, "api-token-file", "", "file with that token, to keep it out of the process list")
	f.StringVar(&o.identity, "identity", string(cloudapi.IdentityNone),
		"how a repeated create is recognized: token, unique_name or none; a create may override it")
	f.StringVar(&o.logFile, "log", "", "file to append the log of all effects to, as JSON lines")
	f.StringVar(&o.kubeconfig, "join-kubeconfig", "", "kubeconfig of the cluster that instances join as Nodes; empty for none")
	f.DurationVar(&o.leasePeriod, "join-lease-period", join.DefaultPeriod, "how often a Node's Lease is renewed, give or take a tenth")

	k := &o.knobs
	f.DurationVar((*time.Duration)(&k.CreateLatency), "create-latency", 0, "how long a create takes")
	f.DurationVar((*time.Duration)(&k.DeleteLatency), "delete-latency", 0, "how long a delete takes")
	f.StringVar(&o.createEffect, "create-effect", string(cloudapi.EffectEnd),
		"when a create takes effect: at the start or at the end of its latency")
	f.DurationVar((*time.Duration)(&k.BootDelay), "boot-delay", 0, "how long a new instance is pending")
	f.DurationVar((*time.Duration)(&k.ListLag), "list-lag", 0, "how long a new instance is missing from lists")
	f.IntVar(&k.Quota, "quota", 0, "how many instances may exist; 0 for no limit")
	f.Float64Var(&k.RequestsPerSecond, "requests-per-second", 0, "how many calls are allowed per second; 0 for no limit")
	f.StringArrayVar(&k.Hold, "hold", nil, "pattern of names whose creates wait until released; may be repeated")
	f.StringArrayVar(&o.faults, "fault", nil, "rule for calls that fail, as JSON; may be repeated")
}

// complete parses flags and reads the token's file.
func (o *options) complete() error {
	o.knobs.CreateEffect = cloudapi.Effect(o.createEffect)
	for _, text := range o.faults {
		var fault cloudapi.Fault
		decoder := json.NewDecoder(strings.NewReader(text))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&fault); err != nil {
			return fmt.Errorf(`--fault %s: %w; write one such as {"operation": "create", "next": 1, "status": 500}`, text, err)
		}
		o.knobs.Faults = append(o.knobs.Faults, fault)
	}
	if o.apiTokenFile == "" {
		return nil
	}
	if o.apiToken != "" {
		return fmt.Errorf("--api-token and --api-token-file cannot be combined; give one")
	}
	data, err := os.ReadFile(o.apiTokenFile)
	if err != nil {
		return fmt.Errorf("--api-token-file: %w", err)
	}
	if o.apiToken = strings.TrimSpace(string(data)); o.apiToken == "" {
		return fmt.Errorf("--api-token-file: %s is empty; write the token into it", o.apiTokenFile)
	}

	return nil
}
