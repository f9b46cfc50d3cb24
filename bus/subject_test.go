package bus_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestSubjectRoundTrip(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason  string
		subject bus.Subject
		want    string
	}{
		"driver": {
			reason:  "dots of Kubernetes names are escaped, so that they stay one token",
			subject: bus.Subject{Cluster: "c1", Tree: bus.TreeDriver, Provider: "aws", Verb: "create", Namespace: "ns", Name: "m.1.a"},
			want:    "mcm.v1.c1.driver.aws.create.ns.m~1~a",
		},
		"replica with machine": {
			reason: "directed operations name the machine as well",
			subject: bus.Subject{
				Cluster: "c1", Tree: bus.TreeReplica, Provider: "aws", Replica: "r1", Verb: "delete", Namespace: "a.b", Name: "m",
			},
			want: "mcm.v1.c1.replica.aws.r1.delete.a~b.m",
		},
		"replica control": {
			reason:  "control verbs name no machine",
			subject: bus.Subject{Cluster: "c1", Tree: bus.TreeReplica, Provider: "aws", Replica: "r1", Verb: "ops"},
			want:    "mcm.v1.c1.replica.aws.r1.ops",
		},
		"plain":   {subject: bus.Subject{Cluster: "c", Tree: bus.TreePlain, Provider: "p", Verb: "list", Namespace: "n", Name: "x"}, want: "mcm.v1.c.plain.p.list.n.x"},
		"reply":   {subject: bus.Subject{Cluster: "c", Tree: bus.TreeReply, Provider: "p", Caller: "A", Token: "B"}, want: "mcm.v1.c.reply.p.A.B"},
		"session": {subject: bus.Subject{Cluster: "c", Tree: bus.TreeSession, Provider: "p", Replica: "r"}, want: "mcm.v1.c.session.p.r"},
		"hello":   {subject: bus.Subject{Cluster: "c", Tree: bus.TreeHello}, want: "mcm.v1.c.hello"},
		"fetch":   {subject: bus.Subject{Cluster: "c", Tree: bus.TreeFetch, Provider: "p", Verb: "class"}, want: "mcm.v1.c.fetch.p.class"},
		"changed": {subject: bus.Subject{Cluster: "c", Tree: bus.TreeChanged, Provider: "p"}, want: "mcm.v1.c.changed.p"},
		"audit":   {subject: bus.Subject{Cluster: "c", Tree: bus.TreeAudit, Provider: "p", Verb: "create", Namespace: "n", Name: "m"}, want: "mcm.v1.c.audit.p.create.n.m"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := tc.subject.Build()
			if err != nil || got != tc.want {
				t.Fatalf("Build() = %q, %v; want %q: %s", got, err, tc.want, tc.reason)
			}
			back, err := bus.ParseSubject(got)
			if err != nil {
				t.Fatalf("ParseSubject(%q): %v", got, err)
			}
			if diff := cmp.Diff(tc.subject, back); diff != "" {
				t.Errorf("round trip (-want +got):\n%s", diff)
			}
		})
	}
}

func TestSubjectBuildRefuses(t *testing.T) {
	t.Parallel()
	good := bus.Subject{Cluster: "c", Tree: bus.TreeDriver, Provider: "p", Verb: "create", Namespace: "n", Name: "m"}
	cases := map[string]struct {
		reason string
		spoil  func(*bus.Subject)
	}{
		"wildcard token":        {"a name must not widen a subject", func(s *bus.Subject) { s.Name = "*" }},
		"wildcard tail":         {"a name must not widen a subject", func(s *bus.Subject) { s.Name = ">" }},
		"space":                 {"a space ends a subject on the wire", func(s *bus.Subject) { s.Name = "a b" }},
		"line end":              {"a line end ends a protocol line", func(s *bus.Subject) { s.Name = "a\r\nPUB" }},
		"empty name":            {"NATS has no empty tokens", func(s *bus.Subject) { s.Name = "" }},
		"empty provider":        {"NATS has no empty tokens", func(s *bus.Subject) { s.Provider = "" }},
		"tilde in a name":       {"it would read back as a dot", func(s *bus.Subject) { s.Name = "a~b" }},
		"tilde in a provider":   {"only names are escaped", func(s *bus.Subject) { s.Provider = "a~b" }},
		"dot in a provider":     {"one token", func(s *bus.Subject) { s.Provider = "a.b" }},
		"dot in a cluster":      {"one token", func(s *bus.Subject) { s.Cluster = "a.b" }},
		"empty cluster":         {"NATS has no empty tokens", func(s *bus.Subject) { s.Cluster = "" }},
		"unknown tree":          {"nothing subscribes there", func(s *bus.Subject) { s.Tree = "other" }},
		"directed half a name":  {"it would not parse", func(s *bus.Subject) { s.Tree, s.Replica, s.Namespace = bus.TreeReplica, "r", "" }},
		"not ASCII":             {"Kubernetes names are ASCII", func(s *bus.Subject) { s.Name = "é" }},
		"directed, no replica":  {"NATS has no empty tokens", func(s *bus.Subject) { s.Tree = bus.TreeReplica }},
		"wildcard in a replica": {"it would reach all", func(s *bus.Subject) { s.Tree, s.Replica = bus.TreeReplica, "*" }},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := good
			tc.spoil(&s)
			if got, err := s.Build(); err == nil {
				t.Errorf("Build() = %q, want an error: %s", got, tc.reason)
			}
		})
	}
}

func TestParseSubjectRefuses(t *testing.T) {
	t.Parallel()
	for _, subject := range []string{
		"", ".", "mcm", "mcm.v1", "mcm.v1.c", "mcm.v2.c.hello", "other.v1.c.hello", "mcm.v1.c.nothing.p",
		"mcm.v1..hello", "mcm.v1.c.hello.more", "mcm.v1.c.driver.p.create.n", "mcm.v1.c.driver.p.create.n.m.more",
		"mcm.v1.c.driver.p.create.n.*", "mcm.v1.c.driver.p.>", "mcm.v1.c.driver.p.create..m", "mcm.v1.c.session.p.a~b",
		"mcm.v1.c.replica.p.r.create.n", "mcm.v1.c~d.hello",
	} {
		if got, err := bus.ParseSubject(subject); err == nil {
			t.Errorf("ParseSubject(%q) = %+v, want an error", subject, got)
		}
	}
}

func FuzzParseSubject(f *testing.F) {
	f.Add("mcm.v1.c1.driver.aws.create.ns.m~1~a")
	f.Add("mcm.v1.c.replica.p.r.ops")
	f.Add("mcm.v1.c.replica.p.r.create.n.m")
	f.Add("mcm.v1.c.hello")
	f.Add("mcm.v1.c.reply.p.A.B")
	f.Fuzz(func(t *testing.T, subject string) {
		s, err := bus.ParseSubject(subject)
		if err != nil {
			return
		}
		back, err := s.Build()
		if err != nil || back != subject {
			t.Fatalf("ParseSubject(%q) = %+v, but Build() = %q, %v", subject, s, back, err)
		}
	})
}

func TestVerbs(t *testing.T) {
	t.Parallel()
	for number, name := range driverv1.Operation_name {
		op := driverv1.Operation(number)
		if op == driverv1.Operation_OPERATION_UNSPECIFIED {
			continue
		}
		back, ok := bus.ParseVerb(bus.Verb(op))
		if !ok || back != op || strings.ContainsAny(bus.Verb(op), ".*> ") {
			t.Errorf("verb of %s is %q, which reads back as %v, %v", name, bus.Verb(op), back, ok)
		}
	}
	if got := bus.Verb(99); got != "unknown" {
		t.Errorf("Verb(99) = %q, want unknown", got)
	}
}
