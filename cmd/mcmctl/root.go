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
		Short: "Show what happens on the bus, manage rollouts, and begin a driver",
		Long: `Show the driver replicas, operations and messages on the bus, manage rollouts, and write
the code of a new driver.

mcmctl talks to NATS and also works while mcm is down. It listens, and asks drivers
for figures, mcm for outcomes, and with migrate a driver to convert a class. It changes
nothing on the bus, so it is safe to run against production. Only rollout and
"migrate --apply" change objects in the control cluster.`,
		Example: `  mcmctl drivers                                    # list the driver replicas
  mcmctl ops --watch                                # what they are doing
  mcmctl sub 'driver.*.create.>'                    # every create that mcm requests
  mcmctl rollout status pool-a                      # follow a rollout to its end
  nats sub 'mcm.v1.>' --translate 'mcmctl decode'   # the same with the nats CLI
  mcmctl migrate --provider aws -f old.yaml         # an old class as a MachineClass
  mcmctl new driver acme                            # a Go module for a driver of your own`,
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
	root.AddCommand(newDrivers(conn), newOps(conn), newSub(conn), newDecode(), newMigrate(conn), newNew(), newRollout(), newCompletion(), newVersion())

	return root
}

// knownCommand returns a one-line error for an unknown command.
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

// version returns the version that the Go linker recorded: one made of the tag or commit
// of the clone, else (devel).
func version() string {
	v := "(devel)"
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		v = info.Main.Version
	}

	return fmt.Sprintf("%s %s %s/%s", v, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
