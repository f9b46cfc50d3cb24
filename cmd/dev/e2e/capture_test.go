package e2e

import (
	"encoding/base64"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/machinebus/machinebus/bus"
)

// A capture holds all messages on a bus, as received by a client with all permissions, and
// a JetStream stream that records the same.
type capture struct {
	conn *nats.Conn

	mu       sync.Mutex
	messages []string
	kinds    map[string]int
}

// capture starts to listen and to record.
func (e *env) capture(natsURL string, opts ...nats.Option) *capture {
	e.Helper()
	c := &capture{kinds: map[string]int{}}
	var err error
	c.conn, err = nats.Connect(natsURL, opts...)
	e.must(err)
	e.Cleanup(c.conn.Close)
	for _, subject := range []string{">", "$JS.>"} {
		_, err := c.conn.Subscribe(subject, c.take)
		e.must(err)
	}
	js, err := jetstream.New(c.conn)
	e.must(err)
	// Without acknowledgement, which would reach the askers as an answer.
	prefix := "mcm.v1." + e.name + "."
	_, err = js.CreateStream(e.ctx(), jetstream.StreamConfig{
		Name: "RECORDER", NoAck: true,
		Subjects: []string{prefix + "driver.>", prefix + "plain.>", prefix + "reply.>", prefix + "fetch.>", "_INBOX_driver.>"},
	})
	e.must(err)
	e.must(c.conn.Flush())
	return c
}

func (c *capture) take(m *nats.Msg) {
	env, err := bus.Decode(m.Data, "")
	c.mu.Lock()
	defer c.mu.Unlock()
	c.messages = append(c.messages, fmt.Sprintln(m.Subject, m.Reply, m.Header)+string(m.Data))
	if err == nil {
		if body := env.ProtoReflect().WhichOneof(env.ProtoReflect().Descriptor().Oneofs().ByName("body")); body != nil {
			c.kinds[string(body.Name())]++
		}
	}
}

// count returns how many messages with that body were heard.
func (c *capture) count(body string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.kinds[body]
}

// stop returns what was heard.
func (c *capture) stop() []string {
	c.conn.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.messages
}

// A needle is a text in every form it may hide in: as it is, and in base64 with
// one, two or no bytes left over from what stands before it.
type needle []string

func newNeedle(text string) needle {
	n := needle{text}
	for before := range 3 {
		padded := strings.Repeat("\x00", before) + text
		for _, encoding := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			// Six bits a character: those that neighbours have a part in are cut off.
			const bits, each = 8, 6
			encoded := encoding.EncodeToString([]byte(padded))
			n = append(n, encoded[(before*bits+each-1)/each:len(padded)*bits/each])
		}
	}
	return n
}

func (n needle) in(text string) bool {
	for _, form := range n {
		if strings.Contains(text, form) {
			return true
		}
	}
	return false
}

func TestNeedle(t *testing.T) {
	t.Parallel()
	const text = "marker-0123456789"
	n := newNeedle(text)
	for _, before := range []string{"", "a", "ab", "abc", "{\"x\":\""} {
		for _, after := range []string{"", "y", "\"}"} {
			plain := before + text + after
			for name, haystack := range map[string]string{
				"plain": plain, "standard": base64.StdEncoding.EncodeToString([]byte(plain)),
				"URL": base64.URLEncoding.EncodeToString([]byte(plain)),
			} {
				if !n.in(haystack) {
					t.Errorf("%s form of %q is not found: %s", name, plain, haystack)
				}
			}
		}
	}
	if n.in("marker-012345678x") || n.in(base64.StdEncoding.EncodeToString([]byte("marker-012345678x"))) {
		t.Error("another text is found")
	}
}
