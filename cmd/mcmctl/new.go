package main

import (
	"cmp"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/machinebus/machinebus/cmd/mcmctl/newdriver"
)

// newNew is for what is not there yet.
func newNew() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "new",
		Short: "Write the code of a new driver",
		Args:  knownCommand,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newNewDriver())

	return cmd
}

func newNewDriver() *cobra.Command {
	var dir, module string
	cmd := &cobra.Command{
		Use:   "driver name",
		Short: "Write a Go module with a driver of a provider",
		Long: `Write a Go module with a driver of a provider.

The driver builds and passes the contract at once: it has a made-up cloud, and a fake of
that for its tests. Put your cloud's client in its place. The module also has a
MachineClass, a Secret and a Machine, a Dockerfile, the driver's Deployment and its user
in NATS. Its README.md says what to do next.

The name is what users write into a MachineClass's field provider.`,
		Example: `  mcmctl new driver acme
  mcmctl new driver acme --dir ~/src/driver-acme --module github.com/acme/driver-acme`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			name := args[0]
			to := cmp.Or(dir, "driver-"+name)
			driver := newdriver.Driver{Name: name, Module: cmp.Or(module, "example.com/driver-"+name)}
			if err := driver.Write(to); err != nil {
				return fmt.Errorf("write driver %s: %w", name, err)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "driver %s is in %s: its README.md says what to do next\n", name, to)

			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "`folder` to write it to, which must be missing, or empty but for .git; default driver-<name>")
	cmd.Flags().StringVar(&module, "module", "", "`path` of the Go module; default example.com/driver-<name>")
	mustComplete(cmd, "module", cobra.NoFileCompletions)

	return cmd
}
