package dispatch

import (
	"strconv"
	"testing"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestNewest(t *testing.T) {
	t.Parallel()
	d := &Dispatcher{}
	for i := range keptAudits + 50 {
		d.recent.add(&driverv1.Audit{OperationId: strconv.Itoa(i)})
		if got := d.Newest(); len(got) != min(i+1, keptAudits) || got[len(got)-1].GetOperationId() != strconv.Itoa(i) {
			t.Fatalf("after %d outcomes, %d are remembered and the newest is %s", i+1, len(got), got[len(got)-1].GetOperationId())
		}
	}
	if got := d.Newest()[0].GetOperationId(); got != "50" {
		t.Errorf("the oldest is %s, want 50", got)
	}
}
