package bus

import (
	"github.com/nats-io/nats.go"
)

// A Wire is what the two sides of an operation need of a connection. Conn is
// one; a test may bring another, to run the protocol without sockets and under a
// clock of its own.
type Wire interface { //nolint:interfacebloat // it is what a connection does, and no more
	Publish(m *nats.Msg) error
	Subscribe(subject, queue string, f nats.MsgHandler) (Subscription, error)
	// Inbox returns a fresh subject that this side may listen to.
	Inbox() string
	MaxPayload() int64
	Up() bool
	OnUp(f func())
	ServerID() string
}

type Subscription interface {
	Unsubscribe() error
	Drain() error
}

func (c *Conn) Inbox() string { return c.nc.NewInbox() }

func (c *Conn) MaxPayload() int64 { return c.nc.MaxPayload() }
