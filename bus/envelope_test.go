package bus_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"mime"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestEmptyPayloadIsNoEnvelope(t *testing.T) {
	t.Parallel()
	if _, err := bus.Decode(nil, ""); err == nil {
		t.Error("Decode(nil) gave no error, but an empty payload is how NATS reports no responders")
	}
	if _, err := bus.Encode(&driverv1.Envelope{}, ""); err == nil {
		t.Error("Encode of an empty envelope gave no error, but its payload would be empty")
	}
}

func TestDecodeIgnoresUnknownFields(t *testing.T) {
	t.Parallel()
	env, err := bus.Decode([]byte(`{"operationId":"a","ofTheFuture":{"x":1}}`), "application/json")
	if err != nil || env.GetOperationId() != "a" {
		t.Errorf("Decode = %v, %v; want operation a: receivers ignore fields they do not know [ENV-4]", env, err)
	}
}

func TestDecodeJSON(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason, contentType string
		json                bool
	}{
		"plain":         {"as the contract has it", "application/json", true},
		"charset":       {"many clients add it", "application/json; charset=utf-8", true},
		"upper case":    {"media types have no case", "Application/JSON", true},
		"bad charset":   {"a parameter changes nothing", "application/json; charset", true},
		"none":          {"protobuf is the default", "", false},
		"other":         {"protobuf is the default", "application/x-protobuf", false},
		"looks alike":   {"it is another type", "application/jsonlines", false},
		"no type":       {"it is ambiguous", ";", false},
		"two of a kind": {"it is ambiguous", "application/json, text/plain", false},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			env, err := bus.Decode([]byte(`{"operationId":"a"}`), tc.contentType)
			if json := err == nil && env.GetOperationId() == "a"; json != tc.json {
				t.Errorf("Decode(%q) = %v, %v; JSON %t: %s", tc.contentType, env, err, tc.json, tc.reason)
			}
		})
	}
}

func FuzzDecode(f *testing.F) {
	sample := &driverv1.Envelope{
		OperationId: "u.create.0", Attempt: 2, Timeout: durationpb.New(time.Minute),
		Body: &driverv1.Envelope_Create{Create: &driverv1.CreateRequest{
			Machine: &driverv1.Machine{Name: "m", Uid: "u", Labels: map[string]string{"a": "b"}},
		}},
	}
	resize := &driverv1.Envelope{OperationId: "q", Body: &driverv1.Envelope_NodeGroups{NodeGroups: &driverv1.NodeGroupsRequest{
		Body: &driverv1.NodeGroupsRequest_Resize{Resize: &driverv1.NodeGroupResizeRequest{Group: "a", ExpectedTarget: 1, Target: 3}},
	}}}
	groups := bus.ResultFrame(&driverv1.Result{Payload: &driverv1.Result_NodeGroups{NodeGroups: &driverv1.NodeGroupsResponse{
		Body: &driverv1.NodeGroupsResponse_Groups{Groups: &driverv1.NodeGroupListResponse{Groups: []*driverv1.NodeGroup{
			{Id: "a", MaxSize: 3, Template: &driverv1.NodeGroupTemplate{Capacity: map[string]string{"cpu": "4"}}},
		}}},
	}}})
	for _, env := range []*driverv1.Envelope{sample, resize, groups} {
		for _, contentType := range []string{"", "application/json"} {
			payload, err := bus.Encode(env, contentType)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(payload, contentType)
		}
	}
	f.Add([]byte(`{"operationId":"a"}`), "application/json; charset=utf-8")
	f.Add([]byte(`{"result":{"status":{"code":99}}}`), "application/json")
	f.Add([]byte(`null`), "application/JSON;q=\xff")
	f.Add([]byte{10, 1, 'a'}, ";=\r\n")
	f.Fuzz(func(t *testing.T, payload []byte, contentType string) {
		// A type that its parser does not know must not be taken for JSON.
		mediaType, _, _ := mime.ParseMediaType(contentType)
		json := mediaType == "application/json"
		env, err := bus.Decode(payload, contentType)
		if err != nil {
			return
		}
		// What reads fields of strangers must live with every one of them.
		_, _, _ = bus.OperationOf(env), bus.MachineOf(env).GetUid(), bus.ClassOf(env).GetClass()
		_ = bus.ErrorOf(env.GetResult().GetStatus())
		if bus.EditsNodeGroup(env) && bus.RequestVerb(env) == "" {
			t.Errorf("a change of a node group has no verb: %v", env)
		}
		for _, g := range env.GetResult().GetNodeGroups().GetGroups().GetGroups() {
			if err := bus.CheckNodeGroup(g); err == nil && (g.GetId() == "" || g.GetMaxSize() <= 0 || g.GetTargetSize() < 0) {
				t.Errorf("believed: %v", g)
			}
		}
		again, err := bus.Encode(env, contentType)
		if err != nil {
			if proto.Size(env) == 0 || json { // a Timestamp out of range has no JSON
				return
			}
			t.Fatalf("decoded, but does not encode: %v", err)
		}
		back, err := bus.Decode(again, contentType)
		if err != nil {
			t.Fatalf("encoded, but does not decode: %v", err)
		}
		want, _ := proto.MarshalOptions{Deterministic: true}.Marshal(env)
		got, _ := proto.MarshalOptions{Deterministic: true}.Marshal(back)
		if !bytes.Equal(want, got) { // NaN and unknown fields compare as bytes only
			t.Fatalf("changed on the way:\n%x\n%x", want, got)
		}
	})
}

func TestCodeOf(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason string
		err    error
		want   driverv1.Code
	}{
		"nil":           {"no error is success", nil, driverv1.Code_CODE_OK},
		"foreign":       {"a foreign error", errors.New("x"), driverv1.Code_CODE_UNKNOWN},
		"wrapped":       {"wrapping keeps the code", fmt.Errorf("a: %w", bus.Errorf(driverv1.Code_CODE_NOT_FOUND, "b")), driverv1.Code_CODE_NOT_FOUND},
		"deadline":      {"a driver may just return its context's error", fmt.Errorf("a: %w", context.DeadlineExceeded), driverv1.Code_CODE_DEADLINE_EXCEEDED},
		"cancelled":     {"a driver may just return its context's error", context.Canceled, driverv1.Code_CODE_CANCELED},
		"OK":            {"an error is never success, whatever it says", bus.Errorf(driverv1.Code_CODE_OK, "b"), driverv1.Code_CODE_INTERNAL},
		"unknown code":  {"a code this version does not know is Internal", &bus.Error{Code: 99}, driverv1.Code_CODE_INTERNAL},
		"negative code": {"a code this version does not know is Internal", &bus.Error{Code: -1}, driverv1.Code_CODE_INTERNAL},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := bus.CodeOf(tc.err); got != tc.want {
				t.Errorf("CodeOf(%v) = %v, want %v: %s", tc.err, got, tc.want, tc.reason)
			}
			if got := bus.StatusOf(tc.err).GetCode(); got != tc.want {
				t.Errorf("StatusOf(%v) has code %v, want %v: %s", tc.err, got, tc.want, tc.reason)
			}
		})
	}
}

func FuzzErrorStatus(f *testing.F) {
	f.Add(int32(0), "", int64(0), int32(0))
	f.Add(int32(8), "quota\xff", int64(5), int32(0))
	f.Add(int32(99), "x", int64(-5), int32(2e9))
	f.Fuzz(func(t *testing.T, code int32, message string, seconds int64, nanos int32) {
		status := &driverv1.Status{
			Code: driverv1.Code(code), Message: message,
			RetryAfter: &durationpb.Duration{Seconds: seconds, Nanos: nanos},
		}
		err := bus.ErrorOf(status)
		if (err == nil) != (code == 0) {
			t.Fatalf("ErrorOf(code %d) = %v", code, err)
		}
		_, known := driverv1.Code_name[code]
		if want := driverv1.Code_CODE_INTERNAL; !known && bus.CodeOf(err) != want {
			t.Fatalf("code %d became %v, want %v", code, bus.CodeOf(err), want)
		}
		back := bus.StatusOf(err)
		if known && back.GetCode() != status.GetCode() || !utf8.ValidString(back.GetMessage()) {
			t.Fatalf("%v became %v", status, back)
		}
		if _, err := bus.Encode(&driverv1.Envelope{
			OperationId: "x", Body: &driverv1.Envelope_Result{Result: &driverv1.Result{Status: back}},
		}, ""); err != nil {
			t.Fatalf("status %v cannot be sent: %v", back, err)
		}
		if bus.CodeName(back.GetCode()) == "" {
			t.Fatal("a code without a name")
		}
	})
}

func TestCodeNames(t *testing.T) {
	t.Parallel()
	seen := map[string]driverv1.Code{}
	for number := range driverv1.Code_name {
		code := driverv1.Code(number)
		name := bus.CodeName(code)
		if other, taken := seen[name]; taken || name == "" {
			t.Errorf("%v is called %q, as is %v", code, name, other)
		}
		seen[name] = code
	}
}
