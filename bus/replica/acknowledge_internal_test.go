package replica

import (
	"log/slog"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// An acknowledged result goes, but not before its outcome is in the place of its
// claim: of a machine that is gone there is no later operation to replace that.
func TestAcknowledgedBeforeItsOutcomeIsStored(t *testing.T) {
	t.Parallel()
	const cluster, id = "default", "u.delete.2"
	acknowledge := func(s *Server, _ *operation) {
		s.onAcknowledge(bus.Subject{Cluster: cluster}, &driverv1.Envelope{Body: &driverv1.Envelope_Acknowledge{
			Acknowledge: &driverv1.Acknowledge{OperationId: id},
		}})
	}
	answer := func(data string) func(*Server, *operation) {
		return func(s *Server, op *operation) { s.claims.onOutcomeStored(op, op.claim, &nats.Msg{Data: []byte(data)}) }
	}
	stored := answer(`{"stream":"S","seq":9}`)
	refused := answer(`{"error":{"err_code":10071,"description":"wrong last sequence: 12"}}`)
	failed := answer(`{"error":{"err_code":10008,"description":"JetStream system temporarily unavailable"}}`)
	underWay := answer(`{"error":{"err_code":10164,"description":"wrong last sequence"}}`)
	for name, tc := range map[string]struct {
		reason string
		steps  []func(*Server, *operation)
		kept   bool
	}{
		"acknowledged":             {"the outcome is still to be stored", []func(*Server, *operation){acknowledge}, true},
		"not stored at first":      {"it is tried again", []func(*Server, *operation){acknowledge, failed}, true},
		"stored at last":           {"nothing is left to do", []func(*Server, *operation){acknowledge, failed, stored}, false},
		"stored first":             {"nothing is left to do", []func(*Server, *operation){stored, acknowledge}, false},
		"stored":                   {"mcm may not have it yet", []func(*Server, *operation){stored}, true},
		"the claim is another's":   {"there is nothing to store any more", []func(*Server, *operation){acknowledge, refused}, false},
		"a write is under way":     {"that may yet be lost, and the claim would say for ever that it runs", []func(*Server, *operation){acknowledge, underWay}, true},
		"and stored then":          {"nothing is left to do", []func(*Server, *operation){acknowledge, underWay, stored}, false},
		"another's, and not known": {"mcm may not have it yet", []func(*Server, *operation){refused}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			op := &operation{cluster: cluster, id: id, claim: 7, result: &driverv1.Result{}}
			ops, p := newOperations(1, slog.New(slog.DiscardHandler)), part{log: slog.New(slog.DiscardHandler)}
			ops.byID[op.key()] = op
			s := &Server{part: p, ops: ops, claims: &claims{part: p, ops: ops}}
			for _, step := range tc.steps {
				step(s, op)
			}
			if _, kept := ops.byID[op.key()]; kept != tc.kept {
				t.Errorf("kept = %t, want %t: %s", kept, tc.kept, tc.reason)
			}
		})
	}
}
