package caller

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// probeMark is the machine and the replica in the record by which managers test whether
// a stream takes writes. No machine or replica can have that name.
const probeMark = "~probe"

// probe writes a record. A server whose disk was full once still answers reads, but
// refuses or ignores all writes until it is restarted.
func (s *streams) probe(ctx context.Context, st *stream) error {
	cluster, provider := s.c.cfg.Cluster, st.state.Provider
	payload, err := bus.Encode(&driverv1.Envelope{Body: &driverv1.Envelope_Claim{Claim: &driverv1.Claim{
		Provider: provider, Replica: probeMark, Epoch: s.c.cfg.Epoch(), State: driverv1.Claim_STATE_SETTLED, ClaimedAt: timestamppb.Now(),
	}}}, "")
	if err != nil {
		return err
	}
	answer, err := s.c.inquirer.Ask(ctx, &nats.Msg{Subject: bus.Pattern(cluster, bus.TreeClaim, provider, probeMark), Data: payload}, apiTimeout)
	sequence := uint64(0)
	if err == nil {
		sequence, err = opstream.SequenceOf(answer)
	}
	st.newest = max(st.newest, sequence)
	switch {
	case errors.Is(err, opstream.ErrNoAnswer):
		st.unanswered++
	case ctx.Err() == nil:
		st.unanswered = 0
	}
	if err == nil || ctx.Err() != nil {
		return err
	}

	return s.writeError(st, err)
}

// mostUnanswered is how many writes in a row may get no answer before the stream counts
// as one that takes no writes: a busy machine delays one.
const mostUnanswered = 3

// writeError explains why a stream has not taken a write. It restarts the server if that
// is mcm's own.
func (s *streams) writeError(st *stream, err error) error {
	silent := errors.Is(err, opstream.ErrNoAnswer)
	switch {
	case strings.Contains(err.Error(), "maximum bytes"):
		return fmt.Errorf("it takes no writes: %w: raise its limit with nats stream edit --max-bytes, as a user that may "+
			"publish to $JS.API.STREAM.UPDATE.* (deploy/README.md, \"An operations stream that fills up\")", err)
	case errors.Is(err, opstream.ErrNoStream):
		return fmt.Errorf("it takes no writes: %w: it was just deleted and is made again, or its NATS servers have no leader", err)
	case silent && st.unanswered < mostUnanswered:
		return fmt.Errorf("it did not answer a write: %w within %s; retrying", err, apiTimeout)
	case s.config.Stuck != nil:
		if why := s.config.Stuck(err); why != nil {
			err = fmt.Errorf("%w: %w: free space on that disk", err, why)
		}

		return fmt.Errorf("it takes no writes: %w; mcm restarts its NATS server once the disk has space", err)
	case silent:
		return fmt.Errorf("it takes no writes: %w within %s, %d times in a row: if the disk of its NATS server is or was full, free space "+
			"and restart that server; otherwise check that most servers of the stream run (nats stream info) "+
			"and that mcm's user may publish to its subjects", err, apiTimeout, st.unanswered)
	default:
		return fmt.Errorf("it takes no writes: %w: free space where its NATS server stores streams, then restart that server; "+
			"it takes no writes until then", err)
	}
}

// isDiskFull reports whether a server's disk is full, which only the error text shows.
func isDiskFull(err error) bool { return err != nil && strings.Contains(err.Error(), "no space left") }

// checkTimeout is shorter than people and probes wait for an answer.
const checkTimeout = time.Second

// Check returns why NATS keeps creates and deletes from beginning. The error names the
// operations stream, the cause and the remedy. It is nil if they can begin, or while that
// is not known yet.
func (c *Caller) Check(ctx context.Context) error {
	if c.streams == nil {
		return nil
	}
	states := c.Streams()
	for _, st := range states {
		if err := st.fault(); err != nil {
			return err
		}
	}
	if len(states) > 0 {
		return nil
	}
	// No driver was seen yet, so there is no stream.
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	if _, err := c.streams.readStream(ctx, bus.StreamName(c.cfg.Cluster, probeMark)); errors.Is(err, opstream.ErrNoJetStream) {
		return err
	}

	return nil
}

// fault returns nil for a stream that takes writes or was not checked yet.
func (s StreamState) fault() error {
	if s.Ready || s.Problem == "" {
		return nil
	}

	return fmt.Errorf("operations stream %s: %s", s.Name, s.Problem)
}
