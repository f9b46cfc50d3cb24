package message

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/machinebus/machinebus/bus"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

// The bus has two messages called Envelope and distinguishes them by subject alone.
// Their header fields have the same numbers but different types: a request about node
// groups has accept_by where the other has its epoch, an answer has the replica where
// the other has the attempt. Without a subject, only that proves a node-group envelope.
// Unknown fields prove nothing: an Envelope of a newer contract has some, too.

// carriesNodeGroups reports whether a payload that can be a node-group envelope is one.
// foreign means that it can be no other message.
func carriesNodeGroups(subject string, foreign bool) bool {
	s, err := bus.ParseSubject(subject)
	switch {
	case err != nil, s.Tree == bus.TreeReply && !s.AboutNodeGroups():
		// A gateway may choose its name in reply subjects.
		return foreign
	default:
		return s.AboutNodeGroups()
	}
}

// nodeGroupEnvelope decodes a payload as a node-group envelope. It returns nil if the
// payload cannot be one, or has no known field but an id.
func nodeGroupEnvelope(payload []byte) *nodegroupv1.Envelope {
	env := &nodegroupv1.Envelope{}
	if err := proto.Unmarshal(payload, env); err != nil || contradicts(env.ProtoReflect()) {
		return nil
	}
	known := false
	env.ProtoReflect().Range(func(field protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
		known = field.Name() != "request_id"

		return !known
	})
	if !known {
		return nil
	}

	return env
}

// contradicts reports whether m was decoded from another message type: a known field
// number has a different type. Protobuf puts such a field with the unknown ones.
func contradicts(m protoreflect.Message) bool {
	for unknown := m.GetUnknown(); len(unknown) > 0; {
		number, _, n := protowire.ConsumeField(unknown)
		if n < 0 || m.Descriptor().Fields().ByNumber(number) != nil {
			return true
		}
		unknown = unknown[n:]
	}
	found := false
	m.Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case field.IsMap() || field.Message() == nil:
			// The contract has maps of strings only.
		case field.IsList():
			for i := range v.List().Len() {
				found = found || contradicts(v.List().Get(i).Message())
			}
		default:
			found = contradicts(v.Message())
		}

		return !found
	})

	return found
}
