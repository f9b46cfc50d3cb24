package driversdk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus/bustest"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestHealth(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason                       string
		connected, serving, draining bool
		status                       int
		text                         string
		refusal                      error
	}{
		"starting":     {"not yet", true, false, false, http.StatusServiceUnavailable, "starting", nil},
		"ready":        {"takes operations", true, true, false, http.StatusOK, "ok", nil},
		"disconnected": {"nothing can reach it", false, true, false, http.StatusServiceUnavailable, "not connected to NATS", nil},
		"draining":     {"takes no more", true, true, true, http.StatusServiceUnavailable, "draining", nil},
		"strange":      {"mcm speaks another protocol", true, true, false, http.StatusServiceUnavailable, "upgrade mcm", errors.New("upgrade mcm")},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := &health{connected: func() bool { return tc.connected }, refusal: func() error { return tc.refusal }}
			h.serving.Store(tc.serving)
			h.draining.Store(tc.draining)
			handler := h.handler(prometheus.NewRegistry())
			for path, status := range map[string]int{"/readyz": tc.status, "/healthz": http.StatusOK} {
				w := httptest.NewRecorder()
				handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
				if w.Code != status {
					t.Errorf("%s: GET %s: want %d, have %d", tc.reason, path, status, w.Code)
				}
				if got := strings.TrimSpace(w.Body.String()); path == "/readyz" && got != tc.text {
					t.Errorf("%s: want %q, have %q", tc.reason, tc.text, got)
				}
			}
		})
	}
}

func TestServe_Health(t *testing.T) {
	t.Parallel()
	address := freeAddress(t)
	w := start(t, &testDriver{}, func(c *Config) { c.Listen = address })
	ready := func() (int, string) { return get(t, "http://"+address+"/readyz") }
	bustest.Eventually(t, "ready", func() bool { code, _ := ready(); return code == http.StatusOK })

	w.nats.Stop()
	bustest.Eventually(t, "not ready without NATS", func() bool {
		code, text := ready()

		return code == http.StatusServiceUnavailable && text == "not connected to NATS"
	})
	if err := w.nats.Restart(); err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "ready again", func() bool { code, _ := ready(); return code == http.StatusOK })
	if _, text := get(t, "http://"+address+"/metrics"); !strings.Contains(text, "machinebus_driver_connected 1") {
		t.Errorf("metrics do not say that the replica is connected:\n%s", text)
	}
}

// A call that ignores its deadline shows in the metrics; when such calls have all slots,
// the replica is not ready and says what to do.
func TestServe_Stuck(t *testing.T) {
	t.Parallel()
	address, release := freeAddress(t), make(chan struct{})
	t.Cleanup(func() { close(release) })
	w := start(t, &testDriver{onCreate: func(context.Context, *Request[testSpec]) (*Instance, error) {
		<-release

		return nil, errors.New("late")
	}}, func(c *Config) { c.Listen, c.Slots, c.stuckAfter = address, 1, 50*time.Millisecond })
	class := &driverv1.ClassReference{Class: w.store.setClass("c", "1", `{"size":"s"}`)}
	req := create(machine("m"), class)
	req.Timeout = durationpb.New(200 * time.Millisecond)
	result := w.ask(req).result()
	if result.GetStatus().GetCode() != DeadlineExceeded || !result.GetOutcomeUnknown() {
		t.Errorf("result = %v, want an unknown outcome", result)
	}
	if code, text := get(t, "http://"+address+"/readyz"); code != http.StatusServiceUnavailable ||
		!strings.Contains(text, "all 1 slots for creates") || !strings.Contains(text, "restart this replica") {
		t.Errorf("readyz: %d %s, want that it can take nothing", code, text)
	}
	if _, text := get(t, "http://"+address+"/metrics"); !strings.Contains(text, `machinebus_driver_operations_stuck{operation="create"} 1`) {
		t.Errorf("metrics do not say that a create is stuck:\n%s", text)
	}
}

func TestServe_AddressInUse(t *testing.T) {
	t.Parallel()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	w := newBus(t)
	err = Serve(t.Context(), Config{
		Provider: testProvider, NATS: NATSConfig{URLs: []string{w.nats.URL()}}, Listen: l.Addr().String(),
		Logger: bustest.Quiet(),
	}, &testDriver{})
	if err == nil || !strings.Contains(err.Error(), "health endpoint cannot listen on "+l.Addr().String()) {
		t.Errorf("want an error that names the address, have %v", err)
	}
}

func TestServe_SharedRegistry(t *testing.T) {
	t.Parallel()
	w := start(t, &testDriver{}, nil)
	err := Serve(t.Context(), Config{
		Provider: testProvider, NATS: NATSConfig{URLs: []string{w.nats.URL()}}, Metrics: w.stats,
		Logger: bustest.Quiet(),
	}, &testDriver{})
	if err == nil || !strings.Contains(err.Error(), "a registry of its own") {
		t.Errorf("want an error with the remedy, have %v", err)
	}
}

// A bus that is not there yet is waited for, and does not keep a replica from
// stopping.
func TestServe_NoBus(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cfg, err := Config{
		Provider: testProvider, NATS: NATSConfig{URLs: []string{"nats://" + freeAddress(t)}},
		Logger: bustest.Quiet(),
	}.Complete()
	if err != nil {
		t.Fatal(err)
	}
	r := newProcess(cfg)
	served := make(chan error, 1)
	go func() { served <- serve(ctx, r, &testDriver{}) }()
	bustest.Eventually(t, "running without a bus", func() bool { return r.health.serving.Load() })
	cancel()
	if err := <-served; err != nil {
		t.Errorf("Serve: %v", err)
	}
}

func TestServe_Metrics(t *testing.T) {
	t.Parallel()
	w := start(t, &testDriver{onDelete: func(context.Context, *Request[testSpec]) error {
		panic("no") //nolint:forbidigo // what the test is about
	}}, func(c *Config) { c.Slots = 3 })
	class := &driverv1.ClassReference{Class: w.store.setClass("c", "1", `{"size":"s"}`)}
	for n := range 3 {
		w.ask(create(machine(fmt.Sprintf("m%d", n)), class)).result()
	}
	w.ask(deletion(machine("m1"), class)).result()

	for name, want := range map[string]struct {
		labels map[string]string
		value  float64
	}{
		"machinebus_driver_operations_total":           {map[string]string{"operation": "create", "code": "OK"}, 3},
		"machinebus_driver_operation_duration_seconds": {map[string]string{"operation": "create"}, 3},
		"machinebus_driver_operations_running":         {nil, 0},
		"machinebus_driver_slots":                      {nil, 3},
		"machinebus_driver_fetches_total":              {map[string]string{"what": "class", "code": "OK"}, 1},
		"machinebus_driver_cache_lookups_total":        {map[string]string{"what": "class", "result": "hit"}, 3},
		"machinebus_driver_connected":                  {nil, 1},
		"machinebus_driver_draining":                   {nil, 0},
	} {
		if got := w.figure(name, want.labels); got != want.value {
			t.Errorf("%s%v: want %v, have %v", name, want.labels, want.value, got)
		}
	}
	if got := w.figure("machinebus_driver_operations_total", map[string]string{"operation": "delete", "code": "Internal"}); got != 1 {
		t.Errorf("an operation that panics is counted: have %v", got)
	}

	families, err := w.stats.Gather()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("metric %s: %s", p.Metric, p.Text)
	}
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()

	return l.Addr().String()
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}

	return resp.StatusCode, strings.TrimSpace(string(body))
}
