package virtual

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/driversdk"
)

func TestDriver_MigrateClass(t *testing.T) {
	t.Parallel()
	const good = `"endpoint": "http://cloud", "machineType": "small", "region": "moon"`
	cases := map[string]struct {
		reason       string
		kind, object string
		want         string // of the MachineClass
		refused      string // part of the error
	}{
		"everything": {
			reason: "nothing may get lost",
			kind:   OldKind,
			object: `{"apiVersion": "a/v1", "kind": "VirtualMachineClass", "metadata": {"name": "n", "labels": {"a": "b"}}, "spec": {` + good +
				`, "zone": "moon-a", "tags": {"t": "u"}, "secretRef": {"name": "s"}, "credentialsSecretRef": {"name": "c"}}}`,
			want: `{"apiVersion": "machine.sapcloud.io/v1alpha1", "kind": "MachineClass", "metadata": {"name": "n", "labels": {"a": "b"}},
				"provider": "virtual", "secretRef": {"name": "s"}, "credentialsSecretRef": {"name": "c"},
				"providerSpec": {"apiVersion": "virtual.machinebus.io/v1alpha1", "kind": "VirtualMachineSpec", ` + good + `, "zone": "moon-a", "tags": {"t": "u"}}}`,
		},
		"another kind": {
			reason: "it is another driver's", kind: "AWSMachineClass", object: `{}`, refused: "kind AWSMachineClass: want VirtualMachineClass",
		},
		"unknown field": {
			reason: "it would get lost", kind: OldKind, object: `{"spec": {` + good + `, "spot": true}}`, refused: `unknown field "spot"`,
		},
		"faulty field": {
			reason: "the new class would be refused", kind: OldKind, object: `{"spec": {"endpoint": "http://cloud", "region": "moon"}}`,
			refused: "machineType is missing",
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := new(Driver).MigrateClass(t.Context(), driversdk.OldClass{Kind: tc.kind, Object: json.RawMessage(tc.object)})
			if tc.refused != "" {
				if driversdk.CodeOf(err) != driversdk.InvalidArgument || !strings.Contains(err.Error(), tc.refused) {
					t.Errorf("%s: want InvalidArgument with %q, got: %v", tc.reason, tc.refused, err)
				}

				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(fields(t, tc.want), fields(t, string(got))); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tc.reason, diff)
			}
		})
	}
}

func fields(t *testing.T, text string) (m map[string]any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &m); err != nil {
		t.Fatal(err)
	}

	return m
}
