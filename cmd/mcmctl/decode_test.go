package main

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func allBodies() map[string]body {
	all := map[string]body{}
	for _, part := range []map[string]body{requests, frames, fetches, controls} {
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
			if got := bodyName(tc.envelope); got != name {
				t.Errorf("the case's envelope has the body %q", got)
			}
			for _, contentType := range []string{"", "application/json"} {
				payload, err := bus.Encode(tc.envelope, contentType)
				if err != nil {
					t.Fatalf("bus.Encode(...): %v", err)
				}
				var out bytes.Buffer
				if err := decode(&out, payload, "", false); err != nil {
					t.Fatalf("decode(...) of %q: %v", contentType, err)
				}
				if diff := cmp.Diff(tc.json+"\n", out.String()); diff != "" {
					t.Errorf("decode(...) of %q: -want, +got:\n%s", contentType, diff)
				}
			}
			if diff := cmp.Diff(tc.summary, summary(tc.envelope)); diff != "" {
				t.Errorf("summary(...): -want, +got:\n%s", diff)
			}
		})
	}
}

func TestDecode(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason  string
		in      string
		subject string
		pretty  bool
		want    string
		err     []string
	}{
		"Empty": {
			reason: "NATS says by an empty payload that nobody listens",
			want:   `{"empty":true,"meaning":"no responders: nobody listens on the subject of the request"}` + "\n",
		},
		"Discovery": {
			reason: "JSON of others passes, on one line",
			in:     "{\n  \"name\": \"mcm-driver-virtual\",\n  \"type\": \"io.nats.micro.v1.ping_response\"\n}\n",
			want:   `{"name":"mcm-driver-virtual","type":"io.nats.micro.v1.ping_response"}` + "\n",
		},
		"PubAck": {
			reason: "also where a field's name is one of ours",
			in:     `{"stream":"S","seq":7,"session":{}}`, want: `{"stream":"S","seq":7,"session":{}}` + "\n",
		},
		"Array": {reason: "arrays are JSON, too", in: `[1, {"a": "<b>"}]`, want: `[1,{"a":"<b>"}]` + "\n"},
		"Pretty": {
			reason: "--pretty takes several lines",
			in:     `{"a":{"b":1}}`, pretty: true, want: "{\n  \"a\": {\n    \"b\": 1\n  }\n}\n",
		},
		"Subject": {
			reason: "a subject is taken apart, escaped names made whole",
			in:     "\x82\x02\x00", subject: "mcm.v1.default.driver.virtual.create.ns.m1~example",
			want: `{"subject":"mcm.v1.default.driver.virtual.create.ns.m1~example","cluster":"default","tree":"driver",` +
				`"provider":"virtual","verb":"create","namespace":"ns","name":"m1.example","message":{"accepted":{}}}` + "\n",
		},
		"OtherSubject": {
			reason: "one of others stands as it is",
			in:     "{}", subject: "_INBOX.x", want: `{"subject":"_INBOX.x","message":{}}` + "\n",
		},
		"NewerBody": {
			reason: "what a newer contract adds is not hidden",
			in:     "\x0a\x01u\xc2\x3e\x00", want: `{"operationId":"u","unknown":"<3 bytes of a newer contract>"}` + "\n",
		},
		"Text": {
			reason: "bytes that are nothing we know are an error that shows how they begin",
			in:     "+ACK", err: []string{"neither an Envelope nor JSON", "4 bytes, beginning with 2b 41 43 4b"},
		},
		"OtherProtobuf": {
			reason: "a message without any field of an Envelope is none",
			in:     "\xc2\x3e\x00", err: []string{"no field of one", "c2 3e 00"},
		},
		"BrokenJSON": {reason: "cut JSON is no JSON", in: `{"a":`, err: []string{"neither", "7b 22 61 22 3a"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args := []string{"decode", "--subject", tc.subject}
			if tc.pretty {
				args = append(args, "--pretty")
			}
			var out, errOut output
			root := newRoot()
			root.SetArgs(args)
			root.SetIn(strings.NewReader(tc.in))
			root.SetOut(&out)
			root.SetErr(&errOut)
			err := root.ExecuteContext(t.Context())
			if (err != nil) != (len(tc.err) > 0) {
				t.Fatalf("%s: got error %v", tc.reason, err)
			}
			for _, want := range tc.err {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%s\nwant %q in: %v", tc.reason, want, err)
				}
			}
			if diff := cmp.Diff(tc.want, out.String()); diff != "" {
				t.Errorf("%s\n-want, +got:\n%s", tc.reason, diff)
			}
		})
	}
}

func TestDecodeFile(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "payload")
	if err := os.WriteFile(file, []byte("\x82\x02\x00"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, _, err := mcmctl(t, "decode", file)
	if err != nil || out != "{\"accepted\":{}}\n" {
		t.Errorf("mcmctl decode %s: got %q, %v", file, out, err)
	}
}

// FuzzDecode: whatever arrives, decode prints one valid line of JSON or an error,
// and a summary is one printable line.
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
	f.Fuzz(func(t *testing.T, data []byte, subject string) {
		for _, pretty := range []bool{false, true} {
			var out bytes.Buffer
			if err := decode(&out, data, subject, pretty); err != nil {
				if out.Len() > 0 {
					t.Errorf("error %v, and yet there is output: %q", err, out.String())
				}

				return
			}
			if !json.Valid(out.Bytes()) || !pretty && bytes.Count(out.Bytes(), []byte("\n")) != 1 {
				t.Errorf("not one line of valid JSON: %q", out.String())
			}
		}
		if p, err := parse(data); err == nil && p.envelope != nil {
			if line := printable(summary(p.envelope)); strings.ContainsAny(line, "\n\r\x1b") {
				t.Errorf("not one printable line: %q", line)
			}
		}
	})
}
