package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestFlags(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason string
		args   []string
		want   string
	}{
		"unknown": {"a typing mistake must not run nothing and look good", []string{"--only=deletes"}, `unknown benchmark "deletes"; want some of: faults,`},
		"rounds":  {"a median needs some", []string{"--rounds=3"}, "--rounds=3"},
		"none":    {"nothing can be compared", []string{"--machines=0"}, "--machines=0"},
		"pool":    {"the same", []string{"--pool=0"}, "--pool=0"},
		"fleet":   {"a mean of no machines is none", []string{"--fleet=0"}, "--fleet=0"},
		"argument": {
			"ONLY is make's word, not the program's", []string{"delete"}, `"delete": name benchmarks with --only`,
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
	r.atMost("delete", 1.234, 1.25)
	r.atLeast("create", median([]float64{12, 3, 10}), 10)
	want := "round  took\n1      10 s\nratio delete 1.23 target <= 1.25\nratio create 10.00 target >= 10\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("the form of a report is read by scripts (-want +got):\n%s", diff)
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
