package bus

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A provider that is taken out of service is not asked for ever, nor forgotten because
// the bus was away.
func TestNodeGroupClient_Providers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		up := true
		c := &NodeGroupClient{
			log: slog.New(slog.DiscardHandler), up: func() bool { return up }, providers: map[string]time.Time{},
		}
		hear := func(provider string) {
			c.onSession(&driverv1.Session{
				Provider: provider, Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_NODE_GROUPS},
			})
		}
		after := func(d time.Duration, want ...string) {
			t.Helper()
			<-time.After(d) // of the bubble's clock
			if diff := cmp.Diff(want, c.Providers()); diff != "" {
				t.Errorf("providers (-want +got):\n%s", diff)
			}
		}
		hear("gone")
		hear("stays")
		after(40*time.Minute, "gone", "stays")
		hear("stays")
		after(21*time.Minute, "stays")
		up = false
		after(2*time.Hour, "stays")
		up = true
		hear("stays")
		hear("gone")
		after(0, "gone", "stays")
	})
}
