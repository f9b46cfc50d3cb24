package bridge

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What a flag says of kinds reads the same again.
func FuzzKinds(f *testing.F) {
	f.Add("AWSMachineClass=aws")
	f.Add("A=b, C=d")
	f.Add("=,")
	f.Fuzz(func(t *testing.T, text string) {
		kinds := Kinds{}
		if kinds.Set(text) != nil {
			return
		}
		again := Kinds{}
		if err := again.Set(kinds.String()); err != nil {
			t.Fatalf("%q: %v", kinds, err)
		}
		if diff := cmp.Diff(kinds, again); diff != "" {
			t.Errorf("%q reads otherwise again (-first +second):\n%s", text, diff)
		}
	})
}
