package main

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// apiRequests returns how many requests of each kind, such as "PATCH machines/status", the
// API server has answered so far to all clients.
func (w *world) apiRequests(ctx context.Context) (map[string]int, error) {
	metrics, err := w.metrics(ctx)
	if err != nil {
		return nil, err
	}
	return requestsByKind(metrics)
}

// requestsByKind reads the counter apiserver_request_total. Long-lived watches are
// counted when they end, and left out.
func requestsByKind(metrics string) (map[string]int, error) {
	counts := map[string]int{}
	lines := bufio.NewScanner(strings.NewReader(metrics))
	const longest = 1 << 20
	lines.Buffer(nil, longest)
	for lines.Scan() {
		series, value, ok := strings.Cut(lines.Text(), "} ")
		labels, ours := strings.CutPrefix(series, "apiserver_request_total{")
		if !ok || !ours || label(labels, "verb") == "WATCH" {
			continue
		}
		count, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err != nil {
			return nil, fmt.Errorf("unreadable counter %q: %w", lines.Text(), err)
		}
		kind := label(labels, "verb") + " " + label(labels, "resource")
		if sub := label(labels, "subresource"); sub != "" {
			kind += "/" + sub
		}
		counts[kind] += int(count)
	}
	return counts, lines.Err()
}

// label returns the value of a label in a series' list of them.
func label(labels, name string) string {
	_, rest, found := strings.Cut(","+labels, ","+name+`="`)
	if !found {
		return ""
	}
	value, _, _ := strings.Cut(rest, `"`)
	return value
}

// kindsTable returns the most frequent kinds of requests per machine.
func kindsTable(before, after map[string]int, machines int) [][]string {
	const shown = 12
	grown := map[string]int{}
	for kind, count := range after {
		grown[kind] = count - before[kind]
	}
	kinds := slices.SortedFunc(maps.Keys(grown), func(a, b string) int {
		return cmp.Or(grown[b]-grown[a], strings.Compare(a, b))
	})
	table := [][]string{{"request", "for each machine"}}
	for _, kind := range kinds[:min(shown, len(kinds))] {
		if grown[kind] > 0 {
			table = append(table, []string{kind, fmt.Sprintf("%.2f", float64(grown[kind])/float64(machines))})
		}
	}
	return table
}
