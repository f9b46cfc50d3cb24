package main

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// A measure is what a load came to.
type measure struct {
	p50, p99  time.Duration
	perSecond float64
}

// load makes calls for a while, so many at a time.
func load(ctx context.Context, inFlight int, length time.Duration, call func(context.Context) error) (measure, error) {
	var mu sync.Mutex
	var all []time.Duration
	var errs []error
	var workers sync.WaitGroup
	start := time.Now()
	for range inFlight {
		workers.Go(func() {
			var took []time.Duration
			var err error
			for err == nil && time.Since(start) < length {
				begun := time.Now()
				err = call(ctx)
				took = append(took, time.Since(begun))
			}
			mu.Lock()
			defer mu.Unlock()
			all, errs = append(all, took...), append(errs, err)
		})
	}
	workers.Wait()
	if err := errors.Join(errs...); err != nil {
		return measure{}, err
	}
	elapsed := time.Since(start)
	slices.Sort(all)
	return measure{
		p50: all[len(all)/2], p99: all[len(all)*99/100],
		perSecond: float64(len(all)) / elapsed.Seconds(),
	}, nil
}
