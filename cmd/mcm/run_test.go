package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/go-logr/logr"
	kerrors "k8s.io/apimachinery/pkg/util/errors"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/machinebus/machinebus/mcm/dispatch"
)

// An endingManager is one that has ended with an error.
type endingManager struct {
	ctrl.Manager

	err error
}

func (e endingManager) Start(context.Context) error { return e.err }

// TestRunManager checks that a slow shutdown does not hide why mcm ends.
func TestRunManager(t *testing.T) {
	t.Parallel()
	slow := fmt.Errorf("failed waiting for all runnables to end: %w", context.DeadlineExceeded)
	broken := errors.New("fetches cannot be served")
	for name, tc := range map[string]struct {
		reason  string
		stopped bool
		err     error
		want    string
	}{
		"stopped":             {reason: "it was asked to", stopped: true},
		"stopped, slow":       {reason: "what still runs ends with the process", stopped: true, err: slow},
		"a part failed":       {reason: "the exit code must be 1", err: broken, want: broken.Error()},
		"a part failed, slow": {reason: "it was not asked to stop", err: kerrors.NewAggregate([]error{broken, slow}), want: broken.Error()},
		"slow without a stop": {reason: "it ended by itself", err: slow, want: "failed waiting"},
		"its port is in use":  {reason: "with the remedy", err: syscall.EADDRINUSE, want: "--port"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			if tc.stopped {
				stop()
			}
			running, cancelParts := context.WithCancel(ctx)
			m := &mcm{
				manager:    endingManager{err: tc.err},
				dispatcher: dispatch.New(logr.NewContext(running, logr.Discard()), nil, nil),
			}
			err := m.runManager(ctx, cancelParts)
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error is %v, want one with %q: %s", err, tc.want, tc.reason)
			}
			if running.Err() == nil {
				t.Error("the parts were not canceled")
			}
		})
	}
}
