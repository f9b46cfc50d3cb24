package stack

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// claimsLimit is how long reading claims may take. A stream without a leader does not
// answer at all.
const claimsLimit = 5 * time.Second

// Lagging returns the names of the NATS servers that store a provider's operations stream
// and are offline or lack records.
func Lagging(ctx context.Context, natsURL, cluster, provider string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, claimsLimit)
	defer cancel()
	js, done, err := openJetStream(natsURL)
	if err != nil {
		return nil, err
	}
	defer done()
	stream, err := js.Stream(ctx, bus.StreamName(cluster, provider))
	if err != nil {
		return nil, fmt.Errorf("stream of %s: %w", provider, err)
	}
	var names []string
	if servers := stream.CachedInfo().Cluster; servers != nil {
		for _, s := range servers.Replicas {
			if s.Offline || !s.Current {
				names = append(names, s.Name)
			}
		}
	}
	return names, nil
}

func openJetStream(natsURL string) (js jetstream.JetStream, done func(), err error) {
	nc, err := nats.Connect(natsURL, nats.Name("machinebus claims"))
	if err != nil {
		return nil, nil, fmt.Errorf("connect to %s: %w", natsURL, err)
	}
	js, err = jetstream.New(nc)
	return js, nc.Close, err
}

// HeldClaims returns the claims of machines of these providers that are not settled.
func HeldClaims(ctx context.Context, natsURL, cluster string, providers ...string) ([]*driverv1.Claim, error) {
	ctx, cancel := context.WithTimeout(ctx, claimsLimit)
	defer cancel()
	js, done, err := openJetStream(natsURL)
	if err != nil {
		return nil, err
	}
	defer done()
	var held []*driverv1.Claim
	for _, provider := range providers {
		stream, err := js.Stream(ctx, bus.StreamName(cluster, provider))
		if err != nil {
			return nil, fmt.Errorf("stream of %s: %w", provider, err)
		}
		info, err := stream.Info(ctx, jetstream.WithSubjectFilter("mcm.v1."+cluster+".claim.>"))
		if err != nil {
			return nil, fmt.Errorf("stream of %s: %w", provider, err)
		}
		for subject := range info.State.Subjects {
			c, err := claimAt(ctx, stream, subject)
			if err != nil {
				return nil, err
			}
			if c != nil && c.GetState() != driverv1.Claim_STATE_SETTLED {
				held = append(held, c)
			}
		}
	}
	return held, nil
}

// claimAt reads the claim of a subject; nil if it has just gone.
func claimAt(ctx context.Context, stream jetstream.Stream, subject string) (*driverv1.Claim, error) {
	m, err := stream.GetLastMsgForSubject(ctx, subject)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, nil //nolint:nilnil // there is none
	}
	if err != nil {
		return nil, fmt.Errorf("claim %s: %w", subject, err)
	}
	env, err := bus.Decode(m.Data, m.Header.Get("Content-Type"))
	if err != nil {
		return nil, fmt.Errorf("claim %s: %w", subject, err)
	}
	return env.GetClaim(), nil
}
