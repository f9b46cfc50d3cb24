package replica

import (
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/golden"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestGoldenFrames(t *testing.T) {
	t.Parallel()
	golden.Check(t, "../testdata/wire", goldenAnswers(t), "answer-")
}

// goldenAnswers are what a replica answers, as its outbox sends it.
func goldenAnswers(t *testing.T) map[string]*nats.Msg {
	t.Helper()
	w := &golden.Wire{}
	s := &outbox{part: part{conn: w, cfg: &Config{Replica: golden.Replica}, log: slog.New(slog.DiscardHandler)}}
	in := func(contentType string, env *driverv1.Envelope) *nats.Msg {
		if err := s.sendTo(golden.Reply, contentType, golden.Operation, 1, env); err != nil {
			t.Fatal(err)
		}

		return w.Take()
	}
	answer := func(env *driverv1.Envelope) *nats.Msg { return in("", env) }
	result := func(r *driverv1.Result) *nats.Msg { return answer(bus.ResultFrame(r)) }
	unknown := bus.Failure(driverv1.Code_CODE_UNAVAILABLE, "the cloud's answer was lost")
	unknown.OutcomeUnknown, unknown.Status.RetryAfter = true, durationpb.New(2500*time.Millisecond)
	earlier := bus.Failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota, and an earlier call may still run")
	earlier.OutcomeUnknown, earlier.NoEffect = true, true
	ok, instance := &driverv1.Status{}, golden.Instance()
	list := func() *driverv1.Result {
		return &driverv1.Result{Status: ok, Payload: &driverv1.Result_List{List: &driverv1.ListResponse{Instances: []*driverv1.Instance{instance, instance}}}}
	}
	ended, fenced := golden.State(true), golden.State(false)
	ended.Code, fenced.Fenced, fenced.LastProgress = driverv1.Code_CODE_RESOURCE_EXHAUSTED, true, "creating instance m1"
	uninitialized := bus.Failure(driverv1.Code_CODE_UNINITIALIZED, "not initialised")
	uninitialized.Payload = &driverv1.Result_InstanceStatus{InstanceStatus: &driverv1.StatusResponse{Instance: instance}}

	frames := map[string]*nats.Msg{
		"answer-accepted":         answer(acceptedFrame()),
		"answer-progress":         answer(&driverv1.Envelope{Body: &driverv1.Envelope_Progress{Progress: &driverv1.Progress{Message: "creating instance m1"}}}),
		"answer-busy":             answer(&driverv1.Envelope{Body: &driverv1.Envelope_Busy{Busy: &driverv1.Busy{Reason: driverv1.BusyReason_BUSY_REASON_CLAIM}}}),
		"answer-failed":           result(bus.Failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota\nfor small")),
		"answer-failed-json":      in(bus.ContentTypeJSON, bus.ResultFrame(bus.Failure(driverv1.Code_CODE_UNAUTHENTICATED, "the token is refused"))),
		"answer-outcome-unknown":  result(unknown),
		"answer-no-effect":        result(earlier),
		"answer-status-not-ready": result(uninitialized),
		"answer-create": result(&driverv1.Result{Status: ok, Payload: &driverv1.Result_Create{
			Create: &driverv1.CreateResponse{Instance: instance, LastKnownState: "state"},
		}}),
		"answer-initialize": result(&driverv1.Result{Status: ok, Payload: &driverv1.Result_Initialize{Initialize: &driverv1.InitializeResponse{
			Instance: instance, LastKnownState: "state",
		}}}),
		"answer-delete": result(&driverv1.Result{Status: ok, Payload: &driverv1.Result_Delete{
			Delete: &driverv1.DeleteResponse{LastKnownState: "state"},
		}}),
		"answer-list":         result(list()),
		"answer-list-json":    in(bus.ContentTypeJSON, bus.ResultFrame(list())),
		"answer-volumeids":    result(&driverv1.Result{Status: ok, Payload: &driverv1.Result_VolumeIds{VolumeIds: &driverv1.VolumeIDsResponse{VolumeIds: []string{"v1"}}}}),
		"answer-validate":     result(&driverv1.Result{Status: ok, Payload: &driverv1.Result_Validate{Validate: &driverv1.ValidateResponse{Warnings: []string{"zone is deprecated"}}}}),
		"answer-migrateclass": result(&driverv1.Result{Status: ok, Payload: &driverv1.Result_MigrateClass{MigrateClass: &driverv1.MigrateClassResponse{MachineClass: []byte(`{}`)}}}),
		"answer-ops": answer(&driverv1.Envelope{Body: &driverv1.Envelope_OpsHeld{OpsHeld: &driverv1.OpsResponse{
			Operations: []*driverv1.OperationState{golden.State(true)}, Result: &driverv1.Result{Status: ok},
		}}}),
		"answer-ops-all": answer(&driverv1.Envelope{Body: &driverv1.Envelope_OpsHeld{OpsHeld: &driverv1.OpsResponse{
			Operations: []*driverv1.OperationState{fenced, ended}, Omitted: 4,
		}}}),
		"answer-ops-nothing": answer(&driverv1.Envelope{Body: &driverv1.Envelope_OpsHeld{OpsHeld: &driverv1.OpsResponse{}}}),
	}
	for verb, response := range golden.NodeGroupResponses() {
		env := bus.ResultFrame(&driverv1.Result{Payload: &driverv1.Result_NodeGroups{NodeGroups: response}})
		if err := s.sendTo(golden.GatewayReply, "", "WISH", 1, env); err != nil {
			t.Fatal(err)
		}
		frames["answer-nodegroup-"+verb] = w.Take()
	}

	return frames
}
