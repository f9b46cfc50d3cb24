package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// steady is how long mcm is watched with nothing to do.
const steady = 20 * time.Second

// benchFleet lets one mcm create very many machines: the cloud holds back all creates
// until the last one is in flight. It runs once and compares nothing. The Leases of so many
// Nodes alone would use up a small machine, so it uses a calm world.
func benchFleet(ctx context.Context, b *bench) error {
	const perMachine = 200 * time.Millisecond
	w, err := b.newWorldWith(ctx, worldOptions{slots: b.fleet, patience: patience + time.Duration(b.fleet)*perMachine, calm: true})
	if err != nil {
		return err
	}
	return errors.Join(b.measureFleet(ctx, w), w.close())
}

func (b *bench) measureFleet(ctx context.Context, w *world) error {
	table := [][]string{{"", "took", "CPU of mcm", "API server", "API requests", "memory of mcm"}}
	phase := func(name string, do func() error) error {
		before, err := w.reading(ctx)
		if err != nil {
			return err
		}
		if err := do(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		after, err := w.reading(ctx)
		if err != nil {
			return err
		}
		table = append(table, []string{
			name, seconds(after.at.Sub(before.at)), seconds(after.cpu.mcm - before.cpu.mcm),
			seconds(after.cpu.apiServer - before.cpu.apiServer), strconv.Itoa(after.requests - before.requests),
			mebibytes(after.memory),
		})
		return nil
	}
	names := machineNames(b.fleet, "fleet")
	idle := func() error { return pass(ctx, steady) }
	steps := []struct {
		name string
		do   func() error
	}{
		{"nothing to do", idle},
		{"until all operations are in flight", func() error { return w.holdAll(ctx, names, cloudapi.EffectStart) }},
		{"with all in flight", idle},
		{"until all are Running", func() error { return w.releaseAll(ctx, names) }},
		{"all Running", idle},
		{"until all are gone", func() error { return w.deleteMachines(ctx, names) }},
	}
	for _, step := range steps {
		if err := phase(step.name, step.do); err != nil {
			return err
		}
	}
	b.table(table...)
	return nil
}

// holdAll creates machines and returns when all creates are held by the cloud, before
// or after they have taken effect.
func (w *world) holdAll(ctx context.Context, names []string, effect cloudapi.Effect) error {
	if _, err := w.cloud.Admin.Patch(ctx, cloudapi.KnobsPatch{Hold: &[]string{"*"}, CreateEffect: &effect}); err != nil {
		return err
	}
	err := inParallel(names, func(name string) error { return w.kube.Create(ctx, newMachine(namespace, name)) })
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, w.patience, fmt.Errorf("not within %s", w.patience))
	defer cancel()
	return w.site.Poll(ctx, "all creates are held", func(ctx context.Context) error {
		stats, err := w.cloud.Admin.Stats(ctx)
		if err == nil && stats.Held < len(names) {
			return fmt.Errorf("%d are", stats.Held)
		}
		return err
	})
}

func (w *world) releaseAll(ctx context.Context, names []string) error {
	if _, err := w.cloud.Admin.Patch(ctx, cloudapi.KnobsPatch{Hold: &[]string{}}); err != nil {
		return err
	}
	return w.running(ctx, names)
}

// pass lets time pass.
func pass(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// A reading is what has been used so far.
type reading struct {
	at       time.Time
	cpu      usage
	requests int
	memory   int64 // kibibytes that mcm has in memory at this moment
}

func (w *world) reading(ctx context.Context) (r reading, err error) {
	r.at = time.Now()
	var errs [3]error
	r.cpu, errs[0] = w.usage()
	r.requests, errs[1] = w.counted(ctx)
	var use memoryUse
	use, errs[2] = memoryOf(w.manager.PID())
	r.memory = use.now
	return r, errors.Join(errs[:]...)
}
