package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// faultCreates are in flight when a replica is lost.
	faultCreates = 100
	// lateBy is how long after the loss instances come to be in the rounds that look for
	// duplicates: recovery has started by then, and has found none.
	lateBy = 5 * time.Second
)

// benchFaults loses one of two replicas with creates in flight, and compares the
// time until all machines are Running with that of an undisturbed run. In lateRounds more
// it looks for duplicates instead.
func benchFaults(ctx context.Context, b *bench) error {
	w, err := b.newWorld(ctx)
	if err != nil {
		return err
	}
	return errors.Join(b.compareFaults(ctx, w), w.close())
}

// lateRounds come on top of those whose medians count, each after one of them.
const lateRounds = 2

// A loss is what happens to the first replica while it has creates.
type loss struct {
	name       string
	lose, mend func(context.Context) error // nil for an undisturbed run
}

func (b *bench) compareFaults(ctx context.Context, w *world) error {
	runs := []loss{
		{name: "undisturbed"},
		{"killed", func(context.Context) error { return w.drivers[0].Kill() }, w.replaceFirst},
		{
			"stopped", func(context.Context) error { return w.drivers[0].Pause() },
			func(context.Context) error { return w.drivers[0].Resume() },
		},
	}
	var added [3][]float64
	table := [][]string{{"round", "instances", runs[0].name, runs[1].name, "added", runs[2].name, "added"}}
	for round := range b.rounds + lateRounds {
		late := round%2 == 1 && round < 2*lateRounds
		row := []string{strconv.Itoa(round + 1), map[bool]string{false: "at once", true: "late"}[late]}
		var undisturbed time.Duration
		for i, run := range runs {
			names := machineNames(faultCreates, fmt.Sprintf("%s-%d", run.name, round))
			took, err := w.createsWith(ctx, names, late, run)
			if err != nil {
				// A machine with two instances does not become Running.
				return errors.Join(fmt.Errorf("%s, round %d: %w", run.name, round+1, err), b.duplicates(ctx, w))
			}
			row = append(row, seconds(took))
			if i == 0 {
				undisturbed = took
			} else {
				row = append(row, seconds(took-undisturbed))
			}
			if !late { // else the time that the cloud takes hides what recovery takes
				added[i] = append(added[i], (took - undisturbed).Seconds())
			}
			if err := w.deleteMachines(ctx, names); err != nil {
				return err
			}
		}
		table = append(table, row)
	}
	b.table(table...)
	b.atMost("faults-killed-seconds-added", median(added[1]), 2.5)
	b.atMost("faults-stopped-seconds-added", median(added[2]), 4)
	return b.duplicates(ctx, w)
}

// duplicates prints how many instances were made beside another one of their machine.
func (b *bench) duplicates(ctx context.Context, w *world) error {
	stats, err := w.cloud.Admin.Stats(ctx)
	if err == nil {
		b.atMost("faults-duplicates", float64(stats.DuplicatesEver), 0)
	}
	return err
}

// createsWith creates machines, and loses a replica while the cloud works on all creates.
// It returns the time from then until all machines are Running. Then all replicas run
// again.
//
// The other replica finds the instances that the lost one requested. In late rounds they
// do not exist yet: then it requests them, too, and only the identical request keeps the
// cloud from creating them twice. A late round without that is an error.
func (w *world) createsWith(ctx context.Context, names []string, late bool, l loss) (time.Duration, error) {
	effect, latency := cloudapi.EffectStart, time.Duration(0)
	if late {
		effect, latency = cloudapi.EffectEnd, lateBy
	}
	if err := w.latency(ctx, latency, 0); err != nil {
		return 0, err
	}
	before, err := w.cloud.Admin.Stats(ctx)
	if err != nil {
		return 0, err
	}
	if err := w.holdAll(ctx, names, effect); err != nil {
		return 0, err
	}
	if err := w.firstHasSome(ctx, len(names)); err != nil {
		return 0, err
	}
	start := time.Now()
	if l.lose == nil {
		err := w.releaseAll(ctx, names)
		return time.Since(start), err
	}
	if err := l.lose(ctx); err != nil {
		return 0, err
	}
	err = w.releaseAll(ctx, names)
	took := time.Since(start)
	if err := errors.Join(err, l.mend(ctx)); err != nil || !late {
		return took, err
	}
	after, err := w.cloud.Admin.Stats(ctx)
	if err == nil && after.Requests[cloudapi.OpCreate]-before.Requests[cloudapi.OpCreate] <= len(names) {
		err = fmt.Errorf("no create was repeated: recovery took more than %s, so the run proves nothing about duplicates", lateBy)
	}
	return took, err
}

// firstHasSome waits until the replicas list so many creates, and returns an error unless
// the first one has some of them: otherwise its loss would have no effect.
func (w *world) firstHasSome(ctx context.Context, n int) error {
	ctx, cancel := context.WithTimeoutCause(ctx, w.patience, fmt.Errorf("not within %s", w.patience))
	defer cancel()
	var first int
	err := w.site.Poll(ctx, "the replicas list all creates", func(context.Context) error {
		first = len(w.tap.Running(w.drivers[0].Replica, driverv1.Operation_OPERATION_CREATE))
		second := len(w.tap.Running(w.drivers[1].Replica, driverv1.Operation_OPERATION_CREATE))
		if first+second < n {
			return fmt.Errorf("they list %d and %d", first, second)
		}
		return nil
	})
	if err == nil && first == 0 {
		err = errors.New("the replica to be lost has no create, so the run proves nothing")
	}
	return err
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
