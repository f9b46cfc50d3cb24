package bus

import (
	"strings"
	"testing"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestTextsAreShort(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		text, want, reason string
	}{
		"usual":  {"no capacity", "no capacity", "it is a cloud's own word"},
		"most":   {strings.Repeat("x", MaxText), strings.Repeat("x", MaxText), "that still fits"},
		"larger": {strings.Repeat("x", MaxText+1), strings.Repeat("x", MaxText) + "…", "the API server would not store any size"},
		"inside": {strings.Repeat("x", MaxText-1) + "éé", strings.Repeat("x", MaxText-1) + "…", "no half letters"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := ErrorOf(&driverv1.Status{Code: driverv1.Code_CODE_UNAVAILABLE, Message: tc.text}).Error(); got != tc.want {
				t.Errorf("%d bytes, want %d: %s", len(got), len(tc.want), tc.reason)
			}
		})
	}
}
