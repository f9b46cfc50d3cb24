package dispatch_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// audits listens for the rig's audit messages.
func (r *rig) audits(t *testing.T) <-chan *nats.Msg {
	t.Helper()
	nc := bustest.Raw(t, r.srv.URL())
	heard := make(chan *nats.Msg, 100)
	if _, err := nc.ChanSubscribe("mcm.v1.default.audit.>", heard); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}

	return heard
}

// TestEveryEndIsAudited has one message for each operation, however it ended.
func TestEveryEndIsAudited(t *testing.T) {
	t.Parallel()
	answers := func(code driverv1.Code, text string) func(*testing.T, *rig, *gate, *v1alpha1.Machine) {
		return func(t *testing.T, r *rig, g *gate, _ *v1alpha1.Machine) {
			t.Helper()
			g.answer = func(*replica.Task) *driverv1.Result {
				return &driverv1.Result{Status: bus.StatusOf(bus.Errorf(code, "%s", text))}
			}
			g.release()
			r.replica(t, g.handle)
		}
	}
	cancel := func(t *testing.T, r *rig, m *v1alpha1.Machine) {
		t.Helper()
		if err := r.Cancel(m.UID, dispatch.OperationID(m.UID, dispatch.Create, 0)); err != nil {
			t.Fatal(err)
		}
	}
	unknown := true // of the first attempt
	cases := map[string]struct {
		reason string
		drive  func(*testing.T, *rig, *gate, *v1alpha1.Machine)
		code   driverv1.Code
		text   string
		tries  uint32
		seen   bool // by a replica
	}{
		"failed": {
			"a driver's word is the end", answers(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no room"),
			driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no room", 1, true,
		},
		"timed out": {
			"a driver that says that nothing came of it has ended", answers(driverv1.Code_CODE_DEADLINE_EXCEEDED, "too slow"),
			driverv1.Code_CODE_DEADLINE_EXCEEDED, "too slow", 1, true,
		},
		"cancelled while it waits": {
			"no driver ever saw it",
			func(t *testing.T, r *rig, _ *gate, m *v1alpha1.Machine) {
				t.Helper()
				bustest.Eventually(t, "it waits for a driver", func() bool {
					s, _ := r.State(m.UID)

					return s.Reason != ""
				})
				cancel(t, r, m)
			},
			driverv1.Code_CODE_CANCELED, "cancelled while it waited", 0, false,
		},
		"cancelled at a driver": {
			"the driver let go",
			func(t *testing.T, r *rig, g *gate, m *v1alpha1.Machine) {
				t.Helper()
				r.replica(t, g.handle)
				bustest.Receive(t, "the create", g.entered)
				r.until(t, m.UID, dispatch.Running)
				cancel(t, r, m)
			},
			driverv1.Code_CODE_CANCELED, "", 1, true,
		},
		"unknown at first": {
			"only the end counts, not each attempt",
			func(t *testing.T, r *rig, g *gate, _ *v1alpha1.Machine) {
				t.Helper()
				g.answer = func(task *replica.Task) *driverv1.Result {
					result := created(task)
					if unknown {
						result = &driverv1.Result{OutcomeUnknown: true, Status: bus.StatusOf(
							bus.Errorf(driverv1.Code_CODE_DEADLINE_EXCEEDED, "cut off"))}
					}
					unknown = false

					return result
				}
				g.release()
				r.replica(t, g.handle)
			},
			driverv1.Code_CODE_OK, "", 2, true,
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, g, m := newRig(t), newGate(t), newMachine("m1")
			heard := r.audits(t)
			r.Start(operation(dispatch.Create, m, 0))
			tc.drive(t, r, g, m)
			state := r.until(t, m.UID, dispatch.Done)
			msg := bustest.Receive(t, "audit message", heard)
			env, err := bus.Decode(msg.Data, "")
			if err != nil {
				t.Fatal(err)
			}
			a := env.GetAudit()
			type facts struct {
				Subject, ID, Replica string
				Attempts             uint32
				Code                 driverv1.Code
			}
			want := facts{
				"mcm.v1.default.audit.virtual.create.shop.m1", "m1-uid.create.0", state.Replica, tc.tries, tc.code,
			}
			got := facts{msg.Subject, a.GetOperationId(), a.GetReplica(), a.GetAttempts(), a.GetStatus().GetCode()}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("audit, as %s (-want +got):\n%s", tc.reason, diff)
			}
			contains(t, a.GetStatus().GetMessage(), tc.text)
			if tc.seen != (state.Replica != "") {
				t.Errorf("its replica is %q", state.Replica)
			}
			if a.GetWaited().AsDuration() < 0 || a.GetTook().AsDuration() < 0 || !a.GetStartedAt().IsValid() {
				t.Errorf("its times are %v, %v and %v", a.GetStartedAt(), a.GetWaited(), a.GetTook())
			}
			if len(heard) != 0 {
				t.Error("there is another message")
			}
		})
	}
}

// TestLogLinesOfTheEnd reads what operators look for: how an operation ended, and
// where.
func TestLogLinesOfTheEnd(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		op     dispatch.Operation
		id     string
		status *driverv1.Status
		code   string
	}{
		"failed create": {
			"a person has to correct something", operation(dispatch.Create, newMachine("m1"), 0), "m1-uid.create.0",
			&driverv1.Status{Code: driverv1.Code_CODE_PERMISSION_DENIED, Message: "not allowed"}, "PermissionDenied",
		},
		"finished delete": {
			"a person asks where the machine is", operation(dispatch.Delete, newMachine("m1"), 3), "m1-uid.delete.3",
			&driverv1.Status{}, "OK",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			rep := r.replica(t, func(context.Context, *replica.Task) *driverv1.Result { return &driverv1.Result{Status: tc.status} })
			r.Start(tc.op)
			r.until(t, tc.op.Machine.UID, dispatch.Done)
			r.stop()
			lines := 0
			for line := range strings.Lines(r.logs.String()) {
				fields := map[string]any{}
				if err := json.Unmarshal([]byte(line), &fields); err != nil {
					t.Fatalf("%v: %s", err, line)
				}
				if fields["msg"] != "operation ended" {
					continue
				}
				lines++
				for key, want := range map[string]any{
					"machine": "shop/m1", "operation": string(tc.op.Kind), "operation_id": tc.id, "provider": provider,
					"attempt": 1.0, "replica": rep.Replica(), "code": tc.code, "level": "INFO",
				} {
					if fields[key] != want {
						t.Errorf("%s is %v, want %v: %s", key, fields[key], want, tc.reason)
					}
				}
			}
			if lines != 1 {
				t.Errorf("%d lines say how it ended, want one:\n%s", lines, r.logs.String())
			}
		})
	}
}

// TestLogLinesNameTheOperation reads every line of an operation that waits, loses
// a replica, and ends.
func TestLogLinesNameTheOperation(t *testing.T) {
	t.Parallel()
	r, g, m := newRig(t), newGate(t), newMachine("m1")
	r.Start(operation(dispatch.Create, m, 0))
	bustest.Eventually(t, "it waits for a driver", func() bool {
		s, _ := r.State(m.UID)

		return s.Reason != ""
	})
	lost := r.losable(t, g)
	bustest.Receive(t, "the first attempt", g.entered)
	r.until(t, m.UID, dispatch.Running)
	rep := r.replica(t, g.handle)
	lost()
	bustest.Receive(t, "the second attempt", g.entered)
	g.release()
	r.until(t, m.UID, dispatch.Done)
	r.stop()

	last := map[string]map[string]any{}
	for line := range strings.Lines(r.logs.String()) {
		fields := map[string]any{}
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if text, _ := fields["msg"].(string); strings.HasPrefix(text, "operations wait") {
			continue // is about all of a provider
		}
		for _, key := range []string{"machine", "operation", "operation_id", "provider", "attempt", "replica"} {
			if _, ok := fields[key]; !ok {
				t.Errorf("a line without %s: %s", key, line)
			}
		}
		if text, ok := fields["msg"].(string); ok {
			last[text] = fields
		}
	}
	for text, want := range map[string]map[string]any{
		"operation waits":             {"attempt": 0.0, "replica": ""},
		"a replica has the operation": {"attempt": 2.0, "replica": rep.Replica()},
		"operation ended":             {"attempt": 2.0, "replica": rep.Replica(), "code": "OK"},
	} {
		want["machine"], want["operation_id"] = "shop/m1", "m1-uid.create.0"
		for key, value := range want {
			if got := last[text][key]; got != value {
				t.Errorf("%s of the last line %q is %v, want %v", key, text, got, value)
			}
		}
	}
}
