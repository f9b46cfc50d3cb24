package main

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// messages is how many bus messages are shown.
const messages = 8

// listen starts to collect messages, and returns once mcmctl is subscribed.
func (s *setup) listen(ctx context.Context) (*stack.Process, error) {
	sub, err := s.site.Start("mcmctl-sub", "mcmctl", s.mcmctlArgs("sub", "--count", strconv.Itoa(messages))...)
	if err != nil {
		return nil, err
	}
	sub.ExpectEnd()
	return sub, stack.Poll(ctx, "mcmctl sub listens", func(context.Context) error {
		select {
		case <-sub.Done():
			return sub.Stop() // returns why it ended
		default:
		}
		log, err := os.ReadFile(sub.Log)
		if err == nil && !strings.Contains(string(log), "listening") {
			err = errors.New("it is not subscribed yet")
		}
		return err
	})
}

// showMessages prints the collected messages.
func (s *setup) showMessages(ctx context.Context, sub *stack.Process) error {
	select {
	case <-sub.Done():
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	text, err := os.ReadFile(sub.Output)
	s.plainf("%s", strings.TrimRight(string(text), "\n"))
	return err
}
