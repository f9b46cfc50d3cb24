package bridge

import (
	"context"
	"slices"
	"sync"

	"google.golang.org/grpc/stats"

	"github.com/machinebus/machinebus/driversdk/external"
)

// A connection is one client's. Its unary calls are about the operations on its streams.
type connection struct {
	mu      sync.Mutex
	drivers []*external.Driver
}

type connectionKey struct{}

// connectionOf returns the connection that a call came by.
func connectionOf(ctx context.Context) *connection {
	c, ok := ctx.Value(connectionKey{}).(*connection)
	if !ok {
		return &connection{} // without the handler below nothing is known of it
	}

	return c
}

// attach adds the driver of a stream until detach is called.
func (c *connection) attach(d *external.Driver) (detach func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drivers = append(c.drivers, d)

	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.drivers = slices.DeleteFunc(c.drivers, func(other *external.Driver) bool { return other == d })
	}
}

func (c *connection) all() []*external.Driver {
	c.mu.Lock()
	defer c.mu.Unlock()

	return slices.Clone(c.drivers)
}

// connections gives each call its [connection]. It implements stats.Handler.
type connections struct{}

func (connections) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context {
	return context.WithValue(ctx, connectionKey{}, &connection{})
}

func (connections) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

func (connections) HandleRPC(context.Context, stats.RPCStats) {}

func (connections) HandleConn(context.Context, stats.ConnStats) {}
