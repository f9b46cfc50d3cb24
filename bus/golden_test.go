package bus_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/reflect/protopath"
	"google.golang.org/protobuf/reflect/protorange"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/golden"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// goldenDir is named by PROTOCOL.md: drivers in other languages test with it.
const goldenDir = "testdata/wire"

// TestGoldenFrames compares what drivers and managers say beside operations. Only the
// encoding of these frames is made by the code that sends them.
func TestGoldenFrames(t *testing.T) {
	t.Parallel()
	golden.Check(t, goldenDir, goldenNotices(t), "fetch", "notice-")
}

// goldenNotices are fetches, sessions, and the notices of mcm.
func goldenNotices(t *testing.T) map[string]*nats.Msg {
	t.Helper()
	class, nonce := golden.Class(), []byte("0123456789abcdef")
	fetch := func(what string, env *driverv1.Envelope) *nats.Msg {
		return golden.Encoded(t, bus.Pattern(golden.Cluster, bus.TreeFetch, golden.Provider, what), golden.Inbox, env)
	}
	answer := func(env *driverv1.Envelope) *nats.Msg { return golden.Encoded(t, golden.Inbox, "", env) }
	box := &driverv1.Sealed{Sender: "XSENDER", Box: []byte("xkv1…")}
	session := bus.Pattern(golden.Cluster, bus.TreeSession, golden.Provider, golden.Replica)

	return map[string]*nats.Msg{
		"fetch-class": fetch("class", &driverv1.Envelope{Body: &driverv1.Envelope_FetchClass{FetchClass: &driverv1.FetchClassRequest{Class: class.GetClass()}}}),
		"fetch-secret": fetch("secret", &driverv1.Envelope{Body: &driverv1.Envelope_FetchSecret{FetchSecret: &driverv1.FetchSecretRequest{
			Class: class.GetClass(), Secret: class.GetSecret(), Recipient: "XRECIPIENT", Nonce: nonce,
		}}}),
		"fetch-bootstrap": fetch("bootstrap", &driverv1.Envelope{Body: &driverv1.Envelope_FetchBootstrap{FetchBootstrap: &driverv1.FetchBootstrapRequest{
			OperationId: golden.Operation, Namespace: "ns", Machine: "m1.example", MachineUid: golden.MachineID, Recipient: "XRECIPIENT", Nonce: nonce,
		}}}),
		"fetched-class": answer(&driverv1.Envelope{Body: &driverv1.Envelope_FetchedClass{FetchedClass: &driverv1.FetchClassResponse{
			Status: &driverv1.Status{}, Class: &driverv1.Class{
				Reference: class.GetClass(), Provider: golden.Provider, ProviderSpec: []byte(`{"region":"moon"}`), Labels: map[string]string{"a": "b"},
				Annotations: map[string]string{"k": "v"}, NodeTemplate: &driverv1.ClassNodeTemplate{
					InstanceType: "small", Region: "moon", Zone: "moon-a", Architecture: "amd64",
					Capacity: map[string]string{"cpu": "2"}, VirtualCapacity: map[string]string{"example.com/gpu": "1"},
				},
			},
		}}}),
		"fetched-secret":    answer(&driverv1.Envelope{Body: &driverv1.Envelope_FetchedSecret{FetchedSecret: &driverv1.FetchSecretResponse{Status: &driverv1.Status{}, Sealed: box}}}),
		"fetched-bootstrap": answer(&driverv1.Envelope{Body: &driverv1.Envelope_FetchedBootstrap{FetchedBootstrap: &driverv1.FetchBootstrapResponse{Status: &driverv1.Status{}, Sealed: box}}}),
		"notice-session": golden.Encoded(t, session, "", &driverv1.Envelope{Replica: golden.Replica, Body: &driverv1.Envelope_Session{Session: &driverv1.Session{
			Cluster: golden.Cluster, Provider: golden.Provider, Replica: golden.Replica, Sequence: 12, StartedAt: timestamppb.New(golden.Time(-time.Minute)),
			Version: "0.1.0", Protocol: bus.Spoken.Highest, ProtocolMin: bus.Spoken.Lowest, Slots: 8, Running: 1, ClaimSequence: 7, ClaimStreamMade: timestamppb.New(golden.Time(-60)), CreateIdentity: driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN,
			SettleTime: durationpb.New(5 * time.Second), Kind: "Small", ApiVersions: []string{"example.com/v1"},
			Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_DELETE, driverv1.Operation_OPERATION_LIST},
			Operations:   []*driverv1.OperationState{golden.State(false)}, Hostname: "h1", Epoch: 3,
			Deleting: 1, Omitted: 2,
		}}}),
		"notice-session-last": golden.Encoded(t, session, "", &driverv1.Envelope{Replica: golden.Replica, Body: &driverv1.Envelope_Session{Session: &driverv1.Session{
			Cluster: golden.Cluster, Provider: golden.Provider, Replica: golden.Replica, Sequence: 99, Protocol: bus.Spoken.Highest, ProtocolMin: bus.Spoken.Lowest, Slots: 8, Draining: true, Stopped: true,
		}}}),
		"notice-hello": golden.Encoded(t, bus.Pattern(golden.Cluster, bus.TreeHello), "", &driverv1.Envelope{Body: &driverv1.Envelope_Hello{Hello: &driverv1.Hello{
			Cluster: golden.Cluster, ClusterUid: "k-uid", Epoch: 3, ProtocolMin: bus.Spoken.Lowest, ProtocolMax: bus.Spoken.Highest, Key: "XKEY", Mcm: "mcm-0", Version: "0.1.0", Scope: "ns",
		}}}),
		"notice-changed": golden.Encoded(t, bus.Pattern(golden.Cluster, bus.TreeChanged, golden.Provider), "", &driverv1.Envelope{Body: &driverv1.Envelope_Changed{
			Changed: &driverv1.Changed{Kind: driverv1.Changed_KIND_SECRET, Reference: class.GetSecret()},
		}}),
		"notice-audit": golden.Encoded(t, "mcm.v1.default.audit.nodejs.create.ns.m1~example", "", &driverv1.Envelope{
			OperationId: golden.Operation, Body: &driverv1.Envelope_Audit{Audit: &driverv1.Audit{
				OperationId: golden.Operation, Operation: driverv1.Operation_OPERATION_CREATE, Cluster: golden.Cluster, Provider: golden.Provider,
				Namespace: "ns", Name: "m1.example", Attempts: 2, Replica: golden.Replica, Status: &driverv1.Status{}, StartedAt: timestamppb.New(golden.Time(0)),
				Waited: durationpb.New(10 * time.Millisecond), Took: durationpb.New(4 * time.Second), ProviderId: "virtual:///moon/i-1",
			}},
		}),
	}
}

// TestGoldenBodies keeps a body from being added without a frame.
func TestGoldenBodies(t *testing.T) {
	t.Parallel()
	bodies := (&driverv1.Envelope{}).ProtoReflect().Descriptor().Oneofs().ByName("body")
	seen := map[protoreflect.Name]bool{}
	for frame, env := range golden.Read(t, goldenDir) {
		if body := env.ProtoReflect().WhichOneof(bodies); body != nil {
			seen[body.Name()] = true
		} else {
			t.Errorf("frame %s has no body that this version knows", frame)
		}
	}
	for i := range bodies.Fields().Len() {
		if name := bodies.Fields().Get(i).Name(); !seen[name] {
			t.Errorf("no golden frame has the body %s", name)
		}
	}
}

// goldenless are the fields that no golden frame has.
var goldenless = map[protoreflect.FullName]string{
	"machinebus.driver.v1.FetchSecretResponse.unsealed":    "it is what seal.json seals, in the clear: only where mcm was told to",
	"machinebus.driver.v1.FetchBootstrapResponse.unsealed": "the same",
	"machinebus.driver.v1.OperationState.provider":         "mcm tells people, and drivers neither send nor read it",
	"machinebus.driver.v1.OperationState.stuck":            "it is for people, and a driver need not send it",
}

// TestGoldenFields keeps a field from being added that no frame has.
func TestGoldenFields(t *testing.T) {
	t.Parallel()
	set := map[protoreflect.FullName]bool{}
	for _, env := range golden.Read(t, goldenDir) {
		if err := protorange.Range(env.ProtoReflect(), func(p protopath.Values) error {
			if step := p.Index(-1).Step; step.Kind() == protopath.FieldAccessStep {
				set[step.FieldDescriptor().FullName()] = true
			}

			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	for _, field := range fieldsBelow((&driverv1.Envelope{}).ProtoReflect().Descriptor(), map[protoreflect.FullName]bool{}) {
		if reason, exempt := goldenless[field]; exempt == set[field] {
			t.Errorf("%s: golden frames have it: %t; why they need not: %q", field, set[field], reason)
		}
	}
}

// fieldsBelow returns the fields of a message of ours, and those of the messages in it.
func fieldsBelow(m protoreflect.MessageDescriptor, seen map[protoreflect.FullName]bool) []protoreflect.FullName {
	if seen[m.FullName()] || !strings.HasPrefix(string(m.FullName()), "machinebus.") {
		return nil
	}
	seen[m.FullName()] = true
	var fields []protoreflect.FullName
	for i := range m.Fields().Len() {
		field := m.Fields().Get(i)
		fields = append(fields, field.FullName())
		if field.Message() != nil && !field.IsMap() && goldenless[field.FullName()] == "" {
			fields = append(fields, fieldsBelow(field.Message(), seen)...)
		}
	}

	return fields
}
