package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// A narrator prints what happens, with the seconds since the start.
type narrator struct {
	out      io.Writer
	terminal bool
	start    time.Time
	step     int
	steps    int
}

func newNarrator(out *os.File) *narrator {
	info, err := out.Stat()
	return &narrator{
		out: out, start: time.Now(),
		terminal: err == nil && info.Mode()&os.ModeCharDevice != 0 && os.Getenv("TERM") != "dumb",
	}
}

// beginf prints the title of the next step.
func (n *narrator) beginf(format string, args ...any) {
	n.step++
	fmt.Fprintf(n.out, "\n[%5.1fs] %d/%d %s\n", n.elapsed(), n.step, n.steps, fmt.Sprintf(format, args...))
}

// detailf prints a line below the step's title.
func (n *narrator) detailf(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	fmt.Fprintf(n.out, "[%5.1fs]     %s\n", n.elapsed(), strings.ReplaceAll(text, "\n", "\n             "))
}

// plainf prints lines without the time.
func (n *narrator) plainf(format string, args ...any) { fmt.Fprintf(n.out, format+"\n", args...) }

func (n *narrator) elapsed() float64 { return time.Since(n.start).Seconds() }
