package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// leads reports whether a manager is the leader.
func leads(ctx context.Context, m *stack.Manager) (bool, error) {
	leaders, err := metric(ctx, m, "leader_election_master_status")
	return leaders == 1, err
}

// shows returns a check that fails with [errMissed] until a metric of one of the managers
// is above zero, which proves that a fault had an effect.
func shows(name string, managers ...*stack.Manager) func(context.Context) error {
	return func(ctx context.Context) error {
		for _, m := range managers {
			if n, err := metric(ctx, m, name); err == nil && n > 0 { // an error means that it is down or starting
				return nil
			}
		}
		return fmt.Errorf("%w: %s is 0", errMissed, name)
	}
}

// metric returns the sum of a manager's metric over all labels; 0 if there is none.
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
