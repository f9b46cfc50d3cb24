package embedded

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A store that is large takes its time; the log says so, and who has had enough of it
// need not wait.
func TestWait(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason                    string
		limit, ready, broken, end time.Duration // 0 is never
		took                      time.Duration
		want                      string
		notices                   int
	}{
		"large store": {reason: "it is waited for", limit: recoverTimeout, ready: 65 * time.Second, took: 65 * time.Second, notices: 6},
		"too large":   {reason: "not for ever", limit: 119 * time.Second, took: 119 * time.Second, want: "within 1m59s: not yet", notices: 11},
		"no store":    {reason: "nothing takes long then", limit: 9 * time.Second, took: 9 * time.Second, want: "within 9s: not yet"},
		"broken":      {reason: "it will never be ready", limit: recoverTimeout, broken: 15 * time.Second, took: 15 * time.Second, want: "no such disk", notices: 1},
		"told to end": {reason: "by a signal", limit: recoverTimeout, end: 25 * time.Second, took: 25 * time.Second, want: "stopped before", notices: 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				begun, logs := time.Now(), &bytes.Buffer{}
				broken, quit := make(chan string, 1), make(chan struct{})
				if tc.broken != 0 {
					time.AfterFunc(tc.broken, func() { broken <- "no such disk" })
				}
				if tc.end != 0 {
					time.AfterFunc(tc.end, func() { close(quit) })
				}
				r := &readying{limit: tc.limit, broken: broken, quit: quit, log: slog.New(slog.NewTextHandler(logs, nil)), ready: func() error {
					if tc.ready != 0 && time.Since(begun) >= tc.ready {
						return nil
					}

					return errors.New("not yet")
				}}
				err := r.wait()
				if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
					t.Errorf("error is %v, want %q: %s", err, tc.want, tc.reason)
				}
				if took := time.Since(begun); took != tc.took { // of the bubble's clock
					t.Errorf("took %s, want %s: %s", took, tc.took, tc.reason)
				}
				if got := strings.Count(logs.String(), "not ready yet"); got != tc.notices {
					t.Errorf("%d notices, want %d", got, tc.notices)
				}
			})
		})
	}
}
