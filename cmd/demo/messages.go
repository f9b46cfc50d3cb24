package main

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"

	"github.com/machinebus/machinebus/cmd/internal/stack"
)

// messages is how many bus messages are shown.
const messages = 8

// listen starts to collect messages and returns when it hears them.
func (s *setup) listen(ctx context.Context) (*stack.Process, error) {
	sub, err := s.site.Start("mcmctl-sub", "mcmctl", s.mcmctlArgs("sub", "--count", strconv.Itoa(messages))...)
	if err != nil {
		return nil, err
	}
	sub.ExpectEnd()
	return sub, stack.Poll(ctx, "mcmctl sub listens", func(context.Context) error {
		select {
		case <-sub.Done():
			return sub.Stop() // its error tells why
		default:
		}
		log, err := os.ReadFile(sub.Log)
		if err == nil && !strings.Contains(string(log), "listening") {
			err = errors.New("it has not said so")
		}
		return err
	})
}

// heard shows what was collected.
func (s *setup) heard(ctx context.Context, sub *stack.Process) error {
	select {
	case <-sub.Done():
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	text, err := os.ReadFile(sub.Output)
	s.plainf("%s", strings.TrimRight(string(text), "\n"))
	return err
}
