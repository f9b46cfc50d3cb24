package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

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
			reason: "an empty payload is NATS's no responders message",
			want:   `{"empty":true,"meaning":"no responders: no client listens on the subject of the request"}` + "\n",
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
		"NodeGroupRow": {
			reason: "the subject of a request about node groups has its parts",
			in:     "\x0a\x01q\xc2\x01\x05\x1a\x03\x0a\x01a", subject: "mcm.v1.default.nodegroup.virtual.resize",
			want: `{"subject":"mcm.v1.default.nodegroup.virtual.resize","cluster":"default","tree":"nodegroup",` +
				`"provider":"virtual","verb":"resize","message":{"nodeGroups":{"resize":{"group":"a"}},"operationId":"q"}}` + "\n",
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
			in:     "\xc2\x3e\x00", err: []string{"no known field", "c2 3e 00"},
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
