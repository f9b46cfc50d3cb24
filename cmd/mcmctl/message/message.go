// Package message decodes payloads of the bus and renders them as JSON or as one line
// of text, for `mcmctl decode` and `mcmctl sub`.
//
// The output is for people; programs that act on messages use package bus. The package
// connects to nothing and opens no seal.
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

// A Message is a decoded payload. The zero value is an empty payload.
type Message struct {
	// At most one of them is set.
	envelope *driverv1.Envelope
	other    json.RawMessage // other JSON, on one line: service discovery, JetStream
}

// Parse decodes a payload; its error shows the payload's first bytes. The nats CLI passes
// --translate commands neither subject nor headers. So JSON is detected by its first byte:
// no Envelope in protobuf begins with a brace or a bracket, which would be groups.
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
		err = errors.New("it has no known field")
	}
	if err != nil {
		const head = 16

		return Message{}, fmt.Errorf("payload is neither an Envelope nor JSON: %w (%d bytes, beginning with % x)",
			err, len(payload), payload[:min(head, len(payload))])
	}

	return Message{envelope: env}, nil
}

func parseJSON(text []byte) (Message, error) {
	// Strict: other JSON may share a field's name with an Envelope.
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

// Heartbeat reports whether the message only shows that its sender lives or that a
// stream accepts writes. Such messages are frequent.
func (m Message) Heartbeat() bool {
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
		return json.RawMessage(`{"empty":true,"meaning":"no responders: no client listens on the subject of the request"}`), nil
	}
}

// Summary returns the message as one printable line.
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
