package drivertest

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// checkFence takes the claim of a create that waits to begin from it, in every way that
// there is.
func checkFence(ctx context.Context, s *suite) error {
	if err := s.recordsBegin(ctx); err != nil {
		return err
	}
	for _, loss := range []struct {
		what string
		lose func(context.Context, *machine) error
	}{
		{"another attempt took its claim's place", func(ctx context.Context, m *machine) error {
			_, err := s.usurp(ctx, m)

			return err
		}},
		{"its claim was lost along with the operations stream", func(ctx context.Context, _ *machine) error {
			if err := s.streamAPI(ctx, "DELETE", nil, nil); err != nil {
				return err
			}

			return s.restore(ctx)
		}},
		{"the operations stream ceased to take claims", func(ctx context.Context, _ *machine) error { return s.refuse(ctx) }},
	} {
		if err := s.keepsFrom(ctx, loss.lose); err != nil {
			return fmt.Errorf("a create that was accepted before %s: %w", loss.what, err)
		}
	}

	return nil
}

// recordsBegin looks for the record that the call of a create begins.
func (s *suite) recordsBegin(ctx context.Context) error {
	d, err := s.once(ctx, create)
	if err != nil {
		return err
	}
	if _, err := createdOf(d.result); err != nil {
		return err
	}
	if _, err := s.endOfClaim(ctx, d.m, d.id); err != nil {
		return err
	}
	s.acknowledge(d.id)
	begun := s.claimsOf(d.id, driverv1.Claim_STATE_BEGUN)
	if len(begun) == 0 {
		return errors.New("a create succeeded, and its claim was never STATE_BEGUN")
	}
	running := s.claimsOf(d.id, driverv1.Claim_STATE_RUNNING)
	have, want := begun[0].GetClaim(), proto.CloneOf(running[len(running)-1].GetClaim())
	want.State, want.ClaimedAt = have.GetState(), have.GetClaimedAt()
	if !proto.Equal(have, want) {
		return fmt.Errorf("the record that a create begins is {%v}, not {%v}", have, want)
	}

	return nil
}

// keepsFrom lets a create go on that was kept from beginning, and looks whether it has
// begun, or has written its claim again.
func (s *suite) keepsFrom(ctx context.Context, lose func(context.Context, *machine) error) error {
	p, err := s.begin(ctx, create)
	if err != nil {
		return err
	}
	defer p.release()
	var before, after uint64
	var result *driverv1.Result
	if err = lose(ctx, p.m); err == nil {
		before, _, err = s.record(ctx, s.claimSubject(p.m))
	}
	if err == nil {
		result, err = s.finish(ctx, p)
	}
	if err == nil {
		after, _, err = s.record(ctx, s.claimSubject(p.m))
	}
	if err := errors.Join(s.restore(ctx), err); err != nil {
		return err
	}
	switch {
	case result.GetStatus().GetCode() == driverv1.Code_CODE_OK:
		return errors.New("it was carried out all the same")
	case after != before:
		return errors.New("it has written a claim that was not its own any more")
	default:
		return s.none(ctx, p.m, "the replica had to start nothing for it")
	}
}

// checkLate is the operations stream for a create that waits to begin, and acknowledges
// so late that it does not count.
func checkLate(ctx context.Context, s *suite) error {
	p, err := s.begin(ctx, create)
	if err != nil {
		return err
	}
	defer p.release()
	var result *driverv1.Result
	stop := func() {}
	if err = s.refuse(ctx); err == nil {
		stop, err = s.acknowledgeLate(ctx, p.m)
	}
	if err == nil {
		result, err = s.finish(ctx, p)
	}
	stop()
	if err := errors.Join(s.restore(ctx), err); err != nil {
		return err
	}
	if result.GetStatus().GetCode() != driverv1.Code_CODE_OK {
		return s.none(ctx, p.m, "the replica had to start nothing for a create whose claim was not acknowledged in time")
	}
	if len(s.claimsOf(p.id, driverv1.Claim_STATE_BEGUN)) < 2 {
		return fmt.Errorf("a create began although its claim was acknowledged only %s after it was written", tooLate)
	}

	return nil
}

// tooLate is more than the second for which an acknowledgement counts.
const tooLate = 3 * time.Second / 2

// acknowledgeLate acknowledges, until stop, what is written to a machine's claim: the
// first record that a call begins too late, and everything else at once.
func (s *suite) acknowledgeLate(ctx context.Context, m *machine) (stop func(), err error) {
	first := true // the subscription has one goroutine
	sub, err := s.nc.Subscribe(s.claimSubject(m), func(m *nats.Msg) {
		env, err := bus.Decode(m.Data, "")
		expected, malformed := strconv.ParseUint(m.Header.Get(headerExpected), 10, 64)
		if errors.Join(err, malformed) != nil {
			return // a stream would refuse it, or another clause has it
		}
		answer := func() {
			_ = m.Respond(fmt.Appendf(nil, `{"stream":%q,"seq":%d}`, bus.StreamName(s.cfg.Cluster, s.cfg.Provider), expected+1)) // a check sees what comes of it
		}
		if first && env.GetClaim().GetState() == driverv1.Claim_STATE_BEGUN {
			first = false
			time.AfterFunc(tooLate, answer)
		} else {
			answer()
		}
	})
	if err != nil {
		return func() {}, fmt.Errorf("subscribe to the claim of a machine: %w", err)
	}

	return func() { _ = sub.Unsubscribe() }, s.flush(ctx) // fails only on a closed connection
}

func checkFencedCall(ctx context.Context, s *suite) error {
	p, err := s.atCloud(ctx, s.cfg.Timeout)
	if err != nil {
		return err
	}
	defer p.release()
	if _, err := s.usurp(ctx, p.m); err != nil {
		return err
	}
	result, err := s.finish(ctx, p)
	if err != nil {
		return err
	}
	instance, err := createdOf(result)
	if err != nil {
		return fmt.Errorf("a create that was at the cloud when another attempt took its claim's place: %w", err)
	}
	if err := s.one(ctx, p.m, instance.GetProviderId()); err != nil {
		return err
	}
	if err := s.overtaken(ctx); err != nil {
		return fmt.Errorf("a create that was at the cloud when another attempt took its claim's place, and that was asked for again: %w", err)
	}

	return nil
}
