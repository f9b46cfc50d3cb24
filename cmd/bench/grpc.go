package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// The provider of the comparison in which drivers take time: so long for each
// operation, so many of them at once for each driver.
const (
	providerTakes = 5 * time.Millisecond
	providerSlots = 4
)

// benchGRPC compares the read path with gRPC carrying the same envelopes: unary
// calls to a driver, and one bidirectional stream that the driver opens, which is
// how drivers were first cut from the machine controller manager.
func benchGRPC(ctx context.Context, b *bench) error {
	rig, err := newReadRig(ctx, rigOptions{inProcess: true})
	if err != nil {
		return err
	}
	g, err := newGRPCRig(ctx, rig, nil)
	if err != nil {
		return errors.Join(err, rig.close())
	}
	unary, err := compare(ctx, b.rounds, closed(64), g.callUnary, rig.callBus)
	if err != nil {
		return errors.Join(fmt.Errorf("unary: %w", err), g.close(), rig.close())
	}
	stream, err := compare(ctx, b.rounds, closed(1), g.callStream, rig.callBus)
	if err != nil {
		return errors.Join(fmt.Errorf("stream: %w", err), g.close(), rig.close())
	}
	busy, err := compare(ctx, b.rounds, closed(64), g.callStream, rig.callBus)
	if err := errors.Join(err, g.close(), rig.close()); err != nil {
		return err
	}
	scaled, err := b.compareScaled(ctx)
	if err != nil {
		return err
	}
	table := [][]string{{"peer", "load", "peer p50", "bus p50", "peer p99", "bus p99", "peer /s", "bus /s", "p50 ratios", "/s ratios"}}
	table = append(table, append([]string{"unary", "64"}, unary.row()...), append([]string{"stream", "1"}, stream.row()...),
		append([]string{"stream", "64"}, busy.row()...))
	for i, r := range scaled {
		load := fmt.Sprintf("64, driver takes %s, %d replica(s)", providerTakes, i+1)
		table = append(table, append([]string{"stream", load}, r.row()...))
	}
	b.table(table...)
	b.atLeast("grpc-unary-64-throughput", median(unary.throughput), 1.5)
	b.atMost("grpc-stream-1-p50", median(stream.p50), 1.5)
	// A stream leads to one driver, however many there are.
	b.atLeast("grpc-stream-2-replicas-throughput", median(scaled[1].throughput), 1)
	return nil
}

// compareScaled has drivers take time, and adds a replica.
func (b *bench) compareScaled(ctx context.Context) (results []readResult, err error) {
	for replicas := 1; replicas <= 2; replicas++ {
		rig, err := newReadRig(ctx, rigOptions{
			inProcess: true, replicas: replicas, provider: newSlowly(providerTakes, providerSlots),
		})
		if err != nil {
			return nil, err
		}
		g, err := newGRPCRig(ctx, rig, newSlowly(providerTakes, providerSlots))
		if err != nil {
			return nil, errors.Join(err, rig.close())
		}
		result, err := compare(ctx, b.rounds, closed(64), g.callStream, rig.callBus)
		if err := errors.Join(err, g.close(), rig.close()); err != nil {
			return nil, fmt.Errorf("%d replicas: %w", replicas, err)
		}
		results = append(results, result)
	}
	return results, nil
}
