package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"
)

// benchDelete deletes machines without pods, one after the other.
func benchDelete(ctx context.Context, b *bench) error {
	w, err := b.newWorld(ctx)
	if err != nil {
		return err
	}
	const cloud = time.Second
	if err := w.latency(ctx, 0, cloud); err != nil {
		return errors.Join(err, w.close())
	}
	var beyond []time.Duration
	table := [][]string{{"round", "deletion", "beyond the cloud's time"}}
	for round := range b.rounds {
		names := machineNames(1, fmt.Sprintf("delete-%d", round))
		if err := w.createMachines(ctx, names); err != nil {
			return errors.Join(err, w.close())
		}
		start := time.Now()
		if err := w.deleteMachines(ctx, names); err != nil {
			return errors.Join(err, w.close())
		}
		took := time.Since(start)
		beyond = append(beyond, took-cloud)
		table = append(table, []string{strconv.Itoa(round + 1), seconds(took), seconds(took - cloud)})
	}
	b.table(table...)
	b.atMost("delete-seconds-beyond-the-cloud", median(beyond).Seconds(), 2)
	return w.close()
}
