package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// roundLength is how long one load lasts.
const roundLength = 500 * time.Millisecond

// pacedRate is the number of reads per second at a fixed rate.
const pacedRate = 1000

// A pattern is how requests follow each other.
type pattern struct {
	name string
	load func(context.Context, func(context.Context) error) (measure, error)
}

// closed keeps so many requests in flight.
func closed(inFlight int) pattern {
	return pattern{strconv.Itoa(inFlight), func(ctx context.Context, call func(context.Context) error) (measure, error) {
		return load(ctx, inFlight, roundLength, call)
	}}
}

var pacedPattern = pattern{"1000/s", func(ctx context.Context, call func(context.Context) error) (measure, error) {
	return paced(ctx, pacedRate, 2*roundLength, call)
}}

// benchRead compares the read path, from the manager's side of the bus through
// the SDK's handler and back, with NATS's own request and reply: the same bytes,
// encoded and decoded by the same code, and as many requests in flight.
func benchRead(ctx context.Context, b *bench) error {
	table := [][]string{{
		"manager", "load", "NATS p50", "bus p50", "NATS p99", "bus p99", "NATS /s", "bus /s", "p50 ratios", "/s ratios",
	}}
	type row struct {
		readResult

		where, load string
	}
	var results []row
	for _, where := range []string{"embedded", "tcp", "mtls"} {
		o := rigOptions{inProcess: where == "embedded"}
		if where == "mtls" {
			pki, err := writePKI(b.dir)
			if err != nil {
				return err
			}
			o.pki = pki
		}
		bus, err := newReadRig(ctx, o)
		if err != nil {
			return err
		}
		for _, p := range []pattern{closed(1), closed(64), closed(1024), pacedPattern} {
			result, err := compare(ctx, b.rounds, p, bus.callPeer, bus.callBus)
			if err != nil {
				return errors.Join(fmt.Errorf("%s, %s: %w", where, p.name, err), bus.close())
			}
			results = append(results, row{result, where, p.name})
			table = append(table, append([]string{where, p.name}, result.row()...))
		}
		if err := bus.close(); err != nil {
			return err
		}
	}
	b.table(table...)
	for _, r := range results {
		switch r.load {
		case "1":
			b.atMost("read-"+r.where+"-1-p50", median(r.p50), 1.25)
		case "64":
			b.atMost("read-"+r.where+"-64-p50", median(r.p50), 1.5)
		case "1024":
			b.atLeast("read-"+r.where+"-1024-throughput", median(r.throughput), 0.7)
		default:
			b.atMost("read-"+r.where+"-paced-p50", median(r.p50), 1.5)
		}
	}
	return nil
}

// A readResult holds the rounds of one comparison.
type readResult struct {
	peer, bus []measure
	// p50 and throughput are the bus's, as parts of the peer's of the same round.
	p50, throughput []float64
}

// compare puts the same load on a peer and on the bus in turn.
func compare(ctx context.Context, rounds int, p pattern, callPeer, callBus func(context.Context) error) (readResult, error) {
	var result readResult
	for round := range rounds + 1 {
		peer, err := p.load(ctx, callPeer)
		if err != nil {
			return result, fmt.Errorf("peer: %w", err)
		}
		own, err := p.load(ctx, callBus)
		if err != nil {
			return result, fmt.Errorf("bus: %w", err)
		}
		if round == 0 {
			continue // caches and connections are warm now
		}
		result.peer, result.bus = append(result.peer, peer), append(result.bus, own)
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
		row = append(row, micros(time.Duration(middle(r.peer, what))), micros(time.Duration(middle(r.bus, what))))
	}
	row = append(row, fmt.Sprintf("%.0f", middle(r.peer, rate)), fmt.Sprintf("%.0f", middle(r.bus, rate)))
	return append(row, spread(r.p50), spread(r.throughput))
}

// spread returns the smallest and the largest result of the rounds, which show how
// reliable the median is.
func spread(ratios []float64) string {
	return fmt.Sprintf("%.2f-%.2f", slices.Min(ratios), slices.Max(ratios))
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
