package caller

import (
	"strings"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/golden"
)

// A build that speaks later versions works with a recorded replica as long as they share
// one, and refuses it with a text that says which side to upgrade when they do not.
func TestProtocol_RecordedReplica(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		ours   bus.Protocols
		refuse string // how the refusal ends; empty for none
	}{
		"same":        {ours: bus.Protocols{Lowest: 1, Highest: 1}},
		"overlapping": {ours: bus.Protocols{Lowest: 1, Highest: 3}},
		"later":       {ours: bus.Protocols{Lowest: 2, Highest: 3}, refuse: "speaks protocol version 1, and mcm speaks 2 to 3: upgrade the driver"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			env, err := bus.DecodeMessage(golden.Message(t, "../testdata/peers/v1/session.json"))
			if err != nil {
				t.Fatal(err)
			}
			s := env.GetSession()
			r := newReplicas()
			r.protocols = tc.ours
			r.onSession(s, time.Now())
			got := r.refusal(s.GetProvider())
			if tc.refuse == "" && got != nil || tc.refuse != "" && (got == nil || !strings.HasSuffix(got.Error(), tc.refuse)) {
				t.Errorf("the session is refused with %v, want %q", got, tc.refuse)
			}
			picked := r.pick(s.GetProvider(), opCreate, time.Now(), nil)
			if refused := tc.refuse != ""; refused == (picked != "") {
				t.Errorf("replica %q gets a create; refused: %t", picked, refused)
			}
		})
	}
}
