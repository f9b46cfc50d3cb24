package main

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// A report prints a table for each benchmark, and a line for each figure with a target.
type report struct{ out io.Writer }

// machine prints on which machine the figures were measured, and its load.
func (r report) machine() {
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		load = []byte("unknown")
	}
	fmt.Fprintf(r.out, "commit %s, %s, %s/%s, %d CPUs (%s), %s of memory, load before the start: %s\n", commit(),
		runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), cpuModel(), memory(), strings.TrimSpace(string(load)))
}

// commit returns the commit of this program, and whether it was modified.
func commit() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	revision, changed := "unknown", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value[:min(len(s.Value), 12)]
		case s.Key == "vcs.modified" && s.Value == "true":
			changed = " with changes"
		}
	}
	return revision + changed
}

// cpuModel is the CPU's name in proc_cpuinfo(5).
func cpuModel() string {
	content, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "unknown model"
	}
	for line := range strings.Lines(string(content)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown model"
}

// memory is the first line of proc_meminfo(5), "MemTotal: 1234 kB".
func memory() string {
	content, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return "unknown size"
	}
	var kB int64
	if _, err := fmt.Sscanf(string(content), "MemTotal: %d kB", &kB); err != nil {
		return "unknown size"
	}
	return fmt.Sprintf("%.1f GiB", float64(kB)/(1<<20))
}

func (r report) title(name, what string) { fmt.Fprintf(r.out, "\n== %s: %s\n", name, what) }

func (r report) note(text string) { fmt.Fprintln(r.out, text) }

// table prints rows in columns; the first is the head.
func (r report) table(rows ...[]string) {
	const gap = 2
	w := tabwriter.NewWriter(r.out, 0, 0, gap, ' ', 0)
	for _, row := range rows {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	_ = w.Flush() // to a terminal that has gone
}

// atMost and atLeast print a figure and its target.
func (r report) atMost(name string, value, target float64) { r.ratio(name, value, "<=", target) }

func (r report) atLeast(name string, value, target float64) { r.ratio(name, value, ">=", target) }

func (r report) ratio(name string, value float64, relation string, target float64) {
	fmt.Fprintf(r.out, "ratio %s %.2f target %s %g\n", name, value, relation, target)
}

// median returns the middle value, of an even number the higher of the two.
func median[T int | float64 | time.Duration](values []T) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

func micros(d time.Duration) string {
	return fmt.Sprintf("%.0f µs", float64(d)/float64(time.Microsecond))
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }
