package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"
)

// benchCreate compares mcm with workers that wait for the cloud, as those of the machine
// controller manager do.
func benchCreate(ctx context.Context, b *bench) error {
	w, err := b.newWorld(ctx)
	if err != nil {
		return err
	}
	return errors.Join(b.compareCreates(ctx, w), w.close())
}

func (b *bench) compareCreates(ctx context.Context, w *world) error {
	peer, err := newPeer(ctx, w)
	if err != nil {
		return err
	}
	if err := w.latency(ctx, b.latency, 0); err != nil {
		return err
	}
	var ratios []float64
	table := [][]string{{
		"round", "mcm", "blocking workers", "ratio", "CPU of mcm", "drivers", "cloud", "API server", "the same, for the peer",
	}}
	var kinds [][]string
	for round := range b.rounds {
		before, err := w.apiRequests(ctx)
		if err != nil {
			return err
		}
		own, err := w.timed(ctx, w.createMachines, w.deleteMachines, machineNames(b.machines, fmt.Sprintf("create-%d", round)))
		if err != nil {
			return err
		}
		kinds = kindsTable(before, own.asked, b.machines)
		blocking, err := w.timed(ctx, peer.createMachines, peer.deleteMachines, machineNames(b.machines, fmt.Sprintf("blocking-%d", round)))
		if err != nil {
			return fmt.Errorf("blocking workers: %w", err)
		}
		ratios = append(ratios, float64(blocking.took)/float64(own.took))
		table = append(table, []string{
			strconv.Itoa(round + 1), seconds(own.took), seconds(blocking.took), fmt.Sprintf("%.1f", ratios[round]),
			seconds(own.cpu.mcm), seconds(own.cpu.drivers), seconds(own.cpu.cloud), seconds(own.cpu.apiServer),
			seconds(blocking.cpu.apiServer),
		})
	}
	b.table(table...)
	b.note("Requests to the API server from all clients in mcm's part of the last round:")
	b.table(kinds...)
	b.atLeast(fmt.Sprintf("create-%d-at-%s", b.machines, b.latency), median(ratios), 10)
	return b.recordCreates(ctx, w)
}

// recordCreates records how long machines take with a slower provider: once, and without
// the peer, whose workers would wait for most of an hour.
func (b *bench) recordCreates(ctx context.Context, w *world) error {
	const latency = 5 * time.Second
	if err := w.latency(ctx, latency, 0); err != nil {
		return err
	}
	table := [][]string{{"machines", "took", "beyond the cloud's " + latency.String(), "CPU of mcm", "API server"}}
	for _, machines := range []int{200, 1000} {
		t, err := w.timed(ctx, w.createMachines, w.deleteMachines, machineNames(machines, fmt.Sprintf("record-%d", machines)))
		if err != nil {
			return err
		}
		table = append(table, []string{
			strconv.Itoa(machines), seconds(t.took), seconds(t.took - latency), seconds(t.cpu.mcm), seconds(t.cpu.apiServer),
		})
	}
	b.note("mcm alone, once, with a slower cloud:")
	b.table(table...)
	return nil
}

// A timing is how long machines took to be Running, and what that cost.
type timing struct {
	took  time.Duration
	cpu   usage
	asked map[string]int // of the API server, since it started
}

// usage is processor time by who used it.
type usage struct{ mcm, drivers, cloud, apiServer time.Duration }

// timed creates and deletes machines, and measures the creation.
func (w *world) timed(ctx context.Context, create, remove func(context.Context, []string) error, names []string) (timing, error) {
	before, err := w.usage()
	if err != nil {
		return timing{}, err
	}
	start := time.Now()
	if err := create(ctx, names); err != nil {
		return timing{}, err
	}
	t := timing{took: time.Since(start)}
	after, err := w.usage()
	if err != nil {
		return t, err
	}
	t.cpu = usage{
		mcm: after.mcm - before.mcm, drivers: after.drivers - before.drivers,
		cloud: after.cloud - before.cloud, apiServer: after.apiServer - before.apiServer,
	}
	if t.asked, err = w.apiRequests(ctx); err != nil {
		return t, err
	}
	return t, remove(ctx, names)
}

func (w *world) usage() (usage, error) {
	var u usage
	var errs []error
	add := func(total *time.Duration, pid int) {
		used, err := cpuTime(pid)
		*total += used
		errs = append(errs, err)
	}
	add(&u.mcm, w.manager.PID())
	for _, d := range w.drivers {
		add(&u.drivers, d.PID())
	}
	add(&u.cloud, w.cloud.PID())
	add(&u.apiServer, w.cluster.PID())
	return u, errors.Join(errs...)
}
