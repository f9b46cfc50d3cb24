package main

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
)

// A filling cache has read its objects when it is closed.
type filling chan struct{}

func (f filling) WaitForCacheSync(ctx context.Context) bool {
	select {
	case <-f:
		return true
	case <-ctx.Done():
		return false
	}
}

// TestCachesRead checks that the check fails before the prober gives up.
func TestCachesRead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		control, target := filling(make(chan struct{})), filling(make(chan struct{}))
		check := cachesRead(map[string]synced{"control": control, "target": target})
		start := time.Now()
		if err := check(httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)); err == nil || time.Since(start) != cachesPatience {
			t.Errorf("%v after %s, want an error after %s", err, time.Since(start), cachesPatience)
		}
		close(control)
		err := check(httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
		if err == nil || !strings.Contains(err.Error(), "target") {
			t.Errorf("%v, want an error about the target cluster", err)
		}
		close(target)
		if err := check(httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)); err != nil {
			t.Errorf("both are read: %v", err)
		}
	})
}

// TestServeChecks has a prober read why a check fails.
func TestServeChecks(t *testing.T) {
	t.Parallel()
	var fault error
	handler := serveChecks(map[string]healthz.Checker{
		"streams": func(*http.Request) error { return fault },
		"bus":     func(*http.Request) error { return nil },
	})
	for _, tc := range []struct {
		fault  error
		status int
		text   string
	}{
		{nil, http.StatusOK, "[+]bus ok\n[+]streams ok\n"},
		{errors.New("no room"), http.StatusInternalServerError, "[+]bus ok\n[-]streams failed: no room\n"},
	} {
		fault = tc.fault
		w := httptest.NewRecorder()
		handler(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
		if w.Code != tc.status || w.Body.String() != tc.text {
			t.Errorf("with %v it answers %d %q, want %d %q", tc.fault, w.Code, w.Body, tc.status, tc.text)
		}
	}
}

// TestLogChanges checks that a reason is logged once.
func TestLogChanges(t *testing.T) {
	t.Parallel()
	var lines []string
	var fault error
	checks := logChanges(funcr.New(func(_, args string) { lines = append(lines, args) }, funcr.Options{}), map[string]healthz.Checker{
		"bus": func(*http.Request) error { return fault },
	})
	for _, err := range []error{nil, errors.New("cut"), errors.New("cut"), nil, nil} {
		fault = err
		if got := checks["bus"](nil); !errors.Is(got, err) {
			t.Errorf("check says %v, want %v", got, err)
		}
	}
	want := []string{
		`"level"=0 "msg"="not ready" "check"="bus" "reason"="cut"`,
		`"level"=0 "msg"="ready again" "check"="bus"`,
	}
	if diff := cmp.Diff(want, lines); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
}
