package caller_test

import (
	"context"
	"strings"
	"testing"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// An impossible answer is one that says nothing about what the cloud has done.
var impossible = map[string]struct {
	end  func() *driverv1.Result
	text []string
}{
	"panic":   {func() *driverv1.Result { panic("secret value") }, []string{"panicked", "the log of replica"}}, //nolint:forbidigo // a driver that panics
	"nothing": {func() *driverv1.Result { return nil }, []string{"no result"}},
	"not UTF-8": {
		func() *driverv1.Result { return stating("\xff") }, []string{"cannot be sent", "UTF-8"},
	},
	"too large": {
		func() *driverv1.Result { return stating(strings.Repeat("x", 5<<20)) },
		[]string{"cannot be sent", "last known state: 5242880", "limit 1044480", "smaller state"},
	},
	"too large for its record": {
		func() *driverv1.Result { return stating(strings.Repeat("x", 1<<20-200)) }, []string{"cannot be sent", "smaller state"},
	},
}

func stating(state string) *driverv1.Result {
	return &driverv1.Result{Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{
		Instance: &driverv1.Instance{ProviderId: "virtual://m"}, LastKnownState: state,
	}}}
}

// Once a call may be at the cloud, an answer that says nothing about it leaves the
// outcome unknown, and says so to all alike: to mcm, in the stream, in sessions. The
// same operation is tried again, and looks first.
func TestImpossibleAnswer(t *testing.T) {
	t.Parallel()
	for name, tc := range impossible {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := optest.NewStoredRig(t)
			looked := make(chan bool, 1)
			rep := r.Replica(t, func(_ context.Context, task *replica.Task) *driverv1.Result {
				if task.Request.GetRecover() {
					looked <- true

					return optest.Created(task)
				}
				if err := task.BeginMutation(); err != nil {
					return &driverv1.Result{Status: bus.StatusOf(err)}
				}

				return tc.end()
			})
			req := optest.Create("m")
			out, err := r.Caller.Call(t.Context(), req)
			optest.WantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_INTERNAL)
			for _, text := range tc.text {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("error = %q, want one with %q", err, text)
				}
			}
			if strings.Contains(err.Error(), "secret value") {
				t.Errorf("error = %q has what is for the replica's own log", err)
			}
			if !out.Result.GetOutcomeUnknown() || out.Result.GetNoEffect() || out.Result.GetCreate() != nil {
				t.Errorf("result = %v, want that its outcome is not known", out.Result)
			}
			bustest.Eventually(t, "the claim is let go", func() bool {
				c := r.ClaimOf(t, req)

				return c.GetState() == driverv1.Claim_STATE_RELEASED && c.GetOutcome() == nil
			})
			bustest.Eventually(t, "the session does not list it", func() bool {
				return r.Session(rep).GetRunning() == 0 && len(r.Session(rep).GetOperations()) == 0
			})
			req.Recover, req.Attempt, req.Until = true, out.Attempts, out.Until
			optest.WantOK(t, bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, req)))
			bustest.Receive(t, "the attempt that looks first", looked)
		})
	}
}

// Nothing was begun: then a failure is one, and another operation may follow.
func TestImpossibleAnswer_BeforeItBegan(t *testing.T) {
	t.Parallel()
	for name, tc := range impossible {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := optest.NewStoredRig(t)
			r.Replica(t, func(context.Context, *replica.Task) *driverv1.Result { return tc.end() })
			req := optest.Create("m")
			out, err := r.Caller.Call(t.Context(), req)
			optest.WantError(t, err, bus.OriginDriver, driverv1.Code_CODE_INTERNAL)
			bustest.Eventually(t, "the same is stored", func() bool {
				c := r.ClaimOf(t, req)

				return c.GetState() == driverv1.Claim_STATE_SETTLED && c.GetOutcome().GetCode() == driverv1.Code_CODE_INTERNAL &&
					c.GetOutcome().GetProviderId() == ""
			})
			if out.Result.GetOutcomeUnknown() {
				t.Errorf("result = %v, want a known failure", out.Result)
			}
		})
	}
}

// A refusal in many words is a refusal: its text is cut to what a manager takes of it.
func TestLongRefusal(t *testing.T) {
	t.Parallel()
	r := optest.NewStoredRig(t)
	r.Replica(t, func(_ context.Context, task *replica.Task) *driverv1.Result {
		if err := task.BeginMutation(); err != nil {
			return &driverv1.Result{Status: bus.StatusOf(err)}
		}

		return &driverv1.Result{Status: &driverv1.Status{
			Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED, Message: "no quota" + strings.Repeat("!", 2<<20),
		}}
	})
	_, err := r.Caller.Call(t.Context(), optest.Create("m"))
	optest.WantError(t, err, bus.OriginDriver, driverv1.Code_CODE_RESOURCE_EXHAUSTED)
	if !strings.HasPrefix(err.Error(), "no quota!") || len(err.Error()) > 9<<10 {
		t.Errorf("text of %d bytes, %.20q…; want the beginning of the driver's own", len(err.Error()), err.Error())
	}
}
