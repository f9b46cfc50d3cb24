package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/machinebus/machinebus/cmd/mcmctl/message"
)

// The output formats.
const (
	formatTable = "table"
	formatWide  = "wide"
	formatJSON  = "json"
)

// A format is the value of --output.
type format struct {
	value   string
	allowed []string
}

func addFormat(cmd *cobra.Command, allowed ...string) *format {
	f := &format{value: allowed[0], allowed: allowed}
	cmd.Flags().VarP(f, "output", "o", "output `format`: "+strings.Join(allowed, ", "))
	mustComplete(cmd, "output", cobra.FixedCompletions(allowed, cobra.ShellCompDirectiveNoFileComp))

	return f
}

func (f *format) String() string { return f.value }

// Type names the value in the usage text; the flag's back-quoted word wins.
func (f *format) Type() string { return "format" }

func (f *format) Set(v string) error {
	if !slices.Contains(f.allowed, v) {
		return fmt.Errorf("want one of %s", strings.Join(f.allowed, ", "))
	}
	f.value = v

	return nil
}

// mustComplete panics for a flag that does not exist, which any test shows.
func mustComplete(cmd *cobra.Command, flag string, f cobra.CompletionFunc) {
	if err := cmd.RegisterFlagCompletionFunc(flag, f); err != nil {
		panic(err) //nolint:forbidigo // a mistyped flag name in this program
	}
}

// printTable writes rows below a header, in columns.
func printTable(w io.Writer, header []string, rows [][]string) error {
	const padding = 3
	t := tabwriter.NewWriter(w, 0, 0, padding, ' ', 0)
	fmt.Fprintln(t, strings.Join(header, "\t"))
	for _, row := range rows {
		for i, text := range row {
			row[i] = cell(text)
		}
		fmt.Fprintln(t, strings.Join(row, "\t"))
	}

	return t.Flush()
}

// cell makes text from the bus fit a table and a terminal.
func cell(text string) string {
	if text == "" {
		return "-"
	}

	return message.Printable(text)
}

// age formats a duration with about two digits.
func age(d time.Duration) string {
	const day = 24 * time.Hour
	switch d = max(d, 0); {
	case d < 10*time.Second:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 2*day:
		return fmt.Sprintf("%dh", int(d.Hours()))
	default:
		return fmt.Sprintf("%dd", int(d/day))
	}
}
