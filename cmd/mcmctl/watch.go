package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/machinebus/machinebus/bus"
)

// redrawEvery limits how often a terminal is redrawn on a busy bus.
const redrawEvery = time.Second

// repeat prints the view every second until Ctrl-C. On a terminal it overwrites the
// one before.
func (c *connection) repeat(cmd *cobra.Command, conn *bus.Conn, heard *fleet, ask func() error, draw view) error {
	ctx, stop := untilInterrupted(cmd)
	defer stop()
	out := cmd.OutOrStdout()
	erase, title := "", func(time.Time) string { return "" }
	if isTerminal(out) {
		erase = "\x1b[H\x1b[2J"
		title = func(now time.Time) string {
			state := conn.URL()
			if !conn.Up() {
				state = "not connected to NATS; retrying"
			}

			return fmt.Sprintf("%s  %s  %s  (Ctrl-C ends)\n\n", cmd.CommandPath(), now.Format(time.TimeOnly), state)
		}
	}
	tick := time.NewTicker(redrawEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-tick.C:
			var screen bytes.Buffer
			screen.WriteString(erase + title(now))
			if err := draw(&screen, heard.picture(now), now); err != nil {
				fmt.Fprintln(&screen, err) // it may exist a second later
			}
			if _, err := out.Write(screen.Bytes()); err != nil {
				return fmt.Errorf("write output: %w", err)
			}
			_ = ask() // fails without a connection, which the title shows
		}
	}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)

	return ok && term.IsTerminal(int(f.Fd()))
}
