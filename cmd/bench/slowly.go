package main

import (
	"context"
	"time"
)

// slowly is a slow provider that limits how many operations each driver runs at once. A
// nil one takes no time.
type slowly struct {
	takes time.Duration
	slots chan struct{}
}

func newSlowly(takes time.Duration, slots int) *slowly {
	return &slowly{takes: takes, slots: make(chan struct{}, slots)}
}

// another is the same for another driver.
func (s *slowly) another() *slowly {
	if s == nil {
		return nil
	}
	return newSlowly(s.takes, cap(s.slots))
}

func (s *slowly) wait(ctx context.Context) error {
	if s == nil {
		return nil
	}
	select {
	case s.slots <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-s.slots }()
	timer := time.NewTimer(s.takes)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
