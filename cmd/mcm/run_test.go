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

// What ends mcm must not be hidden by parts that are slow to end because of it.
func TestLive(t *testing.T) {
	t.Parallel()
	slow := fmt.Errorf("failed waiting for all runnables to end: %w", context.DeadlineExceeded)
	broken := errors.New("fetches cannot be served")
	for name, tc := range map[string]struct {
		reason string
		told   bool
		err    error
		want   string
	}{
		"told to end":              {reason: "as it was told", told: true},
		"told to end, slow":        {reason: "what still runs ends with the process", told: true, err: slow},
		"a part failed":            {reason: "the exit code must say so", err: broken, want: broken.Error()},
		"a part failed, slow":      {reason: "nobody told it to end", err: kerrors.NewAggregate([]error{broken, slow}), want: broken.Error()},
		"slow, told by nobody":     {reason: "it ended by itself", err: slow, want: "failed waiting"},
		"its port taken by others": {reason: "with the remedy", err: syscall.EADDRINUSE, want: "--port"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, tell := context.WithCancel(t.Context())
			defer tell()
			if tc.told {
				tell()
			}
			running, letGo := context.WithCancel(ctx)
			m := &mcm{
				manager:    endingManager{err: tc.err},
				dispatcher: dispatch.New(logr.NewContext(running, logr.Discard()), nil, nil),
			}
			err := m.live(ctx, letGo)
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error is %v, want one with %q: %s", err, tc.want, tc.reason)
			}
			if running.Err() == nil {
				t.Error("the parts were not let go")
			}
		})
	}
}
