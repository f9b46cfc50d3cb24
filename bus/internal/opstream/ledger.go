// Package opstream reads and writes the records of a provider's operations stream, the one
// place where both sides of an operation meet: claims on machines, and their outcomes.
//
// Every write is a compare-and-set on the record that it replaces; what the stream answers
// decides, never a read. Who may write what and when is up to packages caller and replica.
package opstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// Headers of JetStream (ADR-8, ADR-43) that records are written and read with.
const (
	headerExpected = "Nats-Expected-Last-Subject-Sequence"
	headerTTL      = "Nats-TTL"
	headerSequence = "Nats-Sequence"
	headerSubject  = "Nats-Subject"

	statusNotFound = "404"
)

// AnswerTimeout is how long the operations stream may take to answer. A stream that
// elects a leader takes longer; its callers retry.
const AnswerTimeout = time.Second

const (
	// KeptFor is how long a stream keeps a record, and a replica its result, for an mcm that is away.
	KeptFor = 24 * time.Hour
	// MaxRecordBytes is how large a record may be.
	MaxRecordBytes = 1 << 20
)

var (
	// ErrNoAnswer means that the request may have been carried out.
	ErrNoAnswer = errors.New("no answer from JetStream")
	// ErrConflict says that the subject's last record is another one than expected, and
	// nothing was written.
	ErrConflict = errors.New("the stream holds another record than expected")
	// ErrNoJetStream means that the server reports no JetStream, as one does while it starts.
	ErrNoJetStream = errors.New("NATS has no JetStream for this user: enable it in the server's configuration for the user's account, and restart the server")
	// ErrNoStream says that there is no operations stream, and nothing was written.
	ErrNoStream = errors.New("the operations stream does not exist")
)

// A Ledger is one side's access to an operations stream: it writes by
// compare-and-set only. Replicas do not read: JetStream answers on any reply subject
// that the reader names, and so would publish where a provider may not. Any of several
// servers answers a read, which may be a moment old: it is a hint, never a decision.
type Ledger struct {
	Inquirer *Inquirer
	Stream   string
}

// A Record is the newest message of one subject.
type Record struct {
	Sequence uint64 // of the stream
	Envelope *driverv1.Envelope
}

// Message makes the message that puts env in the place of the record with the
// expected sequence; 0 for none. A TTL of 0 means the stream's own limit.
func Message(subject string, env *driverv1.Envelope, expected uint64, ttl time.Duration) (*nats.Msg, error) {
	payload, err := bus.Encode(env, "")
	if err != nil {
		return nil, err
	}
	m := &nats.Msg{Subject: subject, Data: payload, Header: nats.Header{
		headerExpected: {strconv.FormatUint(expected, 10)},
	}}
	if ttl > 0 {
		m.Header[headerTTL] = []string{ttl.String()}
	}

	return m, nil
}

// Put writes a record and returns its sequence. After ErrNoAnswer it may be
// there or not.
func (l Ledger) Put(ctx context.Context, subject string, env *driverv1.Envelope, expected uint64, ttl time.Duration) (uint64, error) {
	m, err := Message(subject, env, expected, ttl)
	if err != nil {
		return 0, err
	}
	answer, err := l.Inquirer.Ask(ctx, m, AnswerTimeout)
	if err != nil {
		return 0, fmt.Errorf("write to %s: %w", l.Stream, err)
	}
	seq, err := SequenceOf(answer)
	if err != nil {
		return 0, fmt.Errorf("write to %s: %w", l.Stream, err)
	}

	return seq, nil
}

// Last returns the newest record of a subject, nil when there is none.
func (l Ledger) Last(ctx context.Context, subject string) (*Record, error) {
	// JetStream answers direct gets on a subject that permissions can be made of.
	answer, err := l.Inquirer.Ask(ctx, &nats.Msg{Subject: "$JS.API.DIRECT.GET." + l.Stream + "." + subject}, AnswerTimeout)
	if err == nil {
		var r *Record
		if r, err = recordOf(answer, subject); err == nil {
			return r, nil
		}
	}

	return nil, fmt.Errorf("read from %s: %w", l.Stream, err)
}

// APIError is JetStream's way to say no.
type APIError struct {
	Code        int    `json:"code"`
	ErrCode     int    `json:"err_code"`
	Description string `json:"description"`
}

// JetStream's error codes that something follows from.
const (
	codeNotEnabled           = 10076
	codeNotEnabledForAccount = 10039
	codeStreamNotFound       = 10059
	codeWrongLast            = 10071
	codeWrongLastConstant    = 10164
)

func (e *APIError) Error() string { return "JetStream: " + bus.OneLine(e.Description) }

// Is lets the codes be asked for by this package's errors.
func (e *APIError) Is(target error) bool {
	switch e.ErrCode {
	case codeWrongLast, codeWrongLastConstant:
		return target == ErrConflict
	case codeStreamNotFound:
		return target == ErrNoStream
	case codeNotEnabled, codeNotEnabledForAccount:
		return target == ErrNoJetStream
	default:
		return false
	}
}

// ConflictOf returns the sequence of the record that conflicts with a write; 0 for none.
// Only the text of the refusal names it. A cluster refuses a write that conflicts with
// one under way without naming it: such a write must be retried.
func ConflictOf(err error) (sequence uint64, known bool) {
	var refusal *APIError
	if !errors.As(err, &refusal) || refusal.ErrCode != codeWrongLast {
		return 0, false
	}
	text := refusal.Description
	sequence, err = strconv.ParseUint(strings.TrimSpace(text[strings.LastIndexByte(text, ':')+1:]), 10, 64)

	return sequence, err == nil
}

// SequenceOf reads JetStream's acknowledgement of a message: the sequence it has, or
// why it was not stored.
func SequenceOf(m *nats.Msg) (uint64, error) {
	if bus.IsNoResponders(m) {
		return 0, ErrNoStream
	}
	var ack struct {
		Error    *APIError `json:"error"`
		Stream   string    `json:"stream"`
		Sequence uint64    `json:"seq"`
	}
	switch err := json.Unmarshal(m.Data, &ack); {
	case err != nil:
		return 0, fmt.Errorf("acknowledgement: %w", err)
	case ack.Error != nil:
		return 0, ack.Error
	case ack.Sequence == 0 || ack.Stream == "":
		return 0, errors.New("acknowledgement without a stream or sequence")
	default:
		return ack.Sequence, nil
	}
}

// recordOf reads JetStream's answer to a direct get of a subject's last message.
func recordOf(m *nats.Msg, subject string) (*Record, error) {
	switch {
	case bus.IsNoResponders(m):
		return nil, ErrNoStream
	case m.Header.Get(bus.HeaderStatus) == statusNotFound:
		return nil, nil //nolint:nilnil // there is none, and that is no fault
	case m.Header.Get(bus.HeaderStatus) != "":
		return nil, fmt.Errorf("status %s: %s", bus.OneLine(m.Header.Get(bus.HeaderStatus)), bus.OneLine(m.Header.Get("Description")))
	case m.Header.Get(headerSubject) != subject:
		return nil, fmt.Errorf("record of subject %q, not of %s", bus.OneLine(m.Header.Get(headerSubject)), subject)
	}
	seq, err := strconv.ParseUint(m.Header.Get(headerSequence), 10, 64)
	if err != nil || seq == 0 {
		return nil, fmt.Errorf("record of %s without a sequence", subject)
	}
	env, err := bus.Decode(m.Data, "")
	if err != nil {
		// An authorized writer wrote an invalid record; it can be replaced like any other.
		env = &driverv1.Envelope{}
	}

	return &Record{Sequence: seq, Envelope: env}, nil
}

// OperationNumber returns how many operations of a machine were settled before
// the one with this id: the number it ends in.
func OperationNumber(id string) (uint64, bool) {
	n, err := strconv.ParseUint(id[strings.LastIndexByte(id, '.')+1:], 10, 64)

	return n, err == nil
}

// ClaimSubject returns the subject of the claim on a machine, named by its uid.
func ClaimSubject(cluster, provider, machine string) (string, error) {
	return bus.Subject{Cluster: cluster, Tree: bus.TreeClaim, Provider: provider, Machine: machine}.Build()
}
