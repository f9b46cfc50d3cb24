package message

import (
	"bytes"
	"encoding/json"
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func allBodies() map[string]body {
	all := map[string]body{}
	for _, part := range []map[string]body{requests, frames, fetches, controls, groupBodies} {
		maps.Copy(all, part)
	}

	return all
}

func TestEveryBody(t *testing.T) {
	t.Parallel()
	all := allBodies()
	fields := (&driverv1.Envelope{}).ProtoReflect().Descriptor().Oneofs().ByName("body").Fields()
	for i := range fields.Len() {
		if name := string(fields.Get(i).Name()); all[name].envelope == nil {
			t.Errorf("no case shows how the body %q looks", name)
		}
	}
	for name, tc := range all {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := bodyName(tc.envelope); got != name && groupBodies[name].envelope == nil {
				t.Errorf("the case's envelope has the body %q", got)
			}
			for _, contentType := range []string{"", "application/json"} {
				payload, err := bus.Encode(tc.envelope, contentType)
				if err != nil {
					t.Fatalf("bus.Encode(...): %v", err)
				}
				m, err := Parse(payload)
				if err != nil {
					t.Fatalf("Parse(...) of %q: %v", contentType, err)
				}
				text, err := m.JSON()
				if err != nil {
					t.Fatalf("JSON() of %q: %v", contentType, err)
				}
				if diff := cmp.Diff(tc.json, string(text)); diff != "" {
					t.Errorf("JSON() of %q: -want, +got:\n%s", contentType, diff)
				}
				if diff := cmp.Diff(tc.summary, m.Summary()); diff != "" {
					t.Errorf("Summary() of %q: -want, +got:\n%s", contentType, diff)
				}
			}
		})
	}
}

// FuzzDecode: whatever arrives, it is shown as one valid line of JSON and one
// printable line of text, or as an error.
func FuzzDecode(f *testing.F) {
	for _, b := range allBodies() {
		for _, contentType := range []string{"", "application/json"} {
			payload, err := bus.Encode(b.envelope, contentType)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(payload, "mcm.v1.default.session.virtual.r")
		}
	}
	f.Add([]byte(`{"type":"io.nats.micro.v1.info_response"}`), "")
	f.Add([]byte("+ACK"), "$JS.API")
	f.Fuzz(func(t *testing.T, payload []byte, subject string) {
		m, err := Parse(payload)
		if err != nil {
			return
		}
		if line := m.Summary(); strings.ContainsAny(line, "\n\r\x1b") {
			t.Errorf("not one printable line: %q", line)
		}
		row := NewRow(subject)
		if row.Message, err = m.JSON(); err != nil {
			return
		}
		for _, compact := range []bool{true, false} {
			for _, v := range []any{row, row.Message} {
				var out bytes.Buffer
				if err := WriteJSON(&out, v, compact); err != nil {
					t.Fatalf("WriteJSON(...): %v", err)
				}
				if !json.Valid(out.Bytes()) || compact && bytes.Count(out.Bytes(), []byte("\n")) != 1 {
					t.Errorf("not one line of valid JSON: %q", out.String())
				}
			}
		}
	})
}
