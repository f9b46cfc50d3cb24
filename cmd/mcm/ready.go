package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
)

// cachesPatience is how long a check waits for caches, less than probers wait.
const cachesPatience = time.Second

// addChecks serves /healthz and /readyz beside /metrics.
func (m *mcm) addChecks() error {
	caches := map[string]synced{"control": m.manager.GetCache()}
	if m.target != nil {
		caches["target"] = m.target.GetCache()
	}
	ready := serveChecks(logChanges(klog.Background().WithName("ready"), map[string]healthz.Checker{
		"namesake": m.namesake.Check,
		"epoch":    m.epochs.Check,
		"sidecar":  m.lock.sidecar.check,
		"bus": func(*http.Request) error {
			if !m.conn.Up() {
				return errors.New("not connected to NATS")
			}

			return nil
		},
		"streams": func(r *http.Request) error { return m.caller.Check(r.Context()) },
		"caches":  cachesRead(caches),
	}))
	live := &healthz.Handler{Checks: map[string]healthz.Checker{"ping": healthz.Ping}}

	return errors.Join(
		m.manager.AddMetricsServerExtraHandler("/healthz", http.StripPrefix("/healthz", live)),
		m.manager.AddMetricsServerExtraHandler("/readyz", http.StripPrefix("/readyz", ready)),
	)
}

// synced is the part of cache.Cache that its check needs.
type synced interface {
	WaitForCacheSync(ctx context.Context) bool
}

// cachesRead returns a check that fails until all objects of all clusters have been
// read once.
func cachesRead(clusters map[string]synced) healthz.Checker {
	return func(r *http.Request) error {
		ctx, cancel := context.WithTimeout(r.Context(), cachesPatience)
		defer cancel()
		for name, c := range clusters {
			if !c.WaitForCacheSync(ctx) {
				return fmt.Errorf("the objects of the %s cluster have not been read yet", name)
			}
		}

		return nil
	}
}

// serveChecks answers with a line for each check: 200 if all pass, otherwise 500. The form is
// that of Kubernetes' programs. Those leave out why a check fails. Here it holds no secret, and
// it is the first thing that people look for.
func serveChecks(checks map[string]healthz.Checker) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var report strings.Builder
		status := http.StatusOK
		for _, name := range slices.Sorted(maps.Keys(checks)) {
			if err := checks[name](r); err != nil {
				status = http.StatusInternalServerError
				fmt.Fprintf(&report, "[-]%s failed: %v\n", name, err)

				continue
			}
			fmt.Fprintf(&report, "[+]%s ok\n", name)
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, report.String()) // to a prober that has gone
	}
}

// logChanges makes checks log when they begin to fail and why, and when they pass again.
func logChanges(log logr.Logger, checks map[string]healthz.Checker) map[string]healthz.Checker {
	out := make(map[string]healthz.Checker, len(checks))
	for name, check := range checks {
		var mu sync.Mutex
		failing := false
		out[name] = func(r *http.Request) error {
			err := check(r)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil && !failing:
				log.Info("not ready", "check", name, "reason", err.Error())
			case err == nil && failing:
				log.Info("ready again", "check", name)
			}
			failing = err != nil

			return err
		}
	}

	return out
}
