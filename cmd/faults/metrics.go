package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/machinebus/machinebus/cmd/internal/stack"
)

// leads reports whether a manager is the leader.
func leads(ctx context.Context, m *stack.Manager) (bool, error) {
	leaders, err := metric(ctx, m, "leader_election_master_status")
	return leaders == 1, err
}

// shows returns [errMissed] until a metric of one of the managers is above zero: that is
// how a fault is known to have hit.
func shows(name string, managers ...*stack.Manager) func(context.Context) error {
	return func(ctx context.Context) error {
		for _, m := range managers {
			if n, err := metric(ctx, m, name); err == nil && n > 0 { // with an error it is down, or starts
				return nil
			}
		}
		return fmt.Errorf("%w: %s is 0", errMissed, name)
	}
}

// metric returns a metric of a manager, summed up over all labels, and 0 for one that is
// not there.
func metric(ctx context.Context, m *stack.Manager, name string) (sum float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+m.Address+"/metrics", http.NoBody)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	const enough = 8 << 20
	body, err := io.ReadAll(io.LimitReader(resp.Body, enough))
	if err != nil {
		return 0, fmt.Errorf("metrics of %s: %w", m.Name, err)
	}
	for line := range strings.Lines(string(body)) {
		rest, found := strings.CutPrefix(line, name)
		if !found || !strings.HasPrefix(rest, "{") && !strings.HasPrefix(rest, " ") {
			continue
		}
		value, err := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndex(line, " "):]), 64)
		if err != nil {
			return 0, fmt.Errorf("metrics of %s: %s: %w", m.Name, line, err)
		}
		sum += value
	}
	return sum, nil
}
