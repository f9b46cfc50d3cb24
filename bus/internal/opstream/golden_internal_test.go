package opstream

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus/internal/golden"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestGoldenFrames(t *testing.T) {
	t.Parallel()
	golden.Check(t, "../../testdata/wire", goldenRecords(t), "record-")
}

// goldenRecords are what stands in the operations stream.
func goldenRecords(t *testing.T) map[string]*nats.Msg {
	t.Helper()
	record := func(subject string, env *driverv1.Envelope, expected uint64, ttl time.Duration) *nats.Msg {
		m, err := Message(subject, env, expected, ttl)
		if err != nil {
			t.Fatal(err)
		}
		m.Reply = golden.Inbox

		return m
	}
	claimed, err := ClaimSubject(golden.Cluster, golden.Provider, golden.MachineID)
	if err != nil {
		t.Fatal(err)
	}
	claim := func(state driverv1.Claim_State, outcome *driverv1.Outcome) *driverv1.Envelope {
		c := &driverv1.Claim{
			OperationId: golden.Operation, Attempt: 1, Operation: driverv1.Operation_OPERATION_CREATE, Namespace: "ns", Name: "m1.example",
			Provider: golden.Provider, Replica: golden.Replica, Epoch: 3, State: state, ClaimedAt: timestamppb.New(golden.Time(0)), Outcome: outcome,
		}
		if state == driverv1.Claim_STATE_SETTLED || state == driverv1.Claim_STATE_RELEASED {
			c.EndedAt = timestamppb.New(golden.Time(4 * time.Second))
		}

		return &driverv1.Envelope{OperationId: golden.Operation, Attempt: 1, Replica: golden.Replica, Body: &driverv1.Envelope_Claim{Claim: c}}
	}

	return map[string]*nats.Msg{
		"record-claim":       record(claimed, claim(driverv1.Claim_STATE_RUNNING, nil), 0, 0),
		"record-claim-begun": record(claimed, claim(driverv1.Claim_STATE_BEGUN, nil), 42, 0),
		"record-claim-settled": record(claimed, claim(driverv1.Claim_STATE_SETTLED, &driverv1.Outcome{
			ProviderId: "virtual:///moon/i-1", NodeName: "m1.example", Addresses: golden.Instance().GetAddresses(),
			Sealed: &driverv1.Sealed{Sender: "XSENDER", Box: []byte("xkv1…")},
		}), 43, 0),
		"record-claim-failed": record(claimed, claim(driverv1.Claim_STATE_SETTLED, &driverv1.Outcome{
			Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED, RetryAfter: durationpb.New(2500 * time.Millisecond),
			Sealed: &driverv1.Sealed{Sender: "XSENDER", Box: []byte("xkv1…")},
		}), 43, 0),
		"record-claim-released": record(claimed, claim(driverv1.Claim_STATE_RELEASED, nil), 43, 0),
	}
}
