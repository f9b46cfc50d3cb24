package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
)

func newRoot() *cobra.Command {
	conn := &connection{}
	root := &cobra.Command{
		Use:   "mcmctl",
		Short: "See what happens on the bus, and steer rollouts",
		Long: `See the driver replicas, operations and messages on the bus, and steer rollouts.

mcmctl talks to NATS and works while mcm is down, too. It listens, asks drivers for
their figures and mcm for outcomes, and changes nothing on the bus, so that it is safe
to run against production; migrate asks a driver to convert a class. Rollout reads and changes machine deployments in the control cluster.`,
		Example: `  mcmctl drivers                                    # which driver replicas live
  mcmctl ops --watch                                # what they are doing
  mcmctl sub 'driver.*.create.>'                    # every create that mcm asks for
  mcmctl rollout status pool-a                      # follow a rollout to its end
  nats sub 'mcm.v1.>' --translate 'mcmctl decode'   # the same with the nats CLI
  mcmctl migrate --provider aws -f old.yaml         # an old class as a MachineClass`,
		Version:                    version(),
		Args:                       knownCommand,
		SilenceErrors:              true,
		SilenceUsage:               true,
		SuggestionsMinimumDistance: 2,
		RunE:                       func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetVersionTemplate("mcmctl {{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w (see: %s --help)", err, cmd.CommandPath())
	})
	conn.addFlags(root)
	root.AddCommand(newDrivers(conn), newOps(conn), newSub(conn), newDecode(), newMigrate(conn), newRollout(), newCompletion(), newVersion())

	return root
}

// knownCommand turns what is no command into an error of one line.
func knownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		return fmt.Errorf("unknown command %q: did you mean %s?", args[0], strings.Join(near, " or "))
	}

	return fmt.Errorf("unknown command %q (see: %s --help)", args[0], cmd.CommandPath())
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:               "version",
		Short:             "Print the version of mcmctl",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		Run: func(cmd *cobra.Command, _ []string) {
			fmt.Fprintln(cmd.OutOrStdout(), "mcmctl", version())
		},
	}
}

// version is what the Go linker knows: a module version for `go install`, one
// made of the commit for a build in a clone, (devel) without version control.
func version() string {
	v := "(devel)"
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		v = info.Main.Version
	}

	return fmt.Sprintf("%s %s %s/%s", v, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
