package caller

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/golden"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestGoldenFrames(t *testing.T) {
	t.Parallel()
	golden.Check(t, "../testdata/wire", goldenRequests(t), "request-", "control-")
}

// goldenRequests are what mcm sends to replicas, as Caller does.
func goldenRequests(t *testing.T) map[string]*nats.Msg {
	t.Helper()
	w := &golden.Wire{}
	c := &Caller{conn: w, cfg: Config{Cluster: golden.Cluster, Owner: golden.Owner, Epoch: func() uint64 { return 3 }}}
	c.streams = &streams{c: c, seen: map[string]*stream{golden.Provider: {made: golden.Time(-60)}}}
	frames := map[string]*nats.Msg{}
	for name, k := range goldenCalls() {
		k.c, k.op, k.number = c, bus.OperationOf(k.req.Body), max(k.number, 1)
		k.req.Provider, k.req.Namespace, k.req.Timeout = golden.Provider, "ns", time.Minute
		if k.req.OperationID == "" {
			k.req.OperationID = "READ"
		}
		replica := ""
		if k.tree == bus.TreeReplica {
			replica = golden.Replica
		}
		subject, err := k.subject(k.tree, replica)
		if err == nil {
			err = c.publish(subject, golden.Reply, k.req.TraceParent, k.envelope(k.tree, golden.Time(0)))
		}
		if err != nil {
			t.Fatal(err)
		}
		frames[name] = w.Take()
	}
	gateway := &Caller{conn: w, cfg: Config{Cluster: golden.Cluster, Epoch: func() uint64 { return 0 }}}
	for verb, req := range golden.NodeGroupRequests() {
		body := &driverv1.Envelope{Body: &driverv1.Envelope_NodeGroups{NodeGroups: req}}
		k := &call{
			c: gateway, op: bus.OperationOf(body), number: 1,
			req: &Request{Provider: golden.Provider, OperationID: "WISH", Timeout: 5 * time.Second, Body: body},
		}
		subject, err := k.subject(bus.TreeNodeGroup, "")
		if err == nil {
			err = gateway.publish(subject, golden.GatewayReply, "", k.envelope(bus.TreeNodeGroup, golden.Time(0)))
		}
		if err != nil {
			t.Fatal(err)
		}
		frames["request-nodegroup-"+verb] = w.Take()
	}
	if err := c.Acknowledge(golden.Provider, golden.Replica, golden.Operation); err != nil {
		t.Fatal(err)
	}
	frames["control-ack"] = w.Take()
	if err := c.control(golden.Provider, golden.Replica, bus.VerbCancel, "", &driverv1.Envelope{
		OperationId: golden.Operation, Body: &driverv1.Envelope_Cancel{Cancel: &driverv1.Cancel{OperationId: golden.Operation}},
	}); err != nil {
		t.Fatal(err)
	}
	frames["control-cancel"] = w.Take()
	frames["control-ops"] = golden.Encoded(t, "mcm.v1.default.replica.nodejs.r1.ops", golden.Reply, &driverv1.Envelope{
		OperationId: golden.Operation, Attempt: 1, Epoch: 3, Body: &driverv1.Envelope_Ops{Ops: &driverv1.OpsRequest{OperationId: golden.Operation}},
	})

	return frames
}

// A goldenCall is a call about to be sent to a tree.
type goldenCall struct {
	call

	tree bus.Tree
}

func goldenCalls() map[string]*goldenCall {
	machine, class := golden.Machine(), golden.Class()
	made := golden.Machine()
	made.ProviderId, made.NodeName, made.LastKnownState = "virtual:///moon/i-1", "m1.example", "state"
	of := func(tree bus.Tree, name, id string, body *driverv1.Envelope) *goldenCall {
		return &goldenCall{tree: tree, call: call{req: &Request{Name: name, OperationID: id, Body: body}}}
	}
	one := func(id string, body *driverv1.Envelope) *goldenCall {
		return of(bus.TreeDriver, "m1.example", id, body)
	}
	cls := func(body *driverv1.Envelope) *goldenCall { return of(bus.TreeDriver, "small", "", body) }
	create := func(tree bus.Tree, replaces *uint64) *goldenCall {
		k := of(tree, "m1.example", golden.Operation, &driverv1.Envelope{
			Body: &driverv1.Envelope_Create{Create: &driverv1.CreateRequest{Machine: machine, Class: class}},
		})
		k.op, k.replaces = driverv1.Operation_OPERATION_CREATE, replaces

		return k
	}
	after := func(sequence uint64) *uint64 { return &sequence }
	replacing := func(k *goldenCall, sequence uint64) *goldenCall {
		k.replaces = after(sequence)

		return k
	}
	traced, recovering, attached, doubted := create(bus.TreeDriver, after(0)), create(bus.TreeReplica, after(43)), create(bus.TreeReplica, nil), create(bus.TreeReplica, after(45))
	traced.req.TraceParent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	recovering.number, recovering.recover = 2, true
	attached.recover = true
	doubted.number, doubted.recover, doubted.earlierMayRun = 3, true, true

	return map[string]*goldenCall{
		"request-create": traced, "request-create-plain": create(bus.TreePlain, after(0)),
		"request-create-recover": recovering, "request-create-attach": attached, "request-create-earlier-may-run": doubted,
		"request-initialize": replacing(one(golden.MachineID+".initialize.1", &driverv1.Envelope{Body: &driverv1.Envelope_Initialize{
			Initialize: &driverv1.InitializeRequest{Machine: made, Class: class},
		}}), 44),
		"request-delete": replacing(one(golden.MachineID+".delete.2", &driverv1.Envelope{Body: &driverv1.Envelope_Delete{
			Delete: &driverv1.DeleteRequest{Machine: made, Class: class},
		}}), 46),
		"request-status":   one("", &driverv1.Envelope{Body: &driverv1.Envelope_Status{Status: &driverv1.StatusRequest{Machine: made, Class: class}}}),
		"request-list":     cls(&driverv1.Envelope{Body: &driverv1.Envelope_List{List: &driverv1.ListRequest{Class: class}}}),
		"request-validate": cls(&driverv1.Envelope{Body: &driverv1.Envelope_Validate{Validate: &driverv1.ValidateRequest{Class: class}}}),
		"request-volumeids": one("", &driverv1.Envelope{Body: &driverv1.Envelope_VolumeIds{VolumeIds: &driverv1.VolumeIDsRequest{
			Volumes: []*driverv1.PersistentVolume{{Name: "pv1", Spec: []byte(`{"csi":{"driver":"d","volumeHandle":"v1"}}`)}},
		}}}),
		"request-migrateclass": cls(&driverv1.Envelope{Body: &driverv1.Envelope_MigrateClass{MigrateClass: &driverv1.MigrateClassRequest{
			Kind: "OldMachineClass", ApiVersion: "machine.sapcloud.io/v1alpha1", Object: []byte(`{"spec":{}}`),
		}}}),
	}
}
