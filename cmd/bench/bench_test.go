package main

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestFlags(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason string
		args   []string
		want   string
	}{
		"unknown": {"a typing mistake must not run nothing and look good", []string{"--only=reads"}, `unknown benchmark "reads"; want some of: read,`},
		"rounds":  {"a median needs some", []string{"--rounds=3"}, "--rounds=3"},
		"none":    {"nothing can be compared", []string{"--machines=0"}, "--machines=0"},
		"pool":    {"the same", []string{"--pool=0"}, "--pool=0"},
		"fleet":   {"a mean of no machines is none", []string{"--fleet=0"}, "--fleet=0"},
		"argument": {
			"ONLY is make's word, not the program's", []string{"read"}, `"read": name benchmarks with --only`,
		},
		"not built": {"the remedy is one command", []string{"--only=delete", "--bin=" + t.TempDir()}, "run: make bench"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := run(t.Context(), c.args, &bytes.Buffer{})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: error %v does not say %q", c.reason, err, c.want)
			}
		})
	}
}

func TestReport(t *testing.T) {
	t.Parallel()
	out := &bytes.Buffer{}
	r := report{out: out}
	r.table([]string{"round", "took"}, []string{"1", "10 s"})
	r.atMost("read-p50", 1.234, 1.25)
	r.atLeast("create", median([]float64{12, 3, 10}), 10)
	want := "round  took\n1      10 s\nratio read-p50 1.23 target <= 1.25\nratio create 10.00 target >= 10\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("the form of a report is read by scripts (-want +got):\n%s", diff)
	}
}

func TestLoad(t *testing.T) {
	t.Parallel()
	const inFlight = 8
	var calls atomic.Int64
	together := make(chan struct{}) // fewer would never meet
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	m, err := load(ctx, inFlight, time.Millisecond, func(ctx context.Context) error {
		if calls.Add(1) == inFlight {
			close(together)
		}
		select {
		case <-together:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	if err != nil || m.perSecond <= 0 || m.p50 > m.p99 {
		t.Errorf("load of %d: %+v, %v", inFlight, m, err)
	}
	broken := errors.New("broken")
	if _, err := load(t.Context(), inFlight, time.Hour, func(context.Context) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("a call that fails must end the load: %v", err)
	}
}

func TestPaced(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	m, err := paced(t.Context(), 1000, 50*time.Millisecond, func(context.Context) error { calls.Add(1); return nil })
	if err != nil || calls.Load() != 50 || m.p50 > m.p99 {
		t.Errorf("%d calls, %+v, %v; want 50, each started once", calls.Load(), m, err)
	}
	broken := errors.New("broken")
	if _, err := paced(t.Context(), 1000, 5*time.Millisecond, func(context.Context) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("a call that fails must be reported: %v", err)
	}
}

func TestRequestsByKind(t *testing.T) {
	t.Parallel()
	const metrics = `# TYPE apiserver_request_total counter
apiserver_request_total{code="200",component="apiserver",resource="machines",subresource="status",verb="PATCH"} 7
apiserver_request_total{code="409",component="apiserver",resource="machines",subresource="status",verb="PATCH"} 1
apiserver_request_total{code="200",component="apiserver",resource="nodes",subresource="",verb="LIST"} 4
apiserver_request_total{code="200",component="apiserver",resource="nodes",subresource="",verb="WATCH"} 2
`
	after, err := requestsByKind(metrics)
	if err != nil {
		t.Fatal(err)
	}
	got := kindsTable(map[string]int{"LIST nodes": 4}, after, 2)
	want := [][]string{{"request", "for each machine"}, {"PATCH machines/status", "4.00"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what grew, without watches (-want +got):\n%s", diff)
	}
}

func TestGRPCPeer(t *testing.T) {
	t.Parallel()
	rig, err := newReadRig(t.Context(), rigOptions{inProcess: true})
	if err != nil {
		t.Fatal(err)
	}
	g, err := newGRPCRig(t.Context(), rig, newSlowly(time.Millisecond, 1))
	if err != nil {
		t.Fatal(errors.Join(err, rig.close()))
	}
	for name, call := range map[string]func(context.Context) error{"unary": g.callUnary, "stream": g.callStream} {
		if _, err := load(t.Context(), 4, time.Millisecond, call); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := errors.Join(g.close(), rig.close()); err != nil {
		t.Error(err)
	}
}

func TestDispatched(t *testing.T) {
	t.Parallel()
	const metrics = `# TYPE apiserver_flowcontrol_dispatched_requests_total counter
apiserver_flowcontrol_dispatched_requests_total{flow_schema="bench-mcm",priority_level="workload-high"} 421
apiserver_flowcontrol_dispatched_requests_total{flow_schema="bench-mcm-events",priority_level="workload-high"} 40
apiserver_flowcontrol_rejected_requests_total{flow_schema="bench-mcm",priority_level="workload-high"} 7
`
	if got, err := dispatched(metrics); err != nil || got != 421 {
		t.Errorf("read %d, %v; want 421, without Events and other counters", got, err)
	}
}
