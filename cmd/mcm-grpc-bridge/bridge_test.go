package main

import (
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// Old clients of both forms make, list and remove instances, unchanged.
func TestForms(t *testing.T) {
	t.Parallel()
	for form, kind := range map[string]struct{ kind, provider string }{
		"infra":   {"AWSMachineClass", "aws"},
		"service": {"VirtualMachineClass", "virtual"},
	} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			program, address := w.bridge()
			health := program.await("health endpoint", "url")
			client := w.client(form, address, kind.kind)
			req := w.create(kind.provider, "m1")
			made := w.call(req).Result.GetCreate().GetInstance()
			if made.GetMachineUid() != bus.MachineOf(req.Body).GetUid() || made.GetNodeName() != "m1" {
				t.Errorf("made %v", made)
			}
			instances, err := w.cloud.List(t.Context(), cloudapi.Filter{})
			if err != nil || len(instances) != 1 || instances[0].ProviderID != made.GetProviderId() {
				t.Fatalf("%v, the cloud has %v", err, instances)
			}
			sum := sha256.Sum256([]byte("join by " + bootstrapToken))
			if instances[0].UserDataSHA256 != hex.EncodeToString(sum[:]) {
				t.Error("the instance did not get the machine's own bootstrap token")
			}
			if diff := cmp.Diff(map[string]string{made.GetProviderId(): "m1"}, w.list(kind.provider)); diff != "" {
				t.Errorf("listed (-want +got):\n%s", diff)
			}
			wantFigures(t, health, kind.kind, kind.provider)
			w.call(w.remove(req, made.GetProviderId()))
			w.call(w.remove(w.create(kind.provider, "m2"), "virtual:///moon/i-none")) // its NotFound is success
			if diff := cmp.Diff(map[string]string{}, w.list(kind.provider)); diff != "" {
				t.Errorf("listed after the delete (-want +got):\n%s", diff)
			}
			if err := program.terminate(); err != nil {
				t.Errorf("the bridge ended with %v", err)
			}
			bustest.Receive(t, "the end of the client", client.done)
			if !strings.Contains(client.output(), "register again") {
				t.Errorf("the client was not informed of the stop: %s", client.output())
			}
			if strings.Contains(program.output(), apiToken) || strings.Contains(program.output(), bootstrapToken) {
				t.Errorf("a secret is in the log:\n%s", program.output())
			}
		})
	}
}

// wantFigures wants the bridge's own figures, and those of the replica.
func wantFigures(t *testing.T, health, kind, provider string) {
	t.Helper()
	for path, wanted := range map[string][]string{
		"/healthz": {"ok"},
		"/readyz":  {"ok"},
		"/metrics": {
			`machinebus_grpc_bridge_streams{kind="` + kind + `",provider="` + provider + `"} 1`,
			`machinebus_driver_operations_total{code="OK",operation="create",provider="` + provider + `",stream="1"} 1`,
			"go_goroutines",
		},
	} {
		response, err := http.Get(health + path)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		response.Body.Close()
		for _, text := range wanted {
			if err != nil || !strings.Contains(string(body), text) {
				t.Errorf("%s: %v, no %q in:\n%s", path, err, text, body)
			}
		}
	}
}

// A client is killed in the middle of a create. The other one, of the other form, finds what it made.
func TestKilledMidCreate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, address := w.bridge()
	clients := map[string]*process{}
	for _, form := range []string{"infra", "service"} {
		client := w.client(form, address, "VirtualMachineClass")
		clients[client.replica] = client
	}
	early, names := cloudapi.EffectStart, []string{"m1"}
	if _, err := w.admin.Patch(t.Context(), cloudapi.KnobsPatch{CreateEffect: &early, Hold: &names}); err != nil {
		t.Fatal(err)
	}
	req := w.create("virtual", "m1")
	// Only then does the manager take it that the lost call makes no further instance.
	req.Timeout = 15 * time.Second
	holder := make(chan string, 10)
	req.OnAccepted = func(_ uint32, replica string) { holder <- replica }
	done := make(chan optest.Answer, 1)
	go func() { done <- w.insist(req) }()
	first := bustest.Receive(t, "accepted", holder)
	bustest.Eventually(t, "the cloud has the instance, and has not answered", func() bool {
		stats, err := w.admin.Stats(t.Context())

		return err == nil && stats.Held == 1 && stats.Created == 1
	})
	clients[first].kill()
	none := []string{}
	if _, err := w.admin.Patch(t.Context(), cloudapi.KnobsPatch{Hold: &none}); err != nil {
		t.Fatal(err)
	}
	out := optest.WantOK(t, <-done)
	if out.Replica == first || out.Attempts != 2 || out.Result.GetCreate().GetInstance().GetProviderId() == "" {
		t.Errorf("replica %s, of %s; attempt %d; made %v", out.Replica, first, out.Attempts, out.Result)
	}
	stats, err := w.admin.Stats(t.Context())
	if err != nil || stats.Created != 1 {
		t.Errorf("%v; %d instances were made, want one", err, stats.Created)
	}
}
