package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// stepLimit bounds each step.
const stepLimit = time.Minute

// run plays the whole demo. In any case it ends everything that it started.
func run(ctx context.Context, n *narrator, p paths) error {
	if err := p.checkBuilt(programs()...); err != nil {
		return err
	}
	release, err := p.lock("demo", "a demo is already running: wait for it to end, or stop it with Ctrl-C")
	if err != nil {
		return err
	}
	defer release()
	site, err := stack.NewSite(stack.SiteOptions{Bin: p.bin, Dir: filepath.Join(p.run, "demo")})
	if err != nil {
		return err
	}
	s := &setup{narrator: n, paths: p, site: site}
	n.plainf("machinebus demo: %d Machine objects become %d Nodes, through two driver replicas on NATS, one of which dies.",
		machineCount, machineCount)
	n.plainf("Every program writes a log: %s", s.logs())
	n.steps = 8
	return s.finish(ctx, s.story(ctx))
}

// errFailed is the error when the narrator has printed the reason.
var errFailed = errors.New("the demo failed, see above")

// finish cleans up and prints the result.
func (s *setup) finish(ctx context.Context, err error) error {
	s.plainf("")
	switch {
	case err == nil:
	case errors.Is(context.Cause(ctx), errInterrupted):
		s.detailf("interrupted: cleaning up")
	default:
		s.detailf("error: %v", err)
		s.detailf("cleaning up; the logs stay: %s", s.logs())
	}
	stopErr := s.stop()
	if stopErr != nil {
		s.detailf("error while cleaning up: %v", stopErr)
	} else {
		s.detailf("all processes have ended")
	}
	if err != nil || stopErr != nil {
		return errFailed
	}
	s.plainf("\nThe demo succeeded. To try out the same set-up: make up")
	return nil
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

// heldBack are the instances whose creates the cloud does not answer at first, so that
// a replica can be killed during them.
var heldBack = []string{"demo-0[5-9]", "demo-10"}

// heldCount is the number of instances that heldBack matches.
const heldCount = 6

// ask applies the examples and shows how far the machines get.
func (s *setup) ask(ctx context.Context) error {
	s.beginf("asking for %d Machines, as `kubectl apply -f deploy/examples` would", machineCount)
	if err := s.cloud.Hold(ctx, heldBack...); err != nil {
		return err
	}
	s.detailf("the cloud creates all instances, but holds back its answers about %s", strings.Join(heldBack, " and "))
	sub, err := s.listen(ctx)
	if err != nil {
		return err
	}
	if err := s.applyExamples(ctx); err != nil {
		return err
	}
	if err := s.watch(ctx, "four machines run and six creates are with the replicas", s.halfWay); err != nil {
		return err
	}
	s.plainf("\n$ mcmctl sub --count %d", messages)
	if err := s.showMessages(ctx, sub); err != nil {
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

// check waits until all machines run, and proves that no instance was created twice.
func (s *setup) check(ctx context.Context) error {
	s.beginf("waiting until all %d Machines run", machineCount)
	if err := s.watch(ctx, "all machines are Running", allRunning); err != nil {
		return err
	}
	if err := s.kubectl(ctx, "get", "machines,nodes", "-o", "wide"); err != nil {
		return err
	}
	if err := s.mcmctl(ctx, "drivers"); err != nil {
		return err
	}
	s.plainf("")
	if err := s.checkCloud(ctx); err != nil {
		return err
	}
	return s.checkKilled(ctx)
}

// remove deletes the machines and shows that nothing is left of them.
func (s *setup) remove(ctx context.Context) error {
	s.beginf("deleting the Machines, as `kubectl delete machines --all` would")
	machines, err := s.machines(ctx)
	if err != nil {
		return err
	}
	if err := s.kube.DeleteAllOf(ctx, &v1alpha1.Machine{}, client.InNamespace(s.cluster.Namespace)); err != nil {
		return err
	}
	if err := s.watch(ctx, "all machines are gone", noneLeft); err != nil {
		return err
	}
	if err := s.kubectl(ctx, "get", "machines,nodes"); err != nil {
		return err
	}
	s.plainf("")
	stats, err := s.cloud.Admin.Stats(ctx)
	if err != nil {
		return err
	}
	s.detailf("the cloud: %d instances created, %d deleted, %d left", stats.Created, stats.Deleted, stats.Live)
	if stats.Live != 0 {
		return fmt.Errorf("%d instances are left in the cloud", stats.Live)
	}
	return nodesGone(ctx, s.kube, machines)
}
