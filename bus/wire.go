package bus

import (
	"github.com/nats-io/nats.go"
)

// A wire is what the two sides of an operation need of a connection. Conn is
// one; a test may bring another, to run the protocol without sockets and under a
// clock of its own.
type wire interface { //nolint:interfacebloat // it is what a connection does, and no more
	publish(m *nats.Msg) error
	subscribe(subject, queue string, f nats.MsgHandler) (subscription, error)
	// inbox returns a fresh subject that this side may listen to.
	inbox() string
	maxPayload() int64
	Up() bool
	OnUp(f func())
	server() string
}

type subscription interface {
	Unsubscribe() error
	Drain() error
}

func (c *Conn) inbox() string { return c.nc.NewInbox() }

func (c *Conn) maxPayload() int64 { return c.nc.MaxPayload() }
