// Command demo implements make demo, make up and make down: it starts machinebus from
// the built programs and prints what it does.
//
// "demo run" plays the demo once and cleans up. It fails if something goes otherwise
// than expected. "demo up" leaves the same set-up running, and "demo down" ends it. All
// files are written below .out/run of the clone that the program was built in.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

// exitInterrupted is what shells report for a program ended by Ctrl-C.
const exitInterrupted = 130

// errInterrupted is the cause of a context that a signal canceled.
var errInterrupted = errors.New("interrupted")

func main() {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals
		signal.Stop(signals) // a second one kills the demo and its children
		cancel(errInterrupted)
	}()
	err := newRoot().ExecuteContext(ctx)
	switch {
	case err == nil:
	case errors.Is(context.Cause(ctx), errInterrupted):
		fmt.Fprintln(os.Stderr, "demo: interrupted")
		os.Exit(exitInterrupted)
	default:
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "demo",
		Short: "Start machinebus from the built programs, to see and try it out",
		Long: `Start machinebus from the built programs, to see and try it out.

Set DEMO_KUBECONFIG to the kubeconfig of an existing cluster to use that instead of
a new one. The demo then works in a namespace of its own there, and needs an
administrator's rights. KUBECONFIG is ignored.`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w (see: %s --help)", err, cmd.CommandPath())
	})
	add := func(name, short string, f func(context.Context, *narrator, paths) error) {
		root.AddCommand(&cobra.Command{
			Use: name, Short: short, Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				p, err := findPaths()
				if err != nil {
					return err
				}
				return f(cmd.Context(), newNarrator(os.Stdout), p)
			},
		})
	}
	add("run", "Play the demo once and clean up", run)
	add("up", "Start the demo's set-up and leave it running", up)
	add("down", "End the set-up that up started", down)
	return root
}
