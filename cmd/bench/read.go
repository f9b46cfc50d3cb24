package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// roundLength is how long one load lasts.
const roundLength = 500 * time.Millisecond

// benchRead compares the read path, from the manager's side of the bus through
// the SDK's handler and back, with NATS's own request and reply: the same bytes,
// encoded and decoded by the same code, and as many requests in flight.
func benchRead(ctx context.Context, b *bench) error {
	table := [][]string{{
		"manager", "in flight", "NATS p50", "bus p50", "NATS p99", "bus p99", "NATS /s", "bus /s",
	}}
	var results []readResult
	for _, where := range []string{"embedded", "tcp"} {
		bus, err := newReadRig(ctx, where == "embedded")
		if err != nil {
			return err
		}
		for _, inFlight := range []int{1, 64, 1024} {
			result, err := bus.compare(ctx, b.rounds, inFlight)
			if err != nil {
				return errors.Join(fmt.Errorf("%s, %d in flight: %w", where, inFlight, err), bus.close())
			}
			result.name = fmt.Sprintf("read-%s-%d", where, inFlight)
			results = append(results, result)
			table = append(table, append([]string{where, strconv.Itoa(inFlight)}, result.row()...))
		}
		if err := bus.close(); err != nil {
			return err
		}
	}
	b.table(table...)
	for _, r := range results {
		switch r.inFlight {
		case 1:
			b.atMost(r.name+"-p50", median(r.p50), 1.25)
		case 64:
			b.atMost(r.name+"-p50", median(r.p50), 1.5)
		default:
			b.atLeast(r.name+"-throughput", median(r.throughput), 0.7)
		}
	}
	return nil
}

// A readResult holds the rounds of one comparison.
type readResult struct {
	name      string
	inFlight  int
	nats, bus []measure
	// p50 and throughput are the bus's, as parts of NATS's of the same round.
	p50, throughput []float64
}

func (r *readRig) compare(ctx context.Context, rounds, inFlight int) (readResult, error) {
	result := readResult{inFlight: inFlight}
	for round := range rounds + 1 {
		peer, err := load(ctx, inFlight, roundLength, r.callPeer)
		if err != nil {
			return result, fmt.Errorf("NATS: %w", err)
		}
		own, err := load(ctx, inFlight, roundLength, r.callBus)
		if err != nil {
			return result, fmt.Errorf("bus: %w", err)
		}
		if round == 0 {
			continue // caches and connections are warm now
		}
		result.nats, result.bus = append(result.nats, peer), append(result.bus, own)
		result.p50 = append(result.p50, float64(own.p50)/float64(peer.p50))
		result.throughput = append(result.throughput, own.perSecond/peer.perSecond)
	}
	return result, nil
}

func (r *readResult) row() []string {
	middle := func(of []measure, what func(measure) float64) float64 {
		var values []float64
		for _, m := range of {
			values = append(values, what(m))
		}
		return median(values)
	}
	p50 := func(m measure) float64 { return float64(m.p50) }
	p99 := func(m measure) float64 { return float64(m.p99) }
	rate := func(m measure) float64 { return m.perSecond }
	var row []string
	for _, what := range []func(measure) float64{p50, p99} {
		row = append(row, micros(time.Duration(middle(r.nats, what))), micros(time.Duration(middle(r.bus, what))))
	}
	return append(row, fmt.Sprintf("%.0f", middle(r.nats, rate)), fmt.Sprintf("%.0f", middle(r.bus, rate)))
}

// reads numbers the requests, as each has an id of its own.
var reads atomic.Uint64

func statusRequest() *driverv1.Envelope {
	class := &driverv1.ObjectReference{Namespace: "shop", Name: "small", Uid: "5f0c5f0c", ResourceVersion: "1"}
	return &driverv1.Envelope{Body: &driverv1.Envelope_Status{Status: &driverv1.StatusRequest{
		Machine: &driverv1.Machine{
			Namespace: "shop", Name: "worker-1-7d9f8-abcde", Uid: "0b2b9a52-6f6f-4a7e-9d3c-7f5b1c1f8e11",
			Labels:     map[string]string{"name": "worker-1", "machine-template-hash": "7d9f8"},
			ProviderId: "bench:///moon/i-0123456789abcdef", NodeName: "worker-1-7d9f8-abcde",
		},
		Class: &driverv1.ClassReference{Class: class},
	}}}
}
