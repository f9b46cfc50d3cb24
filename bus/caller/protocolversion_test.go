package caller_test

import (
	"strings"
	"testing"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A driver of a later protocol gets no work, although it listens where all do; the
// others of its provider get it.
func TestProtocol_StrangeReplica(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	g := optest.NewGate(t)
	g.Release()
	requests := r.StrangeReplica(t)
	_, err := r.Caller.Call(t.Context(), optest.Create("m"))
	optest.WantError(t, err, bus.OriginBus, driverv1.Code_CODE_UNAVAILABLE)
	const text = "driver replica strange of provider virtual (version 9.0.0) speaks protocol version 5 to 7, and mcm speaks 1: upgrade mcm"
	if !bus.NothingRan(err) || !strings.Contains(err.Error(), text) {
		t.Errorf("error is %v, want that nothing ran, and: %s", err, text)
	}
	if _, err := r.Caller.Call(t.Context(), optest.Status("m")); err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("error of a read is %v, want: %s", err, text)
	}

	rep := r.Replica(t, g.Handle, func(cfg *replica.Config) { cfg.Slots = 100 })
	for range 20 {
		if out := optest.WantOK(t, bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, optest.Create("m")))); out.Replica != rep.Replica() {
			t.Errorf("replica %s made the machine, want %s", out.Replica, rep.Replica())
		}
		optest.WantOK(t, bustest.Receive(t, "the status", optest.Call(t.Context(), r.Caller, optest.Status("m"))))
	}
	if n := requests.Load(); n > 0 {
		t.Errorf("the driver of a later protocol got %d requests", n)
	}
}

// A driver takes no work from a manager of a later protocol, and takes it again from
// the next one.
func TestProtocol_StrangeManager(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	g := optest.NewGate(t)
	g.Release()
	rep := r.Replica(t, g.Handle)
	announcer, err := bus.NewAnnouncer(r.Conn, optest.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	if err := announcer.Hello(&driverv1.Hello{Mcm: "later", Version: "9.0.0", ProtocolMin: 5, ProtocolMax: 7}); err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "the replica refuses", func() bool { return rep.Refusal() != nil })
	const text = "manager later (version 9.0.0) of control plane default speaks protocol version 5 to 7, and this driver speaks 1: upgrade this driver"
	if got := rep.Refusal().Error(); got != text {
		t.Errorf("refuses with %q, want %q", got, text)
	}
	for _, req := range []caller.Request{optest.Create("m"), optest.Status("m")} {
		if _, err := r.Caller.Call(t.Context(), req); !bus.NothingRan(err) {
			t.Errorf("the error is %v, want that nothing ran", err)
		}
	}
	if n := g.Runs.Load(); n > 0 {
		t.Errorf("the driver ran %d operations of a manager of a later protocol", n)
	}
	if err := announcer.Hello(&driverv1.Hello{Mcm: "upgraded"}); err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "the replica refuses nothing", func() bool { return rep.Refusal() == nil })
	optest.WantOK(t, bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, optest.Create("m"))))
}
