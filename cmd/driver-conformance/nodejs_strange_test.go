package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// cutCloud says OK to everything, and has made nothing of what it is asked for. Its
// answers end in the middle, but for those that would tell of a machine's instances.
func cutCloud(t *testing.T) string {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		whole := `{"instances":[]}`
		if !strings.Contains(r.URL.RawQuery, "machine-uid") {
			whole = whole[:len(whole)/2]
		}
		if _, err := w.Write([]byte(whole)); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(srv.Close)

	return srv.URL
}

// An answer that is cut short is none: a list of it would have instances taken for
// gone, and a create of it would be a machine with an instance that nothing names.
func TestNodeJS_CutShort(t *testing.T) {
	t.Parallel()
	machine := &driverv1.Machine{Namespace: "ns", Name: "m1", Uid: "u1"}
	for example, tree := range map[string]string{"driver-nodejs": "plain", "driver-nodejs-full": "driver"} {
		t.Run(example, func(t *testing.T) {
			t.Parallel()
			srv := bustest.Server(t, embedded.Options{})
			nc := bustest.Raw(t, srv.URL())
			serveClass(t, nc, cutCloud(t))
			output := startNodeJS(t, example, srv.URL())
			bustest.Eventually(t, "the driver serves", func() bool { return strings.Contains(output.String(), "serving") })
			for name, tc := range map[string]struct {
				env     *driverv1.Envelope
				unknown bool
			}{
				"list": {&driverv1.Envelope{OperationId: "READ", Body: &driverv1.Envelope_List{List: &driverv1.ListRequest{Class: small}}}, false},
				"create": {
					&driverv1.Envelope{
						OperationId: "u1.create.0",
						Body:        &driverv1.Envelope_Create{Create: &driverv1.CreateRequest{Machine: machine, Class: small}},
					}, true,
				},
			} {
				result := resultOf(t, ask(t, nc, tree, "m-"+name, tc.env))
				if result.GetStatus().GetCode() != driverv1.Code_CODE_UNAVAILABLE || result.GetOutcomeUnknown() != tc.unknown {
					t.Errorf("%s by half an answer: %v, want UNAVAILABLE, and what came of it unknown: %t", name, result, tc.unknown)
				}
			}
		})
	}
}
