package main

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// A measure is the result of a load.
type measure struct {
	p50, p99  time.Duration
	perSecond float64
}

// paced starts calls at a fixed rate. The time of each counts from its planned start, so
// that it includes a delay.
func paced(ctx context.Context, perSecond int, length time.Duration, call func(context.Context) error) (measure, error) {
	n := int(length.Seconds() * float64(perSecond))
	took, errs := make([]time.Duration, n), make([]error, n)
	var calls sync.WaitGroup
	start := time.Now()
	next := time.NewTimer(0)
	defer next.Stop()
	for i := range n {
		due := start.Add(time.Duration(i) * time.Second / time.Duration(perSecond))
		next.Reset(time.Until(due))
		select {
		case <-next.C:
		case <-ctx.Done():
			calls.Wait()
			return measure{}, ctx.Err()
		}
		calls.Go(func() {
			errs[i] = call(ctx)
			took[i] = time.Since(due)
		})
	}
	calls.Wait()
	if err := errors.Join(errs...); err != nil {
		return measure{}, err
	}
	return measured(took, time.Since(start)), nil
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
			for { // once at least, however late this goroutine is
				start := time.Now()
				err = call(ctx)
				took = append(took, time.Since(start))
				if err != nil || time.Since(start) >= length {
					break
				}
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
	return measured(all, time.Since(start)), nil
}

func measured(all []time.Duration, elapsed time.Duration) measure {
	slices.Sort(all)
	return measure{
		p50: all[len(all)/2], p99: all[len(all)*99/100],
		perSecond: float64(len(all)) / elapsed.Seconds(),
	}
}
