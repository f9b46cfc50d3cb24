package bus

import (
	"errors"
	"fmt"
	"mime"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// Headers are few because each costs a few percent of a round trip.
const (
	HeaderContentType = "Content-Type"
	ContentTypeJSON   = "application/json"
	HeaderTraceParent = "traceparent" // as the W3C spells it

	// From ADR-32, so that the nats CLI shows failures as failures.
	HeaderError     = "Nats-Service-Error"
	HeaderErrorCode = "Nats-Service-Error-Code"

	HeaderStatus       = "Status"
	statusNoResponders = "503"
)

var (
	// errEmpty: only the server's "no responders" is empty [ENV-3].
	errEmpty = errors.New("the payload is empty; it must hold an Envelope")
	// ErrEncode is wrapped when an envelope can never be sent.
	ErrEncode = errors.New("encode envelope")
)

var lenientJSON = protojson.UnmarshalOptions{DiscardUnknown: true}

// Decode reads an Envelope from a payload, protobuf or JSON by contentType (a
// Content-Type header's value; empty means protobuf).
func Decode(payload []byte, contentType string) (*driverv1.Envelope, error) {
	if len(payload) == 0 {
		return nil, errEmpty
	}
	env := &driverv1.Envelope{}
	if isJSON(contentType) {
		if err := lenientJSON.Unmarshal(payload, env); err != nil {
			return nil, fmt.Errorf("decode JSON envelope: %w", err)
		}

		return env, nil
	}
	if err := proto.Unmarshal(payload, env); err != nil {
		return nil, fmt.Errorf("decode envelope: %w", err)
	}

	return env, nil
}

// Encode is the inverse of [Decode].
func Encode(env *driverv1.Envelope, contentType string) ([]byte, error) {
	var payload []byte
	var err error
	if isJSON(contentType) {
		payload, err = protojson.Marshal(env)
	} else {
		payload, err = proto.Marshal(env)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrEncode, err)
	}
	if len(payload) == 0 {
		return nil, fmt.Errorf("%w: %w", ErrEncode, errEmpty)
	}

	return payload, nil
}

// DecodeMessage reads the Envelope in a message.
func DecodeMessage(m *nats.Msg) (*driverv1.Envelope, error) {
	return Decode(m.Data, ContentTypeOf(m))
}

// TraceParentOf returns a message's W3C traceparent, empty for none.
func TraceParentOf(m *nats.Msg) string {
	if m.Header == nil {
		return ""
	}

	return m.Header.Get(HeaderTraceParent)
}

// ContentTypeOf returns one spelling for JSON, which callers compare with.
func ContentTypeOf(m *nats.Msg) string {
	if m.Header == nil {
		return ""
	}

	contentType := m.Header.Get(HeaderContentType)
	if isJSON(contentType) {
		return ContentTypeJSON
	}

	return contentType
}

// isJSON reports whether a content type is JSON, whatever its parameters: JSON is always
// UTF-8.
func isJSON(contentType string) bool {
	if contentType == "" || contentType == ContentTypeJSON {
		return contentType != "" // almost every message: no need to parse
	}
	mediaType, _, _ := mime.ParseMediaType(contentType) // empty unless the type itself is sound

	return mediaType == ContentTypeJSON
}

// IsNoResponders reports whether the server says that nothing listens on a request's subject.
func IsNoResponders(m *nats.Msg) bool {
	return len(m.Data) == 0 && m.Header != nil && m.Header.Get(HeaderStatus) == statusNoResponders
}

// OperationOf returns the operation an envelope asks for; unspecified when it
// is no request of an operation.
func OperationOf(env *driverv1.Envelope) driverv1.Operation {
	op, _ := requestOf(env)

	return op
}

// MachineOf returns the machine an envelope's request is about, or nil.
func MachineOf(env *driverv1.Envelope) *driverv1.Machine {
	body, ok := RequestOf(env).(interface{ GetMachine() *driverv1.Machine })
	if !ok {
		return nil
	}

	return body.GetMachine()
}

// ClassOf returns the class reference of an envelope's request, or nil.
func ClassOf(env *driverv1.Envelope) *driverv1.ClassReference {
	body, ok := RequestOf(env).(interface {
		GetClass() *driverv1.ClassReference
	})
	if !ok {
		return nil
	}

	return body.GetClass()
}

// RequestOf returns the request message of an operation's envelope, or nil.
func RequestOf(env *driverv1.Envelope) proto.Message {
	_, request := requestOf(env)

	return request
}

func requestOf(env *driverv1.Envelope) (driverv1.Operation, proto.Message) {
	switch b := env.GetBody().(type) {
	case *driverv1.Envelope_Create:
		return driverv1.Operation_OPERATION_CREATE, b.Create
	case *driverv1.Envelope_Initialize:
		return driverv1.Operation_OPERATION_INITIALIZE, b.Initialize
	case *driverv1.Envelope_Delete:
		return driverv1.Operation_OPERATION_DELETE, b.Delete
	case *driverv1.Envelope_Status:
		return driverv1.Operation_OPERATION_STATUS, b.Status
	case *driverv1.Envelope_List:
		return driverv1.Operation_OPERATION_LIST, b.List
	case *driverv1.Envelope_VolumeIds:
		return driverv1.Operation_OPERATION_VOLUME_IDS, b.VolumeIds
	case *driverv1.Envelope_Validate:
		return driverv1.Operation_OPERATION_VALIDATE, b.Validate
	case *driverv1.Envelope_MigrateClass:
		return driverv1.Operation_OPERATION_MIGRATE_CLASS, b.MigrateClass
	case *driverv1.Envelope_NodeGroups:
		return driverv1.Operation_OPERATION_NODE_GROUPS, b.NodeGroups
	default:
		return driverv1.Operation_OPERATION_UNSPECIFIED, nil
	}
}

// Failure returns the result of an operation that has failed.
func Failure(code driverv1.Code, message string) *driverv1.Result {
	return &driverv1.Result{Status: &driverv1.Status{Code: code, Message: message}}
}

// ResultFrame returns the frame that carries a result.
func ResultFrame(r *driverv1.Result) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: r}}
}
