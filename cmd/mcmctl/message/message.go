// Package message reads payloads of the bus and tells what they say, as JSON or in
// one line: what `mcmctl decode` and `mcmctl sub` print.
//
// It is for people who look on. It connects to nothing, takes no part in the
// protocol, opens no seal, and knows nothing of Kubernetes. Its output is for
// reading: programs that act on messages use bus.
package message

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Message is what a payload says. The zero value is that of an empty payload.
type Message struct {
	// At most one of them is set.
	envelope *driverv1.Envelope
	other    json.RawMessage // JSON of somebody else on one line: discovery, JetStream
}

// Parse finds out what a payload is; its error shows how the payload begins. The nats
// CLI hands a translating command neither subject nor headers, so JSON is told by its look: no Envelope in protobuf begins with a brace
// or a bracket, which would be groups.
func Parse(payload []byte) (Message, error) {
	if len(payload) == 0 {
		return Message{}, nil
	}
	text := bytes.TrimSpace(payload)
	if len(text) > 0 && (text[0] == '{' || text[0] == '[') && json.Valid(text) {
		return parseJSON(text)
	}
	env, err := bus.Decode(payload, "")
	if err == nil && proto.Size(env) == len(env.ProtoReflect().GetUnknown()) {
		err = errors.New("it has no field of one")
	}
	if err != nil {
		const head = 16

		return Message{}, fmt.Errorf("payload is neither an Envelope nor JSON: %w (%d bytes, beginning with % x)",
			err, len(payload), payload[:min(head, len(payload))])
	}

	return Message{envelope: env}, nil
}

func parseJSON(text []byte) (Message, error) {
	// Strictly: what merely shares a field's name with an Envelope is none.
	env := &driverv1.Envelope{}
	if err := protojson.Unmarshal(text, env); err == nil && env.GetBody() != nil {
		return Message{envelope: env}, nil
	}
	var line bytes.Buffer
	if err := json.Compact(&line, text); err != nil {
		return Message{}, fmt.Errorf("payload: %w", err)
	}

	return Message{other: line.Bytes()}, nil
}

// SignOfLife reports whether the message says no more than that its sender lives, or that
// a stream takes writes: such messages are many.
func (m Message) SignOfLife() bool {
	probe := m.envelope.GetClaim() != nil && m.envelope.GetOperationId() == ""

	return m.envelope.GetSession() != nil || m.envelope.GetHello() != nil || probe
}

// JSON returns the message as a JSON value on one line.
func (m Message) JSON() (json.RawMessage, error) {
	switch {
	case m.envelope != nil:
		return envelopeJSON(m.envelope)
	case m.other != nil:
		return m.other, nil
	default:
		return json.RawMessage(`{"empty":true,"meaning":"no responders: nobody listens on the subject of the request"}`), nil
	}
}

// Summary tells in one printable line what the message says.
func (m Message) Summary() string {
	switch {
	case m.envelope != nil:
		return Printable(summary(m.envelope))
	case m.other != nil:
		return Printable(string(m.other))
	default:
		return "(empty: no responders)"
	}
}
