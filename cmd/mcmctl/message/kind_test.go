package message

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/testing/protocmp"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// TestGoldenFrames: every frame that drivers and mcm send is read as what it is,
// with its subject and without.
func TestGoldenFrames(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../../bus/testdata/wire/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden frames: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var frame struct {
				Subject  string          `json:"subject"`
				Protobuf string          `json:"protobuf"`
				JSON     json.RawMessage `json:"json"`
			}
			if err := json.Unmarshal(text, &frame); err != nil {
				t.Fatal(err)
			}
			payload, err := hex.DecodeString(frame.Protobuf)
			if err != nil {
				t.Fatal(err)
			}
			want := &driverv1.Envelope{}
			if err := protojson.Unmarshal(frame.JSON, want); err != nil {
				t.Fatal(err)
			}
			for _, subject := range []string{"", frame.Subject} {
				for _, data := range [][]byte{payload, frame.JSON} {
					m, err := Parse(data, subject)
					if err != nil {
						t.Fatalf("Parse(..., %q): %v", subject, err)
					}
					if diff := cmp.Diff(want, m.envelope, protocmp.Transform()); diff != "" {
						t.Errorf("Parse(..., %q): -want, +got:\n%s", subject, diff)
					}
				}
			}
		})
	}
}

func TestKind(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason  string
		in      string
		subject string
		want    string // summary; "" for an error
	}{
		"Ambiguous": {
			reason: "what may be either is the Envelope that there is most of",
			in:     "\x0a\x01q\x9a\x02\x02\x08\x02", want: "busy q attempt 0 by : draining",
		},
		"AmbiguousRequest": {
			reason: "its subject says that it is about node groups",
			in:     "\x0a\x01q\x9a\x02\x02\x08\x02", subject: groupAnswers, want: "deleted q by : OK target 2",
		},
		"OtherGateway": {
			reason: "the caller in a reply subject may be called as it likes, so bytes decide",
			in:     "\x0a\x01q\x9a\x02\x02\x08\x02", subject: "mcm.v1.default.reply.virtual.me.TOKEN",
			want: "busy q attempt 0 by : draining",
		},
		"NestedType": {
			reason: "a target size is no status: this answer names no replica and is one all the same",
			in:     "\x0a\x01q\x92\x02\x02\x08\x04", want: "resized q by : OK target 4",
		},
		"EnvelopeOnGroupSubject": {
			reason: "an attempt is no replica: who publishes in the wrong place is shown it",
			in:     "\x0a\x01u\x10\x01\x82\x02\x00", subject: groupAnswers, want: "accepted u attempt 1 by",
		},
		"NewerEnvelope": {
			reason: "fields of a newer contract are no sign of another message",
			in:     "\x0a\x01u\x82\x02\x03\xba\x3e\x00\xc2\x3e\x00", want: "accepted u attempt 0 by",
		},
		"NewerGroupBody": {
			reason: "nor do they hide a node-group envelope, whose accept_by is no epoch",
			in:     "\x0a\x01q\x1a\x02\x08\x01\xa2\x01\x00", want: "body of a newer contract (3 bytes)",
		},
		"NewerGroupAnswer": {
			reason: "nor in an answer",
			in:     "\x0a\x01q\x12\x01r\xa2\x02\x00", want: "body of a newer contract (3 bytes)",
		},
		"BrokenEnvelope": {
			reason: "a broken Envelope is an error, not a node-group envelope with an id and a body to come",
			in:     "\x0a\x01u\x8a\x04\x03\x0a\x01\xff",
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, err := Parse([]byte(tc.in), tc.subject)
			if tc.want == "" {
				if err == nil {
					t.Errorf("%s: want an error, got %q", tc.reason, m.Summary())
				}

				return
			}
			if err != nil {
				t.Fatalf("%s: %v", tc.reason, err)
			}
			if diff := cmp.Diff(tc.want, m.Summary()); diff != "" {
				t.Errorf("%s: -want, +got:\n%s", tc.reason, diff)
			}
		})
	}
}
