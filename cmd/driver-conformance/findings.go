package main

import (
	"fmt"
	"io"

	"github.com/machinebus/machinebus/driversdk/drivertest"
)

// findingLines writes findings as they come. Clauses in a row that do not bind the driver for one reason share a line: there
// are thirty on node groups alone.
type findingLines struct {
	to      io.Writer
	unbound []drivertest.Finding // not written yet
}

func (l *findingLines) add(f drivertest.Finding) {
	if len(l.unbound) > 0 && (!f.Unbound || f.Detail != l.unbound[0].Detail) {
		l.flush()
	}
	if f.Unbound {
		l.unbound = append(l.unbound, f)

		return
	}
	fmt.Fprintln(l.to, f)
}

// flush writes what is left.
func (l *findingLines) flush() {
	switch n := len(l.unbound); n {
	case 0:
	case 1:
		fmt.Fprintln(l.to, l.unbound[0])
	default:
		first, last := l.unbound[0], l.unbound[n-1]
		fmt.Fprintf(l.to, "%-6s  %s to %s (%d clauses): %s\n", first.Verdict, first.ID, last.ID, n, first.Detail)
	}
	l.unbound = nil
}
