package bustest

import (
	"context"
	"strings"
	"testing"

	"github.com/machinebus/machinebus/bus/chaos"
)

// A Proxy is a link to a NATS server that a test can break. A replica behind a Proxy that
// is Cut is dead as far as any peer can see: it says no goodbye and nothing more.
type Proxy struct{ *chaos.Link }

// NewProxy runs a proxy to the server at url until the test ends.
func NewProxy(tb testing.TB, url string) *Proxy {
	tb.Helper()
	link, err := chaos.OpenLink(context.WithoutCancel(tb.Context()), strings.TrimPrefix(url, "nats://"))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(link.Close)

	return &Proxy{link}
}

// URL returns the URL for clients.
func (p *Proxy) URL() string { return "nats://" + p.Address() }
