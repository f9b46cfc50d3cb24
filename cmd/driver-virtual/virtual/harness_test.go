package virtual

import (
	"log/slog"
	"net/http/httptest"
	"testing"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloud"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk"
)

// These tests call the driver's methods on the virtual cloud itself, served over
// HTTP.

const (
	testToken = "test-token"
)

// world is a cloud and what a manager would ask of it.
type world struct {
	t     *testing.T
	url   string
	admin *cloudapi.Admin
	user  *cloudapi.Client
}

func newWorld(t *testing.T, knobs cloudapi.Knobs) *world {
	t.Helper()
	c, err := cloud.New(t.Context(), cloud.Options{Knobs: knobs, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(cloud.NewHandler(c, testToken))
	t.Cleanup(server.Close)
	w := &world{t: t, url: server.URL}
	if w.admin, err = cloudapi.NewAdmin(server.URL, testToken); err != nil {
		t.Fatal(err)
	}
	if w.user, err = cloudapi.NewClient(server.URL, testToken); err != nil {
		t.Fatal(err)
	}

	return w
}

func (w *world) class() *driversdk.Class[Spec] {
	return &driversdk.Class[Spec]{
		Cluster: "east", Namespace: "ns", Name: "small",
		Spec:   Spec{Endpoint: w.url, MachineType: "small", Region: "moon", Zone: "moon-a", Tags: map[string]string{"team": "demo"}},
		Secret: driversdk.Secret{apiTokenKey: []byte(testToken)},
	}
}

// request is a machine's operation; the token differs between operations.
func (w *world) request(name, operation string) *driversdk.Request[Spec] {
	return &driversdk.Request[Spec]{
		Machine: driversdk.Machine{Namespace: "ns", Name: name, UID: "uid-" + name},
		Class:   w.class(), Cluster: "east", Owner: "owner-uid", OperationID: "uid-" + name + "." + operation, Attempt: 1,
	}
}

func (w *world) live() int {
	w.t.Helper()
	stats, err := w.admin.Stats(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}

	return stats.Live
}

// plant makes an instance behind the driver's back.
func (w *world) plant(name string, tags map[string]string) *cloudapi.Instance {
	w.t.Helper()
	i, err := w.user.Create(w.t.Context(), cloudapi.CreateRequest{
		Name: name, MachineType: "small", Region: "moon", Tags: tags, Identity: cloudapi.IdentityNone,
	})
	if err != nil {
		w.t.Fatal(err)
	}

	return i
}

func (w *world) fault(f cloudapi.Fault) {
	w.t.Helper()
	if _, err := w.admin.Patch(w.t.Context(), cloudapi.KnobsPatch{Faults: &[]cloudapi.Fault{f}}); err != nil {
		w.t.Fatal(err)
	}
}
