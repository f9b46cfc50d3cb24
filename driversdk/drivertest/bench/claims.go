package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	headerExpected = "Nats-Expected-Last-Subject-Sequence"
	headerSequence = "Nats-Sequence"
)

// Claimed is a record that was written on a claim's subject.
type Claimed struct {
	*driverv1.Claim

	// Expected is the sequence in whose place it was to be put.
	Expected string
}

func (b *Bench) onClaim(m *nats.Msg) {
	if strings.HasPrefix(m.Subject, b.Below("claim."+b.Provider+".~")) {
		return // no machine's: a manager tries there whether the stream takes writes
	}
	env, err := bus.DecodeMessage(m)
	if err != nil {
		b.Blamef("CLAIM-1", "a message on %s is not an envelope: %v", m.Subject, err)

		return
	}
	b.mu.Lock()
	known := len(b.sessions[env.GetReplica()]) > 0
	b.claims = append(b.claims, Claimed{env.GetClaim(), m.Header.Get(headerExpected)})
	b.mu.Unlock()
	if !known {
		b.Blamef("ENV-7", "the envelope of a claim names replica %q, which has sent no session", env.GetReplica())
	}
}

// Claims returns the records of the operation's claim in one state.
func (o *Operation) Claims(state driverv1.Claim_State) []Claimed {
	o.c.mu.Lock()
	defer o.c.mu.Unlock()
	var found []Claimed
	for _, c := range o.c.claims {
		if c.GetOperationId() == o.ID && c.GetState() == state {
			found = append(found, c)
		}
	}

	return found
}

// Claim reads the machine's claim from the operations stream; sequence 0 means that there is none.
func (m *Machine) Claim() (sequence uint64, env *driverv1.Envelope) {
	answer := m.c.Stream.ask("$JS.API.DIRECT.GET."+bus.StreamName(m.c.Cluster, m.c.Provider)+"."+m.claimSubject(), nil, nil)
	switch answer.Header.Get(bus.HeaderStatus) {
	case "":
	case "404":
		return 0, nil
	default:
		m.c.Failf("read %s from the operations stream: %s", m.claimSubject(), answer.Header.Get("Description"))
	}
	sequence, err := strconv.ParseUint(answer.Header.Get(headerSequence), 10, 64)
	m.c.Must(err)
	env, err = bus.Decode(answer.Data, "")
	m.c.Must(err)

	return sequence, env
}

func (m *Machine) claimSubject() string { return m.c.Below("claim." + m.c.Provider + "." + m.GetUid()) }

// Replace writes the machine's claim in the place of the one with the expected sequence. It reports false if another one
// is there.
func (m *Machine) Replace(env *driverv1.Envelope, expected uint64) (stored bool) {
	answer := m.c.Stream.ask(m.claimSubject(), m.c.Encode(env, ""), nats.Header{headerExpected: {strconv.FormatUint(expected, 10)}})
	var ack refusal
	m.c.Must(json.Unmarshal(answer.Data, &ack))
	const wrongLast, wrongLastConstant = 10071, 10164
	if ack.Error != nil && ack.Error.Code != wrongLast && ack.Error.Code != wrongLastConstant {
		m.c.Failf("operations stream: %s", ack.Error.Description)
	}

	return ack.Error == nil
}

// Usurp puts another replica's attempt in the place of the machine's claim, and returns its sequence.
func (m *Machine) Usurp() (sequence uint64) {
	sequence, env := m.Claim()
	env.GetClaim().Attempt, env.GetClaim().Replica = env.GetClaim().GetAttempt()+1, "conformance"
	if !m.Replace(env, sequence) {
		m.c.Failf("the claim of a running operation could not be replaced")
	}
	sequence, _ = m.Claim()

	return sequence
}

// Ended waits until the claim says how the operation has ended. [Operation.Claims] has all its records then.
func (o *Operation) Ended() (claim *driverv1.Claim) {
	o.c.Eventually("the end of operation "+o.ID+" is stored", func() bool {
		_, env := o.Claim()
		claim = env.GetClaim()
		ended := claim.GetState() == driverv1.Claim_STATE_SETTLED || claim.GetState() == driverv1.Claim_STATE_RELEASED

		return claim.GetOperationId() == o.ID && ended && len(o.Claims(claim.GetState())) > 0
	})

	return claim
}

// Opens fails unless the part of an outcome that was sealed for the manager is as the result.
func (o *Operation) Opens(sealed *driverv1.Sealed, result *driverv1.Result) {
	have := &driverv1.SealedOutcome{}
	if err := o.c.Fetches.key.Open(sealed, sealed.GetSender(), have); err != nil {
		o.c.Failf("the sealed part of the outcome does not open: %w", err)
	}
	if have.GetOperationId() != o.ID || have.GetMessage() != result.GetStatus().GetMessage() || have.GetLastKnownState() != lastKnownState(result) {
		o.c.Failf("the sealed part of the outcome is of another operation, or differs from the result")
	}
}

// AcknowledgeLate plays the operations stream to the machine's claim, until stop: it acknowledges the first record in
// STATE_BEGUN after this delay, and all else at once.
func (m *Machine) AcknowledgeLate(delay time.Duration) (stop func()) {
	c, first := m.c, true // the subscription has one goroutine
	sub := c.Subscribe(m.claimSubject(), "", func(m *nats.Msg) {
		env, err := bus.Decode(m.Data, "")
		expected, malformed := strconv.ParseUint(m.Header.Get(headerExpected), 10, 64)
		if errors.Join(err, malformed) != nil {
			return // a stream would refuse it, or another clause has it
		}
		answer := func() { // a check sees whether it came
			_ = m.Respond(fmt.Appendf(nil, `{"stream":%q,"seq":%d}`, bus.StreamName(c.Cluster, c.Provider), expected+1))
		}
		if first && env.GetClaim().GetState() == driverv1.Claim_STATE_BEGUN {
			first = false
			time.AfterFunc(delay, answer)
		} else {
			answer()
		}
	})
	stop = sync.OnceFunc(func() { _ = sub.Unsubscribe() }) // fails only on a closed connection
	c.Cleanup(stop)

	return stop
}
