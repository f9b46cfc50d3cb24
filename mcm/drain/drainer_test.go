package drain

import (
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// counted returns how many evictions had that result.
func counted(t *testing.T, d *Drainer, result string) float64 {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(d.metrics.evictions)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if m.GetLabel()[0].GetValue() == result {
				return m.GetCounter().GetValue()
			}
		}
	}

	return 0
}

// quiet fails the test if there is a notice.
func (r *rig) quiet(t *testing.T, why string) {
	t.Helper()
	select {
	case <-r.notices:
		t.Error("a notice came although " + why)
	default:
	}
}

func TestForceWhileItRuns(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{}, nil)
	r.pod(t, "guarded", labelled("guarded"))
	r.pod(t, "slow", slowToEnd)
	r.budget(t, "guarded", busy)
	req := r.request()
	r.drainer.Start(req)
	r.noticed(t)
	if s := r.drainer.Start(req); s.Forced || s.Phase != Running {
		t.Fatalf("started again, the drain is %+v", s)
	}
	req.Force = true
	if s := r.drainer.Start(req); !s.Forced {
		t.Errorf("with force, the drain is %+v", s)
	}
	if s := r.done(t); s.Err != nil || !s.Forced {
		t.Errorf("the drain ended as %+v", s)
	}
	r.noticed(t)
	if all, _ := r.pods(t); len(all) > 0 {
		t.Errorf("pods %q are left", all)
	}
	req.Force = false
	if s := r.drainer.Start(req); !s.Forced || s.Phase != Done {
		t.Errorf("asked without force, the forced drain is %+v", s)
	}
	r.stop()
	r.drainer.Wait()
	r.quiet(t, "the drain that was replaced does not notify")
}

func TestAfterAFailure(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{}, nil)
	r.pod(t, "guarded", labelled("guarded"))
	budget := r.budget(t, "guarded", strict)
	req := r.request()
	r.drainer.Start(req)
	failed := r.done(t)
	if failed.Err == nil {
		t.Fatal("a misconfigured budget was overruled")
	}
	if s := r.drainer.Start(req); s.Phase != Done || !s.Ended.Equal(failed.Ended) {
		t.Errorf("started again, the drain is %+v, want it to stay as it ended", s)
	}
	allows := strict
	allows.DisruptionsAllowed = 1
	r.setBudget(t, budget, allows)
	r.drainer.Forget(req.UID)
	if s := r.succeed(t, req); s.Forced {
		t.Error("the second drain was forced")
	}
}

func TestForceAfterAFailure(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{}, nil)
	r.pod(t, "guarded", labelled("guarded"))
	r.budget(t, "guarded", strict)
	req := r.request()
	r.drainer.Start(req)
	if s := r.done(t); s.Err == nil {
		t.Fatal("a misconfigured budget was overruled")
	}
	req.Force = true
	r.drainer.Start(req)
	s := r.until(t, "done by force", func(s State) bool { return s.Phase == Done && s.Forced })
	if s.Err != nil {
		t.Error(s.Err)
	}
	if all, _ := r.pods(t); len(all) > 0 {
		t.Errorf("pods %q are left", all)
	}
}

func TestForceAfterSuccess(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{}, nil)
	req := r.request()
	r.succeed(t, req)
	req.Force = true
	if s := r.drainer.Start(req); s.Phase != Done || s.Forced {
		t.Errorf("the drain is %+v, want it to stay Done: the node is empty", s)
	}
}

// A Node that was emptied to stay is drained again when it is to be deleted: only then is it
// cordoned.
func TestStaysThenGoes(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{}, nil)
	r.attachment(t, r.namespace+"-here", r.node.Name)
	r.pod(t, "slow", slowToEnd)
	req := r.request()
	req.Stays, req.Force = true, true
	r.succeed(t, req)
	node := r.getNode(t)
	if node.Spec.Unschedulable || len(node.Status.Conditions) != 1 {
		t.Errorf("the node is cordoned or says that it goes: %+v", node)
	}
	if all, _ := r.pods(t); len(all) > 0 {
		t.Errorf("pods %q are left", all)
	}
	if !r.attached(t, r.namespace+"-here") {
		t.Error("a volume was detached from an instance that stays")
	}
	req.Stays, req.Force = false, false
	if s := r.drainer.Start(req); s.Phase != Running || s.Forced {
		t.Errorf("the drain is %+v, want a new one", s)
	}
	r.until(t, "done again", func(s State) bool { return s.Phase == Done && s.Err == nil && !s.Forced })
	if !r.getNode(t).Spec.Unschedulable {
		t.Error("the node is not cordoned")
	}
}

func TestForgottenAndShutDown(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		end    func(r *rig)
	}{
		"forgotten": {"the machine is gone", func(r *rig) { r.drainer.Forget(r.request().UID) }},
		"shut down": {"the next manager drains", func(r *rig) { r.stop() }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, Settings{}, nil)
			r.pod(t, "slow", slowToEnd)
			r.drainer.Start(r.request())
			r.until(t, "waits for the pod", func(s State) bool { return s.Reason != "" })
			tc.end(r)
			r.drainer.Wait()
			r.quiet(t, tc.reason)
			if s, ok := r.drainer.State(r.request().UID); ok && s.Phase == Done {
				t.Errorf("the drain is %+v although it was broken off: %s", s, tc.reason)
			}
		})
	}
}

// A transport does something before each request.
type transport struct {
	next   http.RoundTripper
	before func(*http.Request)
	after  func()
}

func (t transport) RoundTrip(req *http.Request) (*http.Response, error) {
	t.before(req)
	defer t.after()

	return t.next.RoundTrip(req)
}

func wrap(before func(*http.Request), after func()) func(*rest.Config) {
	return func(cfg *rest.Config) {
		cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return transport{next, before, after} })
	}
}

func TestAPanicEndsOneDrainOnly(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ reason, part string }{
		"in the drain":    {"its own goroutine", "fieldSelector"},
		"in an eviction":  {"one goroutine for each pod", "/eviction"},
		"in a budget ask": {"called while evicting", "/poddisruptionbudgets"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, Settings{}, wrap(func(req *http.Request) {
				if strings.Contains(req.URL.String(), tc.part) {
					panic("of the test") //nolint:forbidigo // to be survived
				}
			}, func() {}))
			r.pod(t, "guarded", labelled("guarded"))
			r.budget(t, "guarded", busy)
			r.drainer.Start(r.request())
			if s := r.done(t); s.Err == nil || !strings.Contains(s.Err.Error(), "panic: of the test") {
				t.Errorf("the drain ended with %v, want the panic (%s)", s.Err, tc.reason)
			}
			r.noticed(t)
		})
	}
}

func TestRequestsAreLimited(t *testing.T) {
	t.Parallel()
	const limit, pods = 2, 12
	var mu sync.Mutex
	now, most := 0, 0
	r := newRig(t, Settings{Requests: limit}, wrap(func(*http.Request) {
		mu.Lock()
		defer mu.Unlock()
		now++
		most = max(most, now)
	}, func() {
		mu.Lock()
		defer mu.Unlock()
		now--
	}))
	var uids []types.UID
	for i := range 3 {
		req := r.request()
		if i > 0 {
			req.Node = r.addNode(t, r.node.Name+"-"+string(rune('a'+i)))
		}
		req.UID = types.UID(r.namespace + "-" + string(rune('a'+i)))
		r.node = req.Node
		for p := range pods {
			r.pod(t, "p-"+string(rune('a'+i))+string(rune('a'+p)))
		}
		uids = append(uids, req.UID)
		r.drainer.Start(req)
	}
	for _, uid := range uids {
		if !poll(func() bool { s, _ := r.drainer.State(uid); return s.Phase == Done }) {
			t.Fatal("a drain does not end")
		}
	}
	if all, _ := r.pods(t); len(all) > 0 {
		t.Errorf("pods %q are left", all)
	}
	mu.Lock()
	defer mu.Unlock()
	if most > limit {
		t.Errorf("%d requests were under way at once, want at most %d", most, limit)
	}
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{}, nil)
	r.pod(t, "p")
	req := r.request()
	req.Deployment = "workers"
	r.succeed(t, req)
	r.stop()
	r.drainer.Wait()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(r.drainer.Collectors()...)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	for _, f := range families {
		switch f.GetName() {
		case "mcm_machine_drain_duration_seconds", "mcm_drain_duration_seconds":
			m := f.GetMetric()[0]
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			// Dashboards ask for the former by its bare name.
			if last := f.GetName() == "mcm_machine_drain_duration_seconds"; last && m.GetGauge().GetValue() == 0 ||
				!last && m.GetHistogram().GetSampleCount() != 1 || labels["namespace"] != r.namespace || labels["machine_deployment"] != "workers" {
				t.Errorf("%s is %v", f.GetName(), m)
			}
		case "mcm_machine_drains_in_flight":
			if v := f.GetMetric()[0].GetGauge().GetValue(); v != 0 {
				t.Errorf("%v drains in flight, want none", v)
			}
		}
	}
	if got := counted(t, r.drainer, evicted); got != 1 {
		t.Errorf("%v evictions were accepted, want 1", got)
	}
}
