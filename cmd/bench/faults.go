package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// faultCreates are in flight when a replica is lost.
const faultCreates = 100

// benchFaults loses one of two replicas with creates in flight, and compares the
// time until all machines are Running with that of an undisturbed run.
func benchFaults(ctx context.Context, b *bench) error {
	w, err := b.newWorld(ctx)
	if err != nil {
		return err
	}
	return errors.Join(b.compareFaults(ctx, w), w.close())
}

func (b *bench) compareFaults(ctx context.Context, w *world) error {
	none := func(context.Context) error { return nil }
	runs := []struct {
		name       string
		lose, mend func(context.Context) error
	}{
		{"undisturbed", none, none},
		{"killed", func(context.Context) error { return w.drivers[0].Kill() }, w.replaceFirst},
		{
			"stopped", func(context.Context) error { return w.drivers[0].Pause() },
			func(context.Context) error { return w.drivers[0].Resume() },
		},
	}
	var added [3][]float64
	table := [][]string{{"round", runs[0].name, runs[1].name, "added", runs[2].name, "added"}}
	for round := range b.rounds {
		row := []string{strconv.Itoa(round + 1)}
		// What the lost replica asked for is there when another one looks for it, or it
		// comes while that one makes it.
		effect := [...]cloudapi.Effect{cloudapi.EffectStart, cloudapi.EffectEnd}[round%2]
		var undisturbed time.Duration
		for i, run := range runs {
			names := machineNames(faultCreates, fmt.Sprintf("%s-%d", run.name, round))
			took, err := w.createsWith(ctx, names, effect, run.lose)
			if err = errors.Join(err, run.mend(ctx)); err != nil {
				return fmt.Errorf("%s: %w", run.name, err)
			}
			row = append(row, seconds(took))
			if i == 0 {
				undisturbed = took
			} else {
				added[i] = append(added[i], (took - undisturbed).Seconds())
				row = append(row, seconds(took-undisturbed))
			}
			if err := w.deleteMachines(ctx, names); err != nil {
				return err
			}
		}
		table = append(table, row)
	}
	stats, err := w.cloud.Admin.Stats(ctx)
	if err != nil {
		return err
	}
	b.table(table...)
	b.atMost("faults-killed-seconds-added", median(added[1]), 2.5)
	b.atMost("faults-stopped-seconds-added", median(added[2]), 4)
	b.atMost("faults-duplicates", float64(stats.DuplicatesEver), 0)
	return nil
}

// createsWith has machines made, and something done once the cloud is at all of
// them. It returns how long it takes from there until all are Running.
func (w *world) createsWith(
	ctx context.Context, names []string, effect cloudapi.Effect, lose func(context.Context) error,
) (time.Duration, error) {
	if err := w.holdAll(ctx, names, effect); err != nil {
		return 0, err
	}
	start := time.Now()
	if err := lose(ctx); err != nil {
		return 0, err
	}
	err := w.releaseAll(ctx, names)
	return time.Since(start), err
}

// replaceFirst starts a replica in the place of the first one.
func (w *world) replaceFirst(ctx context.Context) error {
	w.replaced++
	driver, err := w.startDriver(ctx, fmt.Sprintf("driver-virtual-1-%d", w.replaced))
	if err != nil {
		return err
	}
	w.drivers[0] = driver
	return nil
}
