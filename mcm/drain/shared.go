package drain

import (
	"context"
	"time"
)

// readLimit bounds one read of what is shared: an API server that hangs must not keep all
// drains from being cancelled.
const readLimit = 30 * time.Second

// A shared value is read from the API server for all drains, at most once a poll. It is safe
// for concurrent use; the value must not be changed.
type shared[T any] struct {
	turn  chan struct{}
	value T
	read  time.Time
}

func newShared[T any]() *shared[T] { return &shared[T]{turn: make(chan struct{}, 1)} }

// get returns the value, read again if it is older than maxAge.
func (s *shared[T]) get(ctx context.Context, maxAge time.Duration, read func(context.Context) (T, error)) (T, error) {
	var none T
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return none, ctx.Err()
	}
	if !s.read.IsZero() && time.Since(s.read) < maxAge {
		return s.value, nil
	}
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	began := time.Now()
	value, err := read(ctx)
	if err != nil {
		return none, err
	}
	s.value, s.read = value, began

	return value, nil
}
