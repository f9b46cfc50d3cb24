package driversdk

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

type disk struct {
	Size int    `json:"size"`
	Type string `json:"type,omitempty"`
}

type common struct {
	Region string `json:"region"`
}

// odd reads itself from a text, like a Kubernetes quantity.
type odd struct{ text string }

func (o *odd) UnmarshalJSON(raw []byte) error { return json.Unmarshal(raw, &o.text) }

type wideSpec struct {
	common

	Disks    []disk          `json:"disks,omitempty"`
	ByName   map[string]disk `json:"byName,omitempty"`
	Root     *disk           `json:"root,omitempty"`
	Amount   odd             `json:"amount,omitzero"`
	Since    time.Time       `json:"since,omitzero"`
	Anything any             `json:"anything,omitempty"`
	Skipped  string          `json:"-"`
	NoTag    bool
	hidden   string
}

func TestSpecDecoder(t *testing.T) {
	t.Parallel()
	_ = wideSpec{}.hidden
	decoder := specDecoder[wideSpec]{}
	typed := specDecoder[wideSpec]{kind: "Wide", apiVersions: []string{"x/v1", "x/v2"}}
	cases := map[string]struct {
		reason  string
		decoder specDecoder[wideSpec]
		json    string
		err     string // empty: decodes
	}{
		"empty":          {"an absent spec is an empty one", decoder, ``, ""},
		"null":           {"likewise", decoder, ` null `, ""},
		"type is free":   {"the type's fields need not be in S", decoder, `{"apiVersion":"a/v9","kind":"Any"}`, ""},
		"embedded":       {"fields of an embedded struct count", decoder, `{"region":"eu"}`, ""},
		"opaque":         {"a type that reads itself checks itself", decoder, `{"amount":"5Gi","since":"2026-01-01T00:00:00Z","anything":{"x":[1]}}`, ""},
		"no tag":         {"Go's name without a tag", decoder, `{"NoTag":true}`, ""},
		"unknown":        {"at the top", decoder, `{"regoin":"eu"}`, "unknown field providerSpec.regoin"},
		"case":           {"Kubernetes is exact about case", decoder, `{"Region":"eu"}`, "unknown field providerSpec.Region"},
		"skipped":        {"a field without JSON", decoder, `{"Skipped":"x"}`, "unknown field providerSpec.Skipped"},
		"hidden":         {"an unexported field", decoder, `{"hidden":"x"}`, "unknown field providerSpec.hidden"},
		"deep":           {"in lists, maps and pointers, all of them", decoder, `{"disks":[{"size":1},{"sice":2}],"byName":{"b":{"x":1}},"root":{"y":1}}`, "unknown field providerSpec.byName.b.x, providerSpec.disks[1].sice, providerSpec.root.y"},
		"wrong type":     {"with the path", decoder, `{"root":{"size":"big"}}`, "providerSpec.root.size: want int, have string"},
		"not an object":  {"a list", decoder, `[]`, "providerSpec: want an object, have a list"},
		"not JSON":       {"cut off", decoder, `{"region":`, "providerSpec is not JSON"},
		"trailing":       {"two values", decoder, `{} {}`, "providerSpec is not JSON: there is data after its end"},
		"right type":     {"any of the versions", typed, `{"apiVersion":"x/v2","kind":"Wide"}`, ""},
		"wrong kind":     {"says what is understood", typed, `{"apiVersion":"x/v1","kind":"Narrow"}`, `providerSpec.kind is "Narrow", but this driver understands "Wide"`},
		"wrong version":  {"says what is understood", typed, `{"apiVersion":"x/v3","kind":"Wide"}`, `providerSpec.apiVersion is "x/v3", but this driver understands x/v1, x/v2`},
		"without a type": {"a driver that names its types wants one", typed, `{"region":"eu"}`, `providerSpec.kind is ""`},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := tc.decoder.decode([]byte(tc.json))
			switch {
			case tc.err == "" && err != nil:
				t.Errorf("%s: %v", tc.reason, err)
			case tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)):
				t.Errorf("%s: want %q, have %v", tc.reason, tc.err, err)
			case err != nil && CodeOf(err) != InvalidArgument:
				t.Errorf("%s: want %v, have %v", tc.reason, InvalidArgument, CodeOf(err))
			}
		})
	}
}

func FuzzSpecDecoder(f *testing.F) {
	for _, seed := range []string{
		`{"region":"eu","disks":[{"size":1}],"byName":{"a":{"size":2}},"root":{"type":"x"},"amount":"1"}`,
		`{"Region":"eu"}`, `null`, `[]`, `{"disks":[[]]}`, `{"root":null}`, `{"a":1}{`, `{"byName":{"":{"":0}}}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		spec, err := specDecoder[wideSpec]{}.decode(raw)
		if err != nil {
			if CodeOf(err) != InvalidArgument {
				t.Errorf("want %v, have %v: %v", InvalidArgument, CodeOf(err), err)
			}

			return
		}
		// encoding/json knows of no path, but must agree that nothing is unknown.
		if len(raw) == 0 {
			return
		}
		dec := json.NewDecoder(strings.NewReader(string(raw)))
		dec.DisallowUnknownFields()
		var same struct {
			wideSpec

			APIVersion any `json:"apiVersion"`
			Kind       any `json:"kind"`
		}
		if err := dec.Decode(&same); err != nil {
			t.Fatalf("encoding/json: %v", err)
		}
		if diff := cmp.Diff(spec, same.wideSpec, cmp.AllowUnexported(wideSpec{}, odd{})); diff != "" {
			t.Errorf("(-own +encoding/json):\n%s", diff)
		}
	})
}
