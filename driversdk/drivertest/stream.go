package drivertest

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// record reads the newest record of a subject in the operations stream; sequence
// 0 when there is none.
func (s *suite) record(ctx context.Context, subject string) (uint64, *driverv1.Envelope, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Patience)
	defer cancel()
	m, err := s.nc.RequestWithContext(ctx,
		"$JS.API.DIRECT.GET."+bus.StreamName(s.cfg.Cluster, s.cfg.Provider)+"."+subject, nil)
	if err != nil {
		return 0, nil, fmt.Errorf("read %s from the operations stream: %w", subject, err)
	}
	switch m.Header.Get(headerStatus) {
	case "":
	case "404":
		return 0, nil, nil
	default:
		return 0, nil, fmt.Errorf("read %s from the operations stream: %s", subject, m.Header.Get("Description"))
	}
	sequence, err := strconv.ParseUint(m.Header.Get(headerSequence), 10, 64)
	if err != nil {
		return 0, nil, fmt.Errorf("read %s from the operations stream: sequence: %w", subject, err)
	}
	env, err := bus.Decode(m.Data, "")

	return sequence, env, err
}

// replace writes a record in the place of the one with the expected sequence.
// Stored is false when another one is there.
func (s *suite) replace(ctx context.Context, subject string, env *driverv1.Envelope, expected uint64) (stored bool, err error) {
	payload, err := bus.Encode(env, "")
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Patience)
	defer cancel()
	answer, err := s.nc.RequestMsgWithContext(ctx, &nats.Msg{
		Subject: subject, Data: payload, Header: nats.Header{headerExpected: {strconv.FormatUint(expected, 10)}},
	})
	if err != nil {
		return false, fmt.Errorf("write %s to the operations stream: %w", subject, err)
	}

	return acknowledged(answer)
}

// refuse has the operations stream take no claims until restore. Those that are in it
// stay. A replica's write is not answered then: the suite listens there.
func (s *suite) refuse(ctx context.Context) error {
	var info struct {
		Config map[string]any `json:"config"`
	}
	if err := s.streamAPI(ctx, "INFO", nil, &info); err != nil {
		return err
	}
	delete(info.Config, "first_seq") // is said once only
	info.Config["subjects"] = []string{s.below("claim." + s.cfg.Provider + ".none")}

	return s.streamAPI(ctx, "UPDATE", info.Config, nil)
}

// streamAPI makes a request of JetStream about the operations stream.
func (s *suite) streamAPI(ctx context.Context, what string, body, into any) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Patience)
	defer cancel()
	subject := "STREAM." + what + "." + bus.StreamName(s.cfg.Cluster, s.cfg.Provider)
	var payload []byte
	if body != nil {
		var err error
		if payload, err = json.Marshal(body); err != nil {
			return fmt.Errorf("%s: %w", subject, err)
		}
	}
	answer, err := s.nc.RequestWithContext(ctx, "$JS.API."+subject, payload)
	if err != nil {
		return fmt.Errorf("%s: %w", subject, err)
	}
	var refusal struct {
		Error *struct {
			Description string `json:"description"`
		} `json:"error"`
	}
	if err := json.Unmarshal(answer.Data, &refusal); err != nil {
		return fmt.Errorf("%s: %w", subject, err)
	}
	if refusal.Error != nil {
		return fmt.Errorf("%s: %s", subject, refusal.Error.Description)
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(answer.Data, into); err != nil {
		return fmt.Errorf("%s: %w", subject, err)
	}

	return nil
}

// restore has the operations stream made, or as it should be, again.
func (s *suite) restore(ctx context.Context) error {
	s.caller.Close()
	if err := s.startCaller(); err != nil {
		return err
	}

	return s.awaitStream(ctx)
}
