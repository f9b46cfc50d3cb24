package main

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk"
)

// A client that does not answer loses its stream some seconds after the deadline, and another finishes.
func TestHungClient(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, address := w.bridge()
	hung := newRawClient(t, address)
	hung.register("VirtualMachineClass")
	bustest.Eventually(t, "the replica is on the bus", func() bool { return len(w.caller.Replicas()) == 1 })
	req := w.create("virtual", "m1")
	req.Timeout = 10 * time.Second
	done := make(chan optest.Answer, 1)
	go func() { done <- w.insist(req) }()
	hung.answerList()
	hung.next("create")
	if err := hung.ended(); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "a create had no answer within 5s of its end") {
		t.Errorf("the stream ended with %v", err)
	}
	w.client("infra", address, "VirtualMachineClass")
	if out := optest.WantOK(t, <-done); out.Attempts < 2 {
		t.Errorf("the create ended at attempt %d, want one after the hung one", out.Attempts)
	}
}

// A stopped client holds nothing up for the one that was started in its place.
func TestStoppedClient(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, address := w.bridge()
	stopped := w.client("infra", address, "VirtualMachineClass")
	if err := stopped.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	w.client("infra", address, "VirtualMachineClass")
	made := w.call(w.create("virtual", "m1")).Result.GetCreate().GetInstance()
	if w.list("virtual")[made.GetProviderId()] != "m1" {
		t.Error("the instance is not listed")
	}
}

// Two streams of one kind on one connection are two replicas. One leaves in order.
func TestUnregister(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, address := w.bridge()
	c := newRawClient(t, address)
	c.register("VirtualMachineClass")
	first, asked := c.stream, c.asked
	c.open()
	c.register("VirtualMachineClass")
	bustest.Eventually(t, "both replicas are on the bus", func() bool { return len(w.caller.Replicas()) == 2 })
	c.stream = first
	c.send(registrationEnd())
	c.asked = asked
	if err := c.ended(); err == nil || !strings.Contains(err.Error(), "EOF") {
		t.Errorf("the stream ended with %v, want EOF", err)
	}
	bustest.Eventually(t, "one replica is left", func() bool { return len(w.caller.Replicas()) == 1 })
}

// A stop of the bridge lets a create finish.
func TestDrain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	program, address := w.bridge()
	w.client("infra", address, "VirtualMachineClass")
	names, none := []string{"m1"}, []string{}
	if _, err := w.admin.Patch(t.Context(), cloudapi.KnobsPatch{Hold: &names}); err != nil {
		t.Fatal(err)
	}
	done := optest.Call(t.Context(), w.caller, w.create("virtual", "m1"))
	bustest.Eventually(t, "the create is under way", func() bool {
		stats, err := w.admin.Stats(t.Context())

		return err == nil && stats.Held == 1
	})
	if err := program.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	program.await("draining: taking no new operations", "running")
	late := newRawClient(t, address)
	if err := late.ended(); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "stopping") {
		t.Errorf("a client that comes late: %v", err)
	}
	if _, err := w.admin.Patch(t.Context(), cloudapi.KnobsPatch{Hold: &none}); err != nil {
		t.Fatal(err)
	}
	optest.WantOK(t, bustest.Receive(t, "the create", done))
	bustest.Receive(t, "the end of the bridge", program.done)
	if code := program.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("the bridge ended with code %d", code)
	}
}

// An error of the cloud reaches the manager with its code.
func TestErrors(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, address := w.bridge()
	c := newRawClient(t, address)
	c.register("VirtualMachineClass")
	bustest.Eventually(t, "the replica is on the bus", func() bool { return len(w.caller.Replicas()) == 1 })
	for text, want := range map[string]driversdk.Code{
		"machine codes error: code = [ResourceExhausted] message = [no quota]": driversdk.ResourceExhausted,
		"rpc error: code = PermissionDenied desc = not allowed":                driversdk.PermissionDenied,
		"out of luck":                         driversdk.Unknown,
		"the token " + apiToken + " is wrong": driversdk.Unknown,
	} {
		done := make(chan optest.Answer, 1)
		go func() { done <- w.insist(w.create("virtual", "m")) }()
		c.answerList()
		c.send(createFailed(c.next("create").GetOperationID(), text))
		got := bustest.Receive(t, "the failure", done)
		if bus.CodeOf(got.Err) != want || strings.Contains(got.Err.Error(), apiToken) {
			t.Errorf("%q became %v (%v), want %v", text, got.Err, bus.CodeOf(got.Err), want)
		}
	}
}
