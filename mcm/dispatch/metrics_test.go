package dispatch

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// TestDriverRequests has the figures as drivers of the machine controller manager
// tell them.
func TestDriverRequests(t *testing.T) {
	t.Parallel()
	d := New(t.Context(), nil, nil)
	one := &caller.Outcome{Attempts: 1, Took: 3 * time.Second}
	for _, kind := range []Kind{Create, Initialize, Delete, Status} {
		d.metrics.finished("virtual", kind, nil, one)
	}
	d.metrics.asked("virtual", listKind, nil, one)
	d.metrics.finished("virtual", Create, Errorf(ResourceExhausted, "quota"), one)
	d.metrics.finished("virtual", Status, Errorf(NotFound, "gone"), one)
	d.metrics.finished("virtual", Delete, Errorf(Canceled, "in the queue"), &caller.Outcome{})                          // no driver was ever asked
	d.metrics.finished("virtual", Create, &bus.Error{Code: driverv1.Code_CODE_UNAVAILABLE, Origin: bus.OriginBus}, one) // nor here
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(d.Collectors()...)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if !strings.HasPrefix(f.GetName(), "mcm_cloud_api_") {
				continue
			}
			text := f.GetName()
			for _, l := range m.GetLabel() {
				text += fmt.Sprintf(" %s=%s", l.GetName(), l.GetValue())
			}
			got = append(got, fmt.Sprintf("%s %v", text, m.GetHistogram().GetSampleSum()+m.GetCounter().GetValue()))
		}
	}
	want := []string{
		"mcm_cloud_api_driver_request_duration_seconds operation=create_machine provider=virtual 3",
		"mcm_cloud_api_driver_request_duration_seconds operation=delete_machine provider=virtual 3",
		"mcm_cloud_api_driver_request_duration_seconds operation=get_machine_status provider=virtual 3",
		"mcm_cloud_api_driver_request_duration_seconds operation=initialize_machine provider=virtual 3",
		"mcm_cloud_api_driver_request_duration_seconds operation=list_machine provider=virtual 3",
		"mcm_cloud_api_driver_requests_failed_total error_code=5 operation=get_machine_status provider=virtual 1",
		"mcm_cloud_api_driver_requests_failed_total error_code=8 operation=create_machine provider=virtual 1",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("figures (-want +got):\n%s", diff)
	}
}
