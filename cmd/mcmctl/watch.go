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

// redrawEvery bounds what a terminal has to draw, however busy the bus is.
const redrawEvery = time.Second

// repeat prints the view every second until Ctrl-C: over itself on a terminal,
// one after the other elsewhere.
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
				state = "not connected to NATS; trying again"
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
				fmt.Fprintln(&screen, err) // what is not there now may come
			}
			if _, err := out.Write(screen.Bytes()); err != nil {
				return fmt.Errorf("write output: %w", err)
			}
			_ = ask() // without a connection; the title says so
		}
	}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)

	return ok && term.IsTerminal(int(f.Fd()))
}
