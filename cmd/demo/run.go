package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/machinebus/machinebus/cmd/internal/stack"
)

// stepLimit bounds each wait of the story.
const stepLimit = time.Minute

// run plays the whole story. Whatever happens, nothing it started is left.
func run(ctx context.Context, n *narrator, p paths) (err error) {
	if err := p.checkBuilt(programs()...); err != nil {
		return err
	}
	release, err := p.lock("demo", "a demo is running already: let it end, or stop it with Ctrl-C")
	if err != nil {
		return err
	}
	defer release()
	site, err := stack.NewSite(stack.SiteOptions{Bin: p.bin, Dir: filepath.Join(p.run, "demo")})
	if err != nil {
		return err
	}
	s := &setup{narrator: n, paths: p, site: site}
	n.plain("machinebus demo: %d Machine objects become %d Nodes, through two driver replicas on NATS, one of which dies.",
		machineCount, machineCount)
	n.plain("Every program writes a log: %s", s.logs())
	n.steps = 8
	defer func() {
		switch {
		case err == nil:
		case errors.Is(context.Cause(ctx), errInterrupted):
			n.plain("")
			n.tell("interrupted: cleaning up")
		default:
			n.plain("")
			n.tell("this went wrong, and the demo ends here: %v", err)
			n.tell("cleaning up; the logs stay: %s", s.logs())
		}
		if stopErr := s.stop(); stopErr != nil {
			err = errors.Join(err, fmt.Errorf("cleaning up: %w", stopErr))
		} else if err == nil {
			n.tell("all processes have ended")
			n.plain("\nThe demo went as it should. To play with the same set-up: make up")
		}
	}()
	return s.story(ctx)
}

func (s *setup) story(ctx context.Context) error {
	if err := s.start(ctx); err != nil {
		return err
	}
	for _, step := range []func(context.Context) error{s.ask, s.kill, s.check, s.remove} {
		if err := s.limited(ctx, step); err != nil {
			return err
		}
	}
	return nil
}

func (s *setup) limited(ctx context.Context, step func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, stepLimit, fmt.Errorf("not within %s", stepLimit))
	defer cancel()
	return step(ctx)
}

// everything is the pattern of all instances' names.
const everything = "*"

// ask applies the examples, while the cloud keeps its answers to creates back:
// so there is a moment at which a replica can be killed in the middle of one.
func (s *setup) ask(ctx context.Context) error {
	s.begin("asking for %d Machines, as `kubectl apply -f deploy/examples` would", machineCount)
	if err := s.cloud.Hold(ctx, everything); err != nil {
		return err
	}
	s.tell("the cloud is told to make instances, but to keep its answers back until the next step")
	sub, err := s.listen(ctx)
	if err != nil {
		return err
	}
	if err := s.applyExamples(ctx); err != nil {
		return err
	}
	if err := s.watch(ctx, "both replicas together hold all creates", s.allHeld); err != nil {
		return err
	}
	s.plain("\n$ mcmctl sub --count %d", messages)
	if err := s.heard(ctx, sub); err != nil {
		return err
	}
	if err := s.mcmctl(ctx, "drivers"); err != nil {
		return err
	}
	if err := s.mcmctl(ctx, "ops"); err != nil {
		return err
	}
	return s.kubectl(ctx, "get", "machines,nodes", "-o", "wide")
}

// check waits until everything is well and proves that nothing was made twice.
func (s *setup) check(ctx context.Context) error {
	s.begin("waiting until all %d Machines run", machineCount)
	if err := s.watch(ctx, "all machines are Running", allRunning); err != nil {
		return err
	}
	if err := s.kubectl(ctx, "get", "machines,nodes", "-o", "wide"); err != nil {
		return err
	}
	if err := s.mcmctl(ctx, "drivers"); err != nil {
		return err
	}
	s.plain("")
	if err := s.checkCloud(ctx); err != nil {
		return err
	}
	return s.checkKilled(ctx)
}

// remove deletes the machines and shows that nothing is left of them.
func (s *setup) remove(ctx context.Context) error {
	s.begin("deleting the Machines")
	if err := s.kubectl(ctx, "delete", "machines", "--all", "--wait=false"); err != nil {
		return err
	}
	s.plain("")
	if err := s.watch(ctx, "all machines are gone", noneLeft); err != nil {
		return err
	}
	if err := s.kubectl(ctx, "get", "machines,nodes"); err != nil {
		return err
	}
	s.plain("")
	stats, err := s.cloud.Admin.Stats(ctx)
	if err != nil {
		return err
	}
	s.tell("the cloud: %d instances made, %d deleted, %d left", stats.Created, stats.Deleted, stats.Live)
	if stats.Live != 0 {
		return fmt.Errorf("%d instances are left in the cloud", stats.Live)
	}
	return s.nodesGone(ctx)
}
