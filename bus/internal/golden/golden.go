// Package golden holds the wire format still: its files say what drivers out there send and
// understand. Each package compares the frames that its own code makes with them. It is for
// tests only.
package golden

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

var update = flag.Bool("update", false, "write the golden files of this package again")

// What the frames are about. Maps in them have one entry: more have no fixed order.
const (
	Cluster   = "default"
	Provider  = "nodejs"
	Replica   = "r1"
	MachineID = "0b4f6a52-6a1e-4c0e-9f0e-2f6f4c3f9a11"
	Owner     = "9d3f7c1e-2b54-4a86-8d0a-5c1b7e6f4a22"
	Operation = MachineID + ".create.0"
	Reply     = "mcm.v1.default.reply.nodejs.CALLER.TOKEN"
	// GatewayReply is where requests about node groups are answered.
	GatewayReply = "mcm.v1.default.reply.nodejs.autoscaler.TOKEN"
	Inbox        = "_INBOX_driver.nodejs.X.1"
)

// A File is one frame as it goes over the wire.
type File struct {
	Subject string              `json:"subject"`
	Reply   string              `json:"reply,omitempty"`
	Headers map[string][]string `json:"headers,omitempty"`
	// Protobuf is the payload in hexadecimal, JSON the same in the other encoding. Where
	// the headers say that the content is JSON, JSON is the payload.
	Protobuf string          `json:"protobuf"`
	JSON     json.RawMessage `json:"json"`
}

// Check compares frames with the files in dir, by name. Files whose names begin with one of
// the prefixes and that no frame has are errors.
func Check(t *testing.T, dir string, frames map[string]*nats.Msg, prefixes ...string) {
	t.Helper()
	for name, m := range frames {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			check(t, filepath.Join(dir, name+".json"), m)
		})
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".json")
		for _, prefix := range prefixes {
			if strings.HasPrefix(name, prefix) && frames[name] == nil {
				t.Errorf("%s belongs to no frame", file)
			}
		}
	}
}

func check(t *testing.T, file string, m *nats.Msg) {
	t.Helper()
	if *update {
		write(t, file, m)
	}
	var want File
	ReadJSON(t, file, &want)
	payload, err := hex.DecodeString(want.Protobuf)
	if err != nil {
		t.Fatal(err)
	}
	got := File{Subject: m.Subject, Reply: m.Reply, Headers: m.Header, Protobuf: hex.EncodeToString(m.Data), JSON: want.JSON}
	if m.Header.Get(bus.HeaderContentType) != "" {
		got.Protobuf, got.JSON, want.JSON = want.Protobuf, json.RawMessage(compact(t, m.Data)), json.RawMessage(compact(t, want.JSON))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the wire format has changed; existing drivers expect the old one (-want +got):\n%s", diff)
	}
	env, err := bus.Decode(payload, "")
	if err != nil {
		t.Fatal(err)
	}
	fromJSON, err := bus.Decode(want.JSON, "application/json; charset=utf-8")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(env, fromJSON, protocmp.Transform()); diff != "" {
		t.Errorf("the two encodings differ (-protobuf +json):\n%s", diff)
	}
	text, err := bus.Encode(env, bus.ContentTypeJSON)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(compact(t, want.JSON), compact(t, text)); diff != "" {
		t.Errorf("JSON is written in another way (-want +got):\n%s", diff)
	}
}

// Read returns all frames in dir by name, decoded.
func Read(t *testing.T, dir string) map[string]*driverv1.Envelope {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden files in %s: %v", dir, err)
	}
	frames := map[string]*driverv1.Envelope{}
	for _, file := range files {
		env, err := bus.DecodeMessage(Message(t, file))
		if err != nil {
			t.Fatal(err)
		}
		frames[strings.TrimSuffix(filepath.Base(file), ".json")] = env
	}

	return frames
}

// Message returns a file's frame as it comes from the bus, in protobuf.
func Message(t *testing.T, file string) *nats.Msg {
	t.Helper()
	var f File
	ReadJSON(t, file, &f)
	payload, err := hex.DecodeString(f.Protobuf)
	if err != nil {
		t.Fatal(err)
	}

	return &nats.Msg{Subject: f.Subject, Reply: f.Reply, Data: payload}
}

// ReadJSON reads a golden file.
func ReadJSON(t *testing.T, file string, v any) {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v (for a new frame: go test ./bus/... -run Golden -update)", err)
	}
	if err := json.Unmarshal(content, v); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

// Update writes a golden file if the tests run with -update.
func Update(t *testing.T, file string, v any) {
	t.Helper()
	if *update {
		writeJSON(t, file, v)
	}
}

func write(t *testing.T, file string, m *nats.Msg) {
	t.Helper()
	env, err := bus.DecodeMessage(m)
	if err != nil {
		t.Fatal(err)
	}
	payload, err := proto.Marshal(env)
	if err != nil {
		t.Fatal(err)
	}
	text, err := protojson.Marshal(env)
	if err != nil {
		t.Fatal(err)
	}
	if m.Header.Get(bus.HeaderContentType) == "" {
		payload = m.Data // with what this version does not know
	}
	writeJSON(t, file, File{Subject: m.Subject, Reply: m.Reply, Headers: m.Header, Protobuf: hex.EncodeToString(payload), JSON: text})
}

func writeJSON(t *testing.T, file string, v any) {
	t.Helper()
	content, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, append(content, '\n'), 0o644); err != nil { //nolint:gosec // files of the repository
		t.Fatal(err)
	}
}

// compact takes out the white space, which the encoder varies on purpose.
func compact(t *testing.T, text []byte) string {
	t.Helper()
	var b bytes.Buffer
	if err := json.Compact(&b, text); err != nil {
		t.Fatal(err)
	}

	return b.String()
}

// A Wire keeps what is published, and is on no bus.
type Wire struct {
	bus.Wire

	sent []*nats.Msg
}

// Publish keeps a message.
func (w *Wire) Publish(m *nats.Msg) error {
	w.sent = append(w.sent, m)

	return nil
}

// Take returns the newest message and forgets all.
func (w *Wire) Take() *nats.Msg {
	m := w.sent[len(w.sent)-1]
	w.sent = nil

	return m
}

// Encoded returns an envelope as a message.
func Encoded(t *testing.T, subject, reply string, env *driverv1.Envelope) *nats.Msg {
	t.Helper()
	payload, err := bus.Encode(env, "")
	if err != nil {
		t.Fatal(err)
	}

	return &nats.Msg{Subject: subject, Reply: reply, Data: payload}
}

// Time returns the time that frames are about, and some more.
func Time(plus time.Duration) time.Time {
	return time.Date(2026, time.January, 2, 3, 4, 5, 600_000_000, time.UTC).Add(plus)
}

// Machine returns the machine.
func Machine() *driverv1.Machine {
	return &driverv1.Machine{
		Namespace: "ns", Name: "m1.example", Uid: MachineID, Labels: map[string]string{"pool": "a"}, Annotations: map[string]string{"k": "v"},
		NodeTemplate: &driverv1.NodeTemplate{
			Labels: map[string]string{"role": "worker"}, Annotations: map[string]string{"n": "1"},
			Taints: []*driverv1.Taint{{Key: "dedicated", Value: "db", Effect: "NoSchedule"}},
		},
	}
}

// Class returns its class and secrets.
func Class() *driverv1.ClassReference {
	return &driverv1.ClassReference{
		Class:             &driverv1.ObjectReference{Namespace: "ns", Name: "small", Uid: "c-uid", ResourceVersion: "7"},
		Secret:            &driverv1.ObjectReference{Namespace: "ns", Name: "boot", Uid: "b-uid", ResourceVersion: "8"},
		CredentialsSecret: &driverv1.ObjectReference{Namespace: "ns", Name: "cloud", Uid: "s-uid", ResourceVersion: "9"},
	}
}

// Instance returns its instance.
func Instance() *driverv1.Instance {
	return &driverv1.Instance{
		ProviderId: "virtual:///moon/i-1", NodeName: "m1.example", MachineName: "m1.example", MachineUid: MachineID, Owner: Owner,
		Addresses: []*driverv1.Address{{Type: "InternalIP", Address: "10.0.0.1"}},
	}
}

// State returns what is said of its create.
func State(settled bool) *driverv1.OperationState {
	return &driverv1.OperationState{
		OperationId: Operation, Attempt: 1, Operation: driverv1.Operation_OPERATION_CREATE, Namespace: "ns", Name: "m1.example",
		Settled: settled, Elapsed: durationpb.New(1500 * time.Millisecond),
	}
}

// NodeGroupRequests are what a gateway asks, by verb.
func NodeGroupRequests() map[string]*driverv1.NodeGroupsRequest {
	return map[string]*driverv1.NodeGroupsRequest{
		"groups": {Body: &driverv1.NodeGroupsRequest_Groups{Groups: &driverv1.NodeGroupListRequest{}}},
		"instances": {Body: &driverv1.NodeGroupsRequest_Instances{
			Instances: &driverv1.NodeGroupInstancesRequest{Group: "eu-1/pool-a"},
		}},
		"resize": {Body: &driverv1.NodeGroupsRequest_Resize{
			Resize: &driverv1.NodeGroupResizeRequest{Group: "eu-1/pool-a", ExpectedTarget: 2, Target: 4},
		}},
		"delete": {Body: &driverv1.NodeGroupsRequest_Delete{
			Delete: &driverv1.NodeGroupDeleteRequest{Group: "eu-1/pool-a", Instances: []string{"virtual:///moon/i-1", "creating-7"}},
		}},
	}
}

// NodeGroupResponses are the answers, by verb.
func NodeGroupResponses() map[string]*driverv1.NodeGroupsResponse {
	return map[string]*driverv1.NodeGroupsResponse{
		"groups": {Body: &driverv1.NodeGroupsResponse_Groups{Groups: &driverv1.NodeGroupListResponse{Groups: []*driverv1.NodeGroup{
			{
				Id: "eu-1/pool-a", MinSize: 1, MaxSize: 10, TargetSize: 2, Description: "small machines on the moon",
				Template: &driverv1.NodeGroupTemplate{
					Capacity: map[string]string{"memory": "4Gi"}, Labels: map[string]string{"role": "worker"},
					Taints: []*driverv1.Taint{{Key: "dedicated", Value: "db", Effect: "NoSchedule"}},
				},
				Options: &driverv1.NodeGroupOptions{
					ScaleDownUtilizationThreshold: new(0.5), ScaleDownGpuUtilizationThreshold: new(0.0),
					ScaleDownUnneededTime: durationpb.New(10 * time.Minute), ScaleDownUnreadyTime: durationpb.New(20 * time.Minute),
					MaxNodeProvisionTime: durationpb.New(15 * time.Minute),
				},
			},
			{Id: "eu-1/pool-b", MaxSize: 1},
		}}}},
		"instances": {Body: &driverv1.NodeGroupsResponse_Instances{Instances: &driverv1.NodeGroupInstancesResponse{
			Instances: []*driverv1.NodeGroupInstance{
				{Id: "virtual:///moon/i-1", State: driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_RUNNING},
				{
					Id: "creating-7", State: driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_CREATING,
					Error: &driverv1.Status{Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED, Message: "no quota"},
				},
			},
		}}},
		"resize": {Body: &driverv1.NodeGroupsResponse_Resize{Resize: &driverv1.NodeGroupResizeResponse{TargetSize: 4}}},
		"delete": {Body: &driverv1.NodeGroupsResponse_Delete{Delete: &driverv1.NodeGroupDeleteResponse{TargetSize: 2}}},
	}
}
