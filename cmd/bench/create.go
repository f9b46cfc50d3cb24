package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"
)

// benchCreate has machines made by mcm, and the same number by workers that wait
// for the cloud, as those of the machine controller manager do.
func benchCreate(ctx context.Context, b *bench) error {
	w, err := b.newWorld(ctx)
	if err != nil {
		return err
	}
	const machines, latency = 200, time.Second
	peer, err := newPeer(ctx, w)
	if err != nil {
		return errors.Join(err, w.close())
	}
	var own, blocking []time.Duration
	var ratios []float64
	table := [][]string{{"round", "mcm", "blocking workers", "ratio"}}
	for round := range b.rounds {
		if err := w.latency(ctx, latency, 0); err != nil {
			return errors.Join(err, w.close())
		}
		names := machineNames(machines, fmt.Sprintf("create-%d", round))
		start := time.Now()
		if err := w.createMachines(ctx, names); err != nil {
			return errors.Join(err, w.close())
		}
		own = append(own, time.Since(start))
		if err := w.deleteMachines(ctx, names); err != nil {
			return errors.Join(err, w.close())
		}
		names = machineNames(machines, fmt.Sprintf("blocking-%d", round))
		start = time.Now()
		if err := peer.createMachines(ctx, names); err != nil {
			return errors.Join(fmt.Errorf("blocking workers: %w", err), w.close())
		}
		blocking = append(blocking, time.Since(start))
		if err := peer.deleteMachines(ctx, names); err != nil {
			return errors.Join(fmt.Errorf("blocking workers: %w", err), w.close())
		}
		ratios = append(ratios, float64(blocking[round])/float64(own[round]))
		table = append(table, []string{
			strconv.Itoa(round + 1), seconds(own[round]), seconds(blocking[round]), fmt.Sprintf("%.1f", ratios[round]),
		})
	}
	table = append(table, []string{"median", seconds(median(own)), seconds(median(blocking)), fmt.Sprintf("%.1f", median(ratios))})
	b.table(table...)
	b.atLeast("create-200-at-1s", median(ratios), 10)
	return w.close()
}
