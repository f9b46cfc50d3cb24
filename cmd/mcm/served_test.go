package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// TestAwaitServed asks an API server that serves custom resources late, or never.
func TestAwaitServed(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason   string
		patience time.Duration
		before   int64 // answers that are something else
		status   int   // of those
		wantErr  string
	}{
		"at once": {reason: "it is there", patience: time.Minute},
		"late":    {reason: "it has just come back", patience: time.Minute, before: 2, status: http.StatusNotFound},
		"never": {
			reason: "the error must name the remedy", patience: time.Millisecond, before: 1 << 30, status: http.StatusNotFound,
			wantErr: "does not serve machine.sapcloud.io/v1alpha1: apply the CustomResourceDefinitions in deploy/crds",
		},
		"refused": {
			reason: "that is not for want of definitions", patience: time.Millisecond, before: 1 << 30, status: http.StatusForbidden,
			wantErr: "ask the control cluster at http://",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var asked atomic.Int64
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				if r.URL.Path != "/apis/machine.sapcloud.io/v1alpha1" {
					t.Errorf("asked for %s", r.URL.Path)
				}
				if asked.Add(1) <= tc.before {
					w.WriteHeader(tc.status)
					return
				}
				_, _ = w.Write([]byte(`{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "machine.sapcloud.io/v1alpha1", "resources": []}`))
			}))
			t.Cleanup(server.Close)
			err := awaitServed(t.Context(), &rest.Config{Host: server.URL}, tc.patience)
			if (err != nil) != (tc.wantErr != "") || err != nil && !strings.Contains(err.Error(), tc.wantErr) {
				t.Errorf("awaitServed() = %v, want %q in it: %s", err, tc.wantErr, tc.reason)
			}
			if asked.Load() <= tc.before && tc.wantErr == "" {
				t.Errorf("it has asked %d times and not waited: %s", asked.Load(), tc.reason)
			}
		})
	}
}
