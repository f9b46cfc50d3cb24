// Command demo is behind make demo, make up and make down: it brings machinebus
// up from the built programs and tells what it does.
//
// "demo run" plays the whole story once and cleans up; it fails when the story
// does not go as told. "demo up" leaves the same set-up running, "demo down" ends
// that. Everything it writes is below .out/run of the clone that the program was
// built in.
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

// errInterrupted is the cause of a context that a signal ended.
var errInterrupted = errors.New("interrupted")

func main() {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals
		signal.Stop(signals) // a second one ends us at once, and our children with us
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
		Short: "machinebus from the built programs, for a look and for play",
		Long: `machinebus from the built programs, for a look and for play.

DEMO_KUBECONFIG names the kubeconfig of an existing cluster to use instead of a
fresh one; the demo then works in a namespace of its own there, and needs to be
an administrator. KUBECONFIG is not looked at.`,
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
	add("run", "Play the whole story once and clean up", run)
	add("up", "Bring the set-up up and leave it running", up)
	add("down", "End what up left running", down)
	return root
}
