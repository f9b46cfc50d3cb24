package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// up starts the set-up in processes that outlive this one; down ends them.
func up(ctx context.Context, n *narrator, p paths) (err error) {
	if err := p.checkBuilt(programs()...); err != nil {
		return err
	}
	release, err := p.lock("up", "another make up or make down is running: wait for it to end")
	if err != nil {
		return err
	}
	defer release()
	old, err := readState(p.state())
	if err != nil {
		return err
	}
	if alive := old.alive(); len(alive) > 0 {
		return fmt.Errorf("the set-up has been running since %s: use it, or end it with make down", alive[0].Since())
	}
	st := &state{path: p.state()}
	site, err := stack.NewSite(stack.SiteOptions{
		Bin: p.bin, Dir: filepath.Dir(p.state()), Detached: true, OnStart: st.add,
	})
	if err != nil {
		return err
	}
	s := &setup{narrator: n, paths: p, site: site}
	n.steps = 5
	if err := s.bringUp(ctx, st); err != nil {
		if errors.Is(context.Cause(ctx), errInterrupted) {
			n.plainf("")
			n.detailf("interrupted: cleaning up")
		}
		if stopErr := s.stop(); stopErr != nil {
			return errors.Join(err, fmt.Errorf("cleaning up: %w; run make down to try again", stopErr))
		}
		return errors.Join(err, st.remove())
	}
	s.tap.Close()
	s.usage()
	return nil
}

func (s *setup) bringUp(ctx context.Context, st *state) error {
	if err := s.start(ctx); err != nil {
		return err
	}
	if err := st.setCluster(s.cluster); err != nil {
		return err
	}
	return s.limited(ctx, func(ctx context.Context) error {
		s.beginf("asking for %d Machines, as `kubectl apply -f deploy/examples` would", machineCount)
		if err := s.applyExamples(ctx); err != nil {
			return err
		}
		return s.watch(ctx, "all machines are Running", allRunning)
	})
}

// usage prints commands for the set-up.
func (s *setup) usage() {
	kubectl := "kubectl"
	if !s.cluster.Foreign {
		kubectl = s.paths.short(s.site.Program("devcluster")) + " kubectl"
	}
	mcmctl := s.paths.short(s.site.Program("mcmctl"))
	s.plainf(`
The set-up is running. To end it: make down

  export KUBECONFIG=%s
  export NATS_URL=%s
  %s get machines,nodes -o wide%s
  %s drivers
  %s ops --watch
  %s sub

The virtual cloud is at %s, mcm's metrics at http://%s/metrics.
Logs: %s`,
		s.cluster.Kubeconfig, s.manager.NATSURL, kubectl, s.namespaceFlag(), mcmctl, mcmctl, mcmctl,
		s.cloud.Endpoint, s.manager.Address, s.logs())
}

func (s *setup) namespaceFlag() string {
	if !s.cluster.Foreign {
		return ""
	}
	return " --namespace " + s.cluster.Namespace
}
