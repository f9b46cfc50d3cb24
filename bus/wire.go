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

// A Subscription brings messages until it is ended: Unsubscribe drops those that wait, Drain
// delivers them first.
type Subscription interface {
	Unsubscribe() error
	Drain() error
}

// Inbox returns a fresh subject that this connection may listen to.
func (c *Conn) Inbox() string { return c.nc.NewInbox() }

// MaxPayload returns the most bytes that the server takes in a message, 0 while that is not known.
func (c *Conn) MaxPayload() int64 { return c.nc.MaxPayload() }
