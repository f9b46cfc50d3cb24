package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A payload is what a message carries, as far as it can be told from its bytes
// alone. At most one of envelope and other is set; without either it is empty.
type payload struct {
	envelope *driverv1.Envelope
	other    json.RawMessage // JSON of somebody else on one line: discovery, JetStream
}

// parse finds out what a payload is. The nats CLI hands a translating command
// no headers, so that JSON is told by its look: no Envelope in protobuf begins with a
// brace or a bracket, which would be groups.
func parse(data []byte) (payload, error) {
	if len(data) == 0 {
		return payload{}, nil
	}
	text := bytes.TrimSpace(data)
	if len(text) > 0 && (text[0] == '{' || text[0] == '[') && json.Valid(text) {
		// Strictly: what merely shares a field's name with an Envelope is none.
		env := &driverv1.Envelope{}
		if err := protojson.Unmarshal(text, env); err == nil && env.GetBody() != nil {
			return payload{envelope: env}, nil
		}

		var line bytes.Buffer
		if err := json.Compact(&line, text); err != nil {
			return payload{}, fmt.Errorf("payload: %w", err)
		}

		return payload{other: line.Bytes()}, nil
	}
	env, err := bus.Decode(data, "")
	if err == nil && proto.Size(env) == len(env.ProtoReflect().GetUnknown()) {
		err = errors.New("it has no field of one")
	}
	if err != nil {
		const head = 16

		return payload{}, fmt.Errorf("payload is neither an Envelope nor JSON: %w (%d bytes, beginning with % x)",
			err, len(data), data[:min(head, len(data))])
	}

	return payload{envelope: env}, nil
}

// json returns the payload as a JSON value.
func (p payload) json() (json.RawMessage, error) {
	switch {
	case p.envelope != nil:
		return envelopeJSON(p.envelope)
	case p.other != nil:
		return p.other, nil
	default:
		return json.RawMessage(`{"empty":true,"meaning":"no responders: nobody listens on the subject of the request"}`), nil
	}
}

// envelopeJSON is the protobuf JSON mapping, made readable: JSON that the
// contract carries as bytes stands there as JSON, and a sealed box, which only its
// recipient can read, as its length.
func envelopeJSON(env *driverv1.Envelope) (json.RawMessage, error) {
	text, err := protojson.Marshal(env)
	if err != nil {
		return nil, fmt.Errorf("envelope cannot be shown as JSON: %w", err)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var tree map[string]any
	if err := d.Decode(&tree); err != nil {
		return nil, fmt.Errorf("envelope cannot be shown as JSON: %w", err)
	}
	readable(env.ProtoReflect(), tree)
	if n := len(env.ProtoReflect().GetUnknown()); n > 0 {
		tree["unknown"] = fmt.Sprintf("<%d bytes of a newer contract>", n)
	}
	var out bytes.Buffer
	err = printJSON(&out, tree, true)

	return bytes.TrimSpace(out.Bytes()), err
}

// readable walks a message and its JSON side by side.
func readable(m protoreflect.Message, tree map[string]any) {
	m.Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		key := field.JSONName()
		switch {
		case field.IsMap():
			// The contract has maps of strings only.
		case field.Kind() == protoreflect.BytesKind && !field.IsList():
			if text, ok := bytesText(field, v.Bytes()); ok {
				tree[key] = text
			}
		case field.Message() == nil:
		case field.IsList():
			items, _ := tree[key].([]any)
			for i := range items {
				if item, ok := items[i].(map[string]any); ok {
					readable(v.List().Get(i).Message(), item)
				}
			}
		default:
			if child, ok := tree[key].(map[string]any); ok { // a Timestamp is a string
				readable(v.Message(), child)
			}
		}

		return true
	})
}

func bytesText(field protoreflect.FieldDescriptor, v []byte) (any, bool) {
	if field.ContainingMessage().FullName() == (&driverv1.Sealed{}).ProtoReflect().Descriptor().FullName() {
		return fmt.Sprintf("<sealed %d bytes>", len(v)), true
	}
	if len(v) > 0 && v[0] == '{' && json.Valid(v) {
		return json.RawMessage(v), true
	}

	return nil, false
}
