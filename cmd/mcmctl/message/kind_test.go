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

// TestGoldenFrames: every frame that drivers and mcm send is read as what it is.
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
			for _, data := range [][]byte{payload, frame.JSON} {
				m, err := Parse(data)
				if err != nil {
					t.Fatalf("Parse(...): %v", err)
				}
				if diff := cmp.Diff(want, m.envelope, protocmp.Transform()); diff != "" {
					t.Errorf("Parse(...): -want, +got:\n%s", diff)
				}
			}
		})
	}
}

func TestKind(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason string
		in     string
		want   string // summary; "" for an error
	}{
		"NewerEnvelope": {
			reason: "fields of a newer contract do not hide what is known",
			in:     "\x0a\x01u\x82\x02\x03\xba\x3e\x00\xc2\x3e\x00", want: "accepted u attempt 0 by",
		},
		"NewerBody": {
			reason: "nor does a body of a newer contract hide that there is one",
			in:     "\x0a\x01u\x10\x01\xc2\x3e\x00", want: "body of a newer contract (3 bytes)",
		},
		"NewerGroupRequest": {
			reason: "what is asked about node groups may be of a newer contract, too",
			in:     "\x0a\x01u\x10\x01\xc2\x01\x03\xc2\x3e\x00", want: "node_groups u attempt 1",
		},
		"BrokenEnvelope": {
			reason: "a broken Envelope is an error",
			in:     "\x0a\x01u\x8a\x04\x03\x0a\x01\xff",
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, err := Parse([]byte(tc.in))
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
