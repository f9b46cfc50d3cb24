package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

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

// ledgerTimeout is how long the operations stream may take to answer. A stream
// that chooses a new leader takes longer; whoever asks comes again.
const ledgerTimeout = time.Second

const (
	// keptFor is how long a stream keeps a record, and a replica its result, for an mcm that is away.
	keptFor = 24 * time.Hour
	// maxRecordBytes is how large a record may be.
	maxRecordBytes = 1 << 20
)

var (
	// errNoAnswer: what was asked may have been done.
	errNoAnswer = errors.New("no answer from JetStream")
	// errConflict: the subject's last record is another one than expected, and
	// nothing was written.
	errConflict = errors.New("another record is there")
	// errRolledBack: a record that was acknowledged is not there.
	errRolledBack = errors.New("an acknowledged record is gone")
	// errNoJetStream: the server says that it has none; one that starts does, too.
	errNoJetStream = errors.New("NATS has no JetStream for this user: switch it on in the server's configuration, for the user's account, and restart the server")
	// errNoStream: there is no operations stream, and nothing was written.
	errNoStream = errors.New("the operations stream is not there")
)

// A ledger is one side's access to an operations stream: it writes by
// compare-and-set only. Replicas do not read: JetStream sends what it is asked for
// to whatever reply subject the asker names, and so would publish for one provider
// where only another may. A read may be a moment old, as any of several servers
// answers it: it tells what to try, never who won.
type ledger struct {
	inquirer *inquirer
	stream   string
}

// A record is the newest message of one subject.
type record struct {
	sequence uint64 // of the stream
	envelope *driverv1.Envelope
}

// message makes the message that puts env in the place of the record with the
// expected sequence; 0 for none. A TTL of 0 means the stream's own limit.
func message(subject string, env *driverv1.Envelope, expected uint64, ttl time.Duration) (*nats.Msg, error) {
	payload, err := Encode(env, "")
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

// put writes a record and returns its sequence. After errNoAnswer it may be
// there or not.
func (l ledger) put(ctx context.Context, subject string, env *driverv1.Envelope, expected uint64, ttl time.Duration) (uint64, error) {
	m, err := message(subject, env, expected, ttl)
	if err != nil {
		return 0, err
	}
	answer, err := l.inquirer.ask(ctx, m, ledgerTimeout)
	if err != nil {
		return 0, fmt.Errorf("write to %s: %w", l.stream, err)
	}
	seq, err := ackOf(answer)
	if err != nil {
		return 0, fmt.Errorf("write to %s: %w", l.stream, err)
	}

	return seq, nil
}

// last returns the newest record of a subject, nil when there is none.
func (l ledger) last(ctx context.Context, subject string) (*record, error) {
	// JetStream answers direct gets on a subject that permissions can be made of.
	answer, err := l.inquirer.ask(ctx, &nats.Msg{Subject: "$JS.API.DIRECT.GET." + l.stream + "." + subject}, ledgerTimeout)
	if err == nil {
		var r *record
		if r, err = recordOf(answer, subject); err == nil {
			return r, nil
		}
	}

	return nil, fmt.Errorf("read from %s: %w", l.stream, err)
}

// apiError is JetStream's way to say no.
type apiError struct {
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

func (e *apiError) Error() string { return "JetStream: " + headerText(e.Description) }

// Is lets the codes be asked for by this package's errors.
func (e *apiError) Is(target error) bool {
	switch e.ErrCode {
	case codeWrongLast, codeWrongLastConstant:
		return target == errConflict
	case codeStreamNotFound:
		return target == errNoStream
	case codeNotEnabled, codeNotEnabledForAccount:
		return target == errNoJetStream
	default:
		return false
	}
}

// conflictOf returns the sequence of the record that stood in a write's way, 0 for
// none. It is told in the text of the refusal alone. A cluster refuses without it
// what conflicts with a write that is still under way: that has to be tried again.
func conflictOf(err error) (sequence uint64, known bool) {
	var refusal *apiError
	if !errors.As(err, &refusal) || refusal.ErrCode != codeWrongLast {
		return 0, false
	}
	text := refusal.Description
	sequence, err = strconv.ParseUint(strings.TrimSpace(text[strings.LastIndexByte(text, ':')+1:]), 10, 64)

	return sequence, err == nil
}

// ackOf reads JetStream's acknowledgement of a message: the sequence it has, or
// why it was not stored.
func ackOf(m *nats.Msg) (uint64, error) {
	if isNoResponders(m) {
		return 0, errNoStream
	}
	var ack struct {
		Error    *apiError `json:"error"`
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
func recordOf(m *nats.Msg, subject string) (*record, error) {
	switch {
	case isNoResponders(m):
		return nil, errNoStream
	case m.Header.Get(headerStatus) == statusNotFound:
		return nil, nil //nolint:nilnil // there is none, and that is no fault
	case m.Header.Get(headerStatus) != "":
		return nil, fmt.Errorf("status %s: %s", headerText(m.Header.Get(headerStatus)), headerText(m.Header.Get("Description")))
	case m.Header.Get(headerSubject) != subject:
		return nil, fmt.Errorf("record of subject %q, not of %s", headerText(m.Header.Get(headerSubject)), subject)
	}
	seq, err := strconv.ParseUint(m.Header.Get(headerSequence), 10, 64)
	if err != nil || seq == 0 {
		return nil, fmt.Errorf("record of %s without a sequence", subject)
	}
	env, err := Decode(m.Data, "")
	if err != nil {
		// Whoever may write there wrote nonsense: it is as good as anything to be
		// replaced.
		env = &driverv1.Envelope{}
	}

	return &record{sequence: seq, envelope: env}, nil
}

// operationNumber returns how many operations of a machine were settled before
// the one with this id: the number it ends in.
func operationNumber(id string) (uint64, bool) {
	n, err := strconv.ParseUint(id[strings.LastIndexByte(id, '.')+1:], 10, 64)

	return n, err == nil
}

func claimSubject(cluster, provider, machine string) (string, error) {
	return Subject{Cluster: cluster, Tree: TreeClaim, Provider: provider, Machine: machine}.Build()
}
