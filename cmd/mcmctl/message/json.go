package message

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// WriteJSON writes a value as JSON on several lines, or on one if compact is set. It
// does not escape <, > and &, and writes nothing if the value cannot be encoded.
func WriteJSON(w io.Writer, v any, compact bool) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	if !compact {
		e.SetIndent("", "  ")
	}

	return e.Encode(v)
}

// envelopeJSON is the protobuf JSON mapping with two changes: JSON that the contract
// carries as bytes is shown as JSON, and a sealed box as its length.
func envelopeJSON(env proto.Message) (json.RawMessage, error) {
	text, err := protojson.Marshal(env)
	if err != nil {
		return nil, fmt.Errorf("encode the envelope as JSON: %w", err)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var tree map[string]any
	if err := d.Decode(&tree); err != nil {
		return nil, fmt.Errorf("encode the envelope as JSON: %w", err)
	}
	readable(env.ProtoReflect(), tree)
	if n := len(env.ProtoReflect().GetUnknown()); n > 0 {
		tree["unknown"] = fmt.Sprintf("<%d bytes of a newer contract>", n)
	}
	var out bytes.Buffer
	err = WriteJSON(&out, tree, true)

	return bytes.TrimSpace(out.Bytes()), err
}

// readable makes the changes of envelopeJSON in the JSON of m.
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
