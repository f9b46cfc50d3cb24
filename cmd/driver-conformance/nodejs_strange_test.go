package main

import (
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// strangeCloud says OK to everything, and has made nothing of what it is asked for. Of
// its answers only those make sense that list a machine's instances.
func strangeCloud(t *testing.T, answer func(http.ResponseWriter)) string {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.RawQuery, "machine-uid") {
			_, _ = w.Write([]byte(noInstances))
		} else {
			answer(w)
		}
	}))
	t.Cleanup(srv.Close)

	return srv.URL
}

const noInstances = `{"instances":[]}`

// An answer that is cut short, or says nothing of instances, is none: a list of it would
// have instances taken for gone, and a create of it would be a machine with an instance
// that nothing names.
func TestNodeJS_StrangeAnswers(t *testing.T) {
	t.Parallel()
	half := []byte(noInstances[:len(noInstances)/2])
	answers := map[string]struct {
		answer func(http.ResponseWriter)
		code   driverv1.Code
	}{
		"cut off": {func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", strconv.Itoa(len(noInstances)))
			_, _ = w.Write(half)
		}, driverv1.Code_CODE_UNAVAILABLE},
		"no JSON":      {func(w http.ResponseWriter) { _, _ = w.Write(half) }, driverv1.Code_CODE_UNAVAILABLE},
		"another page": {func(w http.ResponseWriter) { _, _ = w.Write([]byte("{}")) }, driverv1.Code_CODE_INTERNAL},
	}
	for example, tree := range map[string]string{"driver-nodejs": "plain", "driver-nodejs-full": "driver"} {
		for name, tc := range answers {
			t.Run(example+"/"+name, func(t *testing.T) {
				t.Parallel()
				srv := bustest.Server(t, embedded.Options{})
				nc := bustest.Raw(t, srv.URL())
				newOperations(t, nc)
				serveClass(t, nc, strangeCloud(t, tc.answer))
				output := startNodeJS(t, example, srv.URL())
				bustest.Eventually(t, "the driver serves", func() bool { return strings.Contains(output.String(), "serving") })
				machine := &driverv1.Machine{Namespace: "ns", Name: "m1", Uid: "u1"}
				list := &driverv1.Envelope{OperationId: "READ", Body: &driverv1.Envelope_List{List: &driverv1.ListRequest{Class: small}}}
				create := &driverv1.Envelope{
					OperationId: "u1.create.0",
					Body:        &driverv1.Envelope_Create{Create: &driverv1.CreateRequest{Machine: machine, Class: small}},
				}
				for _, env := range []*driverv1.Envelope{list, create} {
					result := resultOf(t, ask(t, nc, tree, "m1", env))
					if result.GetStatus().GetCode() != tc.code || result.GetOutcomeUnknown() != (env == create) {
						t.Errorf("%s was answered %v, want %s, and that what came of a create is not known", env.GetOperationId(), result, tc.code)
					}
				}
			})
		}
	}
}
