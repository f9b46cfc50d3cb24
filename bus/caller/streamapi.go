package caller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
)

// apiRequest sends a request to JetStream's API and decodes the answer into a non-nil value.
func (s *streams) apiRequest(ctx context.Context, what string, body, into any) error {
	var payload []byte
	if body != nil {
		var err error
		if payload, err = json.Marshal(body); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	answer, err := s.c.inquirer.Ask(ctx, &nats.Msg{Subject: "$JS.API." + what, Data: payload}, apiTimeout)
	if errors.Is(err, opstream.ErrNoAnswer) {
		return fmt.Errorf("%s: %w: check that this user may publish to $JS.API.%s", what, err, what)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if bus.IsNoResponders(answer) {
		return opstream.ErrNoJetStream
	}
	var reply struct {
		Error *opstream.APIError `json:"error"`
	}
	err = json.Unmarshal(answer.Data, &reply)
	switch {
	case err != nil:
	case reply.Error != nil:
		err = reply.Error
	case into != nil:
		err = json.Unmarshal(answer.Data, into)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}

	return nil
}
