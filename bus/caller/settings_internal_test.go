package caller

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/machinebus/machinebus/bus"
)

// A stream is made again with the settings that were changed by hand. A reconnect ends the
// look that makes it, and says nothing against these settings.
func TestSettingsOutliveACancelledLook(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		name := bus.StreamName("default", "virtual")
		st := &stream{
			state:    StreamState{Provider: "virtual", Name: name},
			settings: map[string]json.RawMessage{"metadata": json.RawMessage(`{"team":"ops"}`)},
		}
		look, cancel := context.WithCancel(b.ctx)
		cancel()
		if err := b.caller.streams.createStream(look, st, jetstream.StreamConfig{Name: name}); err == nil {
			b.Fatal("a cancelled look has made the stream")
		}
		if st.settings == nil {
			b.Error("the settings are forgotten, want them for the next look")
		}
	})
}
