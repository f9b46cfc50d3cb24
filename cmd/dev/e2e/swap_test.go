package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestSwap replaces the machine controller manager by mcm, and mcm by that one again, while
// machines run. Neither replaces a machine that the other has made, and each scales and deletes
// what it took over. Both drive the cloud by the same driver.
func TestSwap(t *testing.T) {
	e := newEnv(t)
	old := e.buildOldMCM()
	e.createSampleClass()
	d := e.newDeployment(2)
	e.must(e.kube.Create(e.ctx(), d))
	processes := e.startOldMCM(old)
	t.Cleanup(func() { // they end with 1 when they are stopped
		for _, p := range processes {
			p.ExpectEnd()
		}
	})
	e.waitDeployment(d, 2)
	before := e.made()

	nats, err := e.site.StartNATS(e.ctx())
	e.must(err)
	// It waits for the Leases of both programs.
	manager, tap := e.startManager(nats.URL, "--leader-elect=true", "--retry-short=1s")
	_, err = e.site.StartDriver(e.ctx(), tap, stack.DriverOptions{Name: "sample", Program: e.buildMCMDriver(), NATSURL: nats.URL, Clusters: []string{e.name}})
	e.must(err)
	for _, p := range processes {
		e.must(p.Kill())
	}
	e.scaleDeployment(d, 4)
	e.waitDeployment(d, 4)
	e.wantStill(before)
	taken := slices.Sorted(maps.Keys(before))[0]
	e.deleteAll(taken) // made there, deleted here
	e.waitDeployment(d, 4)
	before = e.made()

	e.must(manager.Stop())
	for i, p := range processes {
		processes[i], err = e.site.Restart(p)
		e.must(err)
	}
	e.scaleDeployment(d, 5)
	e.waitDeployment(d, 5)
	e.wantStill(before)
	e.must(e.kube.Delete(e.ctx(), d))
	e.waitGone(slices.Collect(maps.Keys(e.made()))...)
}

// An oldMCM are the two programs of the machine controller manager.
type oldMCM struct{ manager, controller string }

// buildOldMCM builds both from their module, with the sample driver.
func (e *env) buildOldMCM() oldMCM {
	e.Helper()
	dir := e.TempDir()
	old := oldMCM{filepath.Join(dir, "manager"), filepath.Join(dir, "controller")}
	for program, pkg := range map[string]string{
		old.manager:    "github.com/gardener/machine-controller-manager/cmd/machine-controller-manager",
		old.controller: "./controller",
	} {
		build := exec.CommandContext(e.ctx(), "go", "build", "-C", "../oldmcm", "-o", program, pkg)
		if out, err := build.CombinedOutput(); err != nil {
			e.Fatalf("%v: %v\n%s", build, err, out)
		}
	}
	return old
}

// startOldMCM starts both programs for the env's namespace. They wait while another holds their
// Leases.
func (e *env) startOldMCM(old oldMCM) (processes []*stack.Process) {
	e.Helper()
	for name, program := range map[string]string{"old-manager": old.manager, "old-controller": old.controller} {
		port, err := stack.FreePort()
		e.must(err)
		p, err := e.site.Start(name, program, "--control-kubeconfig", e.cluster.Kubeconfig, "--target-kubeconfig", e.cluster.Kubeconfig,
			"--namespace", e.name, "--address", "127.0.0.1", "--port", fmt.Sprint(port))
		e.must(err)
		processes = append(processes, p)
	}
	return processes
}

func (e *env) newDeployment(replicas int32) *v1alpha1.MachineDeployment {
	labels := map[string]string{"pool": e.name}
	one := intstr.FromInt32(1)
	d := &v1alpha1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Name: e.name, Namespace: e.name}}
	d.Spec.Replicas, d.Spec.Selector = replicas, &metav1.LabelSelector{MatchLabels: labels}
	d.Spec.Template.Labels, d.Spec.Template.Spec.Class = labels, v1alpha1.ClassSpec{Kind: v1alpha1.KindMachineClass, Name: className}
	d.Spec.Strategy = v1alpha1.MachineDeploymentStrategy{
		Type: v1alpha1.RollingUpdateMachineDeploymentStrategyType,
		RollingUpdate: &v1alpha1.RollingUpdateMachineDeployment{
			UpdateConfiguration: v1alpha1.UpdateConfiguration{MaxSurge: &one, MaxUnavailable: &one},
		},
	}
	return d
}

func (e *env) scaleDeployment(d *v1alpha1.MachineDeployment, replicas int32) {
	e.Helper()
	e.must(e.kube.Patch(e.ctx(), d, client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas))))
}

// waitDeployment waits until a deployment has n Running machines and no others.
func (e *env) waitDeployment(d *v1alpha1.MachineDeployment, n int32) {
	e.Helper()
	e.eventually(fmt.Sprintf("the deployment has %d machines", n), func(ctx context.Context) error {
		machines, err := e.machines(ctx)
		if err != nil || len(machines) != int(n) {
			return errors.Join(err, fmt.Errorf("there are %d", len(machines)))
		}
		for name := range machines {
			if err := e.inPhase(ctx, name, v1alpha1.MachineRunning); err != nil {
				return err
			}
		}
		got := &v1alpha1.MachineDeployment{}
		err = e.kube.Get(ctx, client.ObjectKeyFromObject(d), got)
		if s := got.Status; err == nil && (s.ObservedGeneration != got.Generation || s.AvailableReplicas != n || s.UpdatedReplicas != n) {
			err = fmt.Errorf("generation %d has status %+v", got.Generation, s)
		}
		return err
	})
}

// made returns the uids and provider ids of all machines, by name.
func (e *env) made() map[string][2]string {
	e.Helper()
	machines, err := e.machines(e.ctx())
	e.must(err)
	made := map[string][2]string{}
	for name, m := range machines {
		made[name] = [2]string{string(m.UID), m.Spec.ProviderID}
	}
	return made
}

// wantStill wants these machines to be there as they were.
func (e *env) wantStill(before map[string][2]string) {
	e.Helper()
	now := e.made()
	for name, was := range before {
		if now[name] != was {
			e.Errorf("machine %s has uid and provider id %q, want %q", name, now[name], was)
		}
	}
}
