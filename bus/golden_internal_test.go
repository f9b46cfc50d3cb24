package bus

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"flag"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protopath"
	"google.golang.org/protobuf/reflect/protorange"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/testing/protocmp"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

var updateGolden = flag.Bool("update", false, "write the golden files of this package afresh")

// goldenDir is named by PROTOCOL.md: drivers in other languages test with it.
const goldenDir = "testdata/wire"

// A goldenFile is one frame as it goes over the wire.
type goldenFile struct {
	Subject string              `json:"subject"`
	Reply   string              `json:"reply,omitempty"`
	Headers map[string][]string `json:"headers,omitempty"`
	// Protobuf is the payload in hexadecimal, JSON the same in the other encoding. Where
	// the headers say that the content is JSON, JSON is the payload.
	Protobuf string          `json:"protobuf"`
	JSON     json.RawMessage `json:"json"`
}

// A goldenKind is one of the two messages that payloads are.
type goldenKind struct {
	dir    string
	frames map[string]*nats.Msg
	decode func(payload []byte, contentType string) (proto.Message, error)
	encode func(m proto.Message) ([]byte, error) // in JSON
}

func goldenKinds(t *testing.T) map[string]goldenKind {
	t.Helper()

	return map[string]goldenKind{
		"driver": {
			dir: goldenDir, frames: goldenFrames(t),
			decode: func(payload []byte, contentType string) (proto.Message, error) { return Decode(payload, contentType) },
			encode: func(m proto.Message) ([]byte, error) { return Encode(m.(*driverv1.Envelope), contentTypeJSON) }, //nolint:forcetypeassert // decode made it
		},
		"nodegroup": {
			dir: filepath.Join(goldenDir, "nodegroup"), frames: goldenNodeGroups(t),
			decode: func(payload []byte, contentType string) (proto.Message, error) {
				env := &nodegroupv1.Envelope{}
				if contentType != "" { // for people: over the wire it is protobuf alone
					return env, protojson.Unmarshal(payload, env)
				}

				return env, proto.Unmarshal(payload, env)
			},
			encode: protojson.Marshal,
		},
	}
}

// TestGoldenFrames holds the wire format still: what these files say is what
// drivers out there send and understand.
func TestGoldenFrames(t *testing.T) {
	t.Parallel()
	for name, kind := range goldenKinds(t) {
		for frame, m := range kind.frames {
			t.Run(name+"/"+frame, func(t *testing.T) {
				t.Parallel()
				wantGolden(t, kind, frame, m)
			})
		}
		files, err := filepath.Glob(filepath.Join(kind.dir, "*.json"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if name := filepath.Base(file); kind.frames[name[:len(name)-len(".json")]] == nil {
				t.Errorf("%s belongs to no frame", file)
			}
		}
	}
}

func wantGolden(t *testing.T, kind goldenKind, frame string, m *nats.Msg) {
	t.Helper()
	file := filepath.Join(kind.dir, frame+".json")
	if *updateGolden {
		writeGolden(t, kind, file, m)
	}
	want := readGolden(t, file)
	payload, err := hex.DecodeString(want.Protobuf)
	if err != nil {
		t.Fatal(err)
	}
	got := goldenFile{Subject: m.Subject, Reply: m.Reply, Headers: m.Header, Protobuf: hex.EncodeToString(m.Data), JSON: want.JSON}
	if m.Header.Get(headerContentType) != "" {
		got.Protobuf, got.JSON, want.JSON = want.Protobuf, json.RawMessage(compactJSON(t, m.Data)), json.RawMessage(compactJSON(t, want.JSON))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what is sent has changed; drivers that are out there expect the old (-want +got):\n%s", diff)
	}
	env, err := kind.decode(payload, "")
	if err != nil {
		t.Fatal(err)
	}
	fromJSON, err := kind.decode(want.JSON, "application/json; charset=utf-8")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(env, fromJSON, protocmp.Transform()); diff != "" {
		t.Errorf("the two encodings say different things (-protobuf +json):\n%s", diff)
	}
	text, err := kind.encode(env)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(compactJSON(t, want.JSON), compactJSON(t, text)); diff != "" {
		t.Errorf("JSON is written in another way (-want +got):\n%s", diff)
	}
}

// TestGoldenBodies keeps a body from being added without a frame.
func TestGoldenBodies(t *testing.T) {
	t.Parallel()
	for kind, golden := range goldenKinds(t) {
		var bodies protoreflect.OneofDescriptor
		seen := map[protoreflect.Name]bool{}
		for frame, m := range golden.frames {
			env, err := golden.decode(m.Data, m.Header.Get(headerContentType))
			if err != nil {
				t.Fatal(err)
			}
			bodies = env.ProtoReflect().Descriptor().Oneofs().ByName("body")
			if body := env.ProtoReflect().WhichOneof(bodies); body != nil {
				seen[body.Name()] = true
			} else if !strings.HasPrefix(frame, "answer-") || kind == "driver" {
				t.Errorf("%s frame %s has no body that this version knows", kind, frame)
			}
		}
		for i := range bodies.Fields().Len() {
			if name := bodies.Fields().Get(i).Name(); !seen[name] {
				t.Errorf("no golden %s frame has the body %s", kind, name)
			}
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
	set, seen := map[protoreflect.FullName]bool{}, map[protoreflect.FullName]bool{}
	var fields []protoreflect.FullName
	for _, golden := range goldenKinds(t) {
		for _, m := range golden.frames {
			env, err := golden.decode(m.Data, m.Header.Get(headerContentType))
			if err != nil {
				t.Fatal(err)
			}
			fields = append(fields, fieldsBelow(env.ProtoReflect().Descriptor(), seen)...)
			if err := protorange.Range(env.ProtoReflect(), func(p protopath.Values) error {
				if step := p.Index(-1).Step; step.Kind() == protopath.FieldAccessStep {
					set[step.FieldDescriptor().FullName()] = true
				}

				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, field := range fields {
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

// The keys of the golden seals. They seal nothing else.
const (
	goldenPlaneSeed   = "SXAACAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAN4QM"
	goldenReplicaSeed = "SXAAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAT5QQ"
)

// A goldenSeal is a box with all that went into it.
type goldenSeal struct {
	SenderSeed    string `json:"senderSeed"`
	Sender        string `json:"sender"`
	RecipientSeed string `json:"recipientSeed"`
	Recipient     string `json:"recipient"`
	BoxNonce      string `json:"boxNonce"`
	Plain         string `json:"plain"` // a SecretContent
	Box           string `json:"box"`
}

func TestGoldenSeal(t *testing.T) {
	t.Parallel()
	content := &driverv1.SecretContent{
		Nonce:     []byte("0123456789abcdef"),
		Reference: &driverv1.ObjectReference{Namespace: "ns", Name: "cloud", Uid: "s-uid", ResourceVersion: "8"},
		Data:      map[string][]byte{"token": []byte("t0ps3cret")},
	}
	plain, err := proto.Marshal(content)
	if err != nil {
		t.Fatal(err)
	}
	sender, recipient := goldenKey(t, goldenPlaneSeed), goldenKey(t, goldenReplicaSeed)
	nonce := bytes.Repeat([]byte{7}, 24)
	box, err := sender.pair.SealWithRand(plain, recipient.Public(), bytes.NewReader(nonce))
	if err != nil {
		t.Fatal(err)
	}
	got := goldenSeal{
		SenderSeed: goldenPlaneSeed, Sender: sender.Public(), RecipientSeed: goldenReplicaSeed, Recipient: recipient.Public(),
		BoxNonce: hex.EncodeToString(nonce), Plain: hex.EncodeToString(plain), Box: hex.EncodeToString(box),
	}
	const file = "testdata/seal.json"
	if *updateGolden {
		writeJSON(t, file, got)
	}
	var want goldenSeal
	readJSON(t, file, &want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("boxes are made in another way (-want +got):\n%s", diff)
	}
	stored, err := hex.DecodeString(want.Box)
	if err != nil {
		t.Fatal(err)
	}
	opened := &driverv1.SecretContent{}
	if err := recipient.Open(&driverv1.Sealed{Box: stored}, want.Sender, opened); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(content, opened, protocmp.Transform()); diff != "" {
		t.Errorf("what was sealed (-want +got):\n%s", diff)
	}
}

func goldenKey(t *testing.T, seed string) *SealKey {
	t.Helper()
	key, err := ParseSealKey([]byte(seed))
	if err != nil {
		t.Fatal(err)
	}

	return key
}

// goldenFrames returns every kind of frame. Requests, answers and the headers of
// records are made by the code that sends them; of the rest only the encoding is.
func goldenFrames(t *testing.T) map[string]*nats.Msg {
	t.Helper()
	frames := map[string]*nats.Msg{}
	maps.Copy(frames, goldenRequests(t))
	maps.Copy(frames, goldenAnswers(t))
	maps.Copy(frames, goldenRecords(t))
	maps.Copy(frames, goldenNotices(t))

	return frames
}

// A sentWire keeps what is published.
type sentWire struct {
	wire

	sent []*nats.Msg
}

func (w *sentWire) publish(m *nats.Msg) error {
	w.sent = append(w.sent, m)

	return nil
}

func (w *sentWire) take() *nats.Msg {
	m := w.sent[len(w.sent)-1]
	w.sent = nil

	return m
}

func quietLog() *slog.Logger { return slog.New(slog.DiscardHandler) }

func goldenTime(plus time.Duration) time.Time {
	return time.Date(2026, time.January, 2, 3, 4, 5, 600_000_000, time.UTC).Add(plus)
}

func readGolden(t *testing.T, file string) goldenFile {
	t.Helper()
	var g goldenFile
	readJSON(t, file, &g)

	return g
}

func readJSON(t *testing.T, file string, v any) {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v (for a new frame: go test ./bus -run Golden -update)", err)
	}
	if err := json.Unmarshal(content, v); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

func writeGolden(t *testing.T, kind goldenKind, file string, m *nats.Msg) {
	t.Helper()
	env, err := kind.decode(m.Data, m.Header.Get(headerContentType))
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
	if m.Header.Get(headerContentType) == "" {
		payload = m.Data // with what this version does not know
	}
	writeJSON(t, file, goldenFile{Subject: m.Subject, Reply: m.Reply, Headers: m.Header, Protobuf: hex.EncodeToString(payload), JSON: text})
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
	if err := os.WriteFile(file, append(content, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}

// compactJSON takes out the white space, which the encoder varies on purpose.
func compactJSON(t *testing.T, text []byte) string {
	t.Helper()
	var b bytes.Buffer
	if err := json.Compact(&b, text); err != nil {
		t.Fatal(err)
	}

	return b.String()
}

// goldenMessage is a message as Caller and FetchClient publish it.
func goldenMessage(t *testing.T, subject, reply string, env *driverv1.Envelope) *nats.Msg {
	t.Helper()
	payload, err := Encode(env, "")
	if err != nil {
		t.Fatal(err)
	}

	return &nats.Msg{Subject: subject, Reply: reply, Data: slices.Clip(payload)}
}
