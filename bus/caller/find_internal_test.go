package caller

import (
	"testing"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestHolds(t *testing.T) {
	t.Parallel()
	runs, fenced := &driverv1.OperationState{}, &driverv1.OperationState{Fenced: true}
	for name, tc := range map[string]struct {
		ops    []*driverv1.OperationState
		want   bool
		reason string
	}{
		"nothing": {reason: "it says that it does not have it"},
		"runs":    {ops: []*driverv1.OperationState{runs}, want: true, reason: "its frames were lost"},
		"fenced":  {ops: []*driverv1.OperationState{fenced}, reason: "another attempt may run, and has the claim"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := holdsOperation(&driverv1.OpsResponse{Operations: tc.ops}); got != tc.want {
				t.Errorf("holds = %t, want %t: %s", got, tc.want, tc.reason)
			}
		})
	}
}
