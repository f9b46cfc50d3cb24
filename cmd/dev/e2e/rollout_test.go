package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// rollout runs mcmctl rollout for the pool and returns what it printed.
func (p *pool) rollout(verb string, args ...string) string {
	p.Helper()
	ctx, cancel := context.WithTimeoutCause(p.ctx(), patience, fmt.Errorf("not within %s", patience))
	defer cancel()
	all := append([]string{"rollout", verb, p.name, "--kubeconfig", p.cluster.Kubeconfig, "--namespace", p.env.name}, args...)
	cmd := exec.CommandContext(ctx, p.site.Program("mcmctl"), all...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		p.Fatalf("mcmctl rollout %s %v: %v\n%s%s", verb, args, err, out.String(), errOut.String())
	}
	return out.String()
}

// wantRollout runs mcmctl rollout and expects a text in what it prints last.
func (p *pool) wantRollout(want, verb string, args ...string) {
	p.Helper()
	lines := strings.Split(strings.TrimSpace(p.rollout(verb, args...)), "\n")
	if last := lines[len(lines)-1]; !strings.Contains(last, want) {
		p.Errorf("mcmctl rollout %s %v ends with %q, want %q", verb, args, last, want)
	}
}

// TestRollout rolls a pool out and back, pauses and restarts it, and follows that with
// mcmctl only.
func TestRollout(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	p := newPool(e, manager.NATSURL, tap)
	const done = "successfully rolled out"
	class := func(name string) {
		p.change(func(s *v1alpha1.MachineDeploymentSpec) { s.Template.Spec.Class.Name = name })
	}
	p.scale(2)
	p.wantRollout(done, "status")
	p.settled(2, className)

	class(otherClass)
	p.wantRollout(done, "status")
	p.settled(2, otherClass)
	var rows [][]string
	for line := range strings.Lines(p.rollout("history")) {
		fields := strings.Fields(line)
		rows = append(rows, []string{fields[0], fields[2], fields[3]})
	}
	want := [][]string{{"REVISION", "CLASS", "MACHINES"}, {"1", className, "0"}, {"2", otherClass, "2"}}
	if !slices.EqualFunc(want, rows, slices.Equal) {
		t.Errorf("history is %q, want %q", rows, want)
	}

	p.wantRollout("is rolled back", "undo")
	p.wantRollout(done, "status")
	p.settled(2, className)
	p.wantRollout("is already at revision 3", "undo", "--to-revision", "3")
	p.wantRollout("is rolled back", "undo", "--to-revision", "2")
	p.wantRollout(done, "status")
	p.settled(2, otherClass)

	p.wantRollout("paused", "pause")
	class(className)
	e.must(e.cloud.Hold(e.ctx(), "*"))
	p.wantRollout("resumed", "resume")
	p.working(create)
	p.eventually("mcmctl shows the progress", func(context.Context) error {
		if out := p.rollout("status", "--watch=false"); !strings.Contains(out, "of 2 updated") {
			return fmt.Errorf("it says %q", out)
		}
		return nil
	})
	if err := p.machinesOf(e.ctx(), otherClass, 0); err == nil {
		t.Error("all old machines are gone, though no new one is there")
	}
	e.must(e.cloud.Hold(e.ctx()))
	p.wantRollout(done, "status")
	p.settled(2, className)

	before, err := e.machineNames(e.ctx())
	e.must(err)
	p.wantRollout("restarted", "restart")
	p.wantRollout(done, "status")
	p.settled(2, className)
	after, err := e.machineNames(e.ctx())
	e.must(err)
	if slices.ContainsFunc(after, func(name string) bool { return slices.Contains(before, name) }) {
		t.Errorf("after a restart there are %q, before it %q", after, before)
	}
	p.delete()
	p.gone()
}

// TestRolloutAboveAnotherMachineController rolls a pool out and back whose machines
// another controller makes and deletes, one of which fails on the way.
func TestRolloutAboveAnotherMachineController(t *testing.T) {
	e := newEnv(t)
	e.startManager("", "--controllers=*,-machine")
	other := &otherController{env: e}
	d := e.newPoolObject()
	d.Spec.Replicas = 4
	p := &pool{env: e, name: d.Name}
	e.must(e.kube.Create(e.ctx(), d))
	other.runUntil("the pool has its machines", func(ctx context.Context) error { return e.poolHas(ctx, d, 4) })

	// Never more machines than replicas and surge, nor fewer that run than may be missing.
	rolled := func(class string) func(context.Context) error {
		return func(ctx context.Context) error {
			machines, err := e.machines(ctx)
			if err != nil {
				return err
			}
			running := 0
			for _, m := range machines {
				if m.DeletionTimestamp.IsZero() && m.Status.CurrentStatus.Phase == v1alpha1.MachineRunning {
					running++
				}
			}
			if len(machines) > 5 || running < 3 {
				t.Errorf("%d machines, of which %d run; want at most 5 and at least 3", len(machines), running)
			}
			return errors.Join(e.poolHas(ctx, d, 4), p.machinesOf(ctx, class, 4))
		}
	}
	p.change(func(s *v1alpha1.MachineDeploymentSpec) { s.Template.Spec.Class.Name = otherClass })
	other.runUntil("the pool is rolled out", rolled(otherClass))
	p.change(func(s *v1alpha1.MachineDeploymentSpec) { s.RollbackTo = &v1alpha1.RollbackConfig{} })
	other.runUntil("the pool is rolled back", rolled(className))

	names, err := e.machineNames(e.ctx())
	e.must(err)
	other.fail = names[0]
	p.change(func(s *v1alpha1.MachineDeploymentSpec) { s.Template.Spec.Class.Name = otherClass })
	other.runUntil("the pool is rolled out beside a machine that fails", func(ctx context.Context) error {
		return errors.Join(e.poolHas(ctx, d, 4), p.machinesOf(ctx, otherClass, 4))
	})
	e.must(e.kube.Delete(e.ctx(), d))
	other.runUntil("nothing is left", func(ctx context.Context) error {
		names, err := e.machineNames(ctx)
		if err == nil && len(names) > 0 {
			err = fmt.Errorf("machines %q", names)
		}
		return errors.Join(err, client.IgnoreNotFound(e.kube.Get(ctx, client.ObjectKeyFromObject(d), d)))
	})
}
