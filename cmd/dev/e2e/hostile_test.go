package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestHostileReplica has replicas that break the contract, each in its own way,
// share their providers' requests with a good one. What the good ones are asked
// for must not suffer, and what the others were must be done once they are gone.
func TestHostileReplica(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("", "--machine-operation-timeout=5s",
		"--retry-short=1s", "--retry-medium=1s", "--retry-long=1s", "--resource-exhausted-retry=1s")
	manners := slices.Sorted(hostileManners())
	hostile, names := map[string]*stack.Process{}, map[string][]string{}
	for _, manner := range manners {
		hostile[manner] = e.startHostile(manner, manager.NATSURL)
		e.createProvider(manner)
		// While it is alone, it is asked for sure.
		names[manner] = e.createMachines(1, manner)
	}
	for _, manner := range manners {
		e.eventually("the replica that is "+manner+" was asked", func(context.Context) error {
			if asked := askedOf(hostile[manner]); !asked[names[manner][0]] {
				return fmt.Errorf("for %v", asked)
			}
			return nil
		})
	}
	const calm = "calm" // has no replica but a good one
	e.createProvider(calm)
	for _, provider := range append([]string{calm}, manners...) {
		_, err := e.site.StartDriver(e.ctx(), tap, stack.DriverOptions{
			Name: "driver-" + provider, NATSURL: manager.NATSURL, Clusters: []string{e.name}, Args: []string{"--provider", provider},
		})
		e.must(err)
	}
	names[calm] = e.createMachines(4, calm)
	for _, manner := range manners {
		for i := range 4 {
			name := fmt.Sprintf("%s-%s-%02d", e.name, manner, i+2)
			e.createMachine(name, manner)
			names[manner] = append(names[manner], name)
		}
	}
	e.waitRunning(names[calm]...)
	for _, manner := range manners {
		e.eventually("what the replica that is "+manner+" does not hold is Running", func(ctx context.Context) error {
			for _, name := range names[manner] {
				err := e.inPhase(ctx, name, v1alpha1.MachineRunning)
				if err != nil && (!hostileHolds(manner) || !askedOf(hostile[manner])[name]) {
					return err
				}
			}
			return nil
		})
	}
	var all []string
	for _, manner := range manners {
		e.must(hostile[manner].Kill())
		all = append(all, names[manner]...)
	}
	all = append(all, names[calm]...)
	e.waitRunning(all...)
	e.wantInstances(len(all))
	e.wantNoDuplicates()
	e.deleteAll(all...)
	e.wantInstances(len(all))
}

// createProvider makes a class for a provider, called after it, for the env's cloud.
func (e *env) createProvider(provider string) (class string) {
	e.Helper()
	class = strings.ReplaceAll(provider, "_", "-")
	e.must(e.kube.Create(e.ctx(), e.newSecret(class)))
	object := e.newClass(class, nil)
	object.Provider = provider
	e.must(e.kube.Create(e.ctx(), object))
	return class
}

// startHostile starts this test binary as a replica of the provider that is called
// after its manner.
func (e *env) startHostile(manner, natsURL string) *stack.Process {
	e.Helper()
	self, err := os.Executable()
	e.must(err)
	self, err = filepath.Abs(self)
	e.must(err)
	p, err := e.site.Start("hostile-"+manner, self, hostileRole, natsURL, e.name, manner)
	e.must(err)
	return p
}

// askedOf returns the machines that a hostile replica was asked to change, of
// which it writes down each.
func askedOf(p *stack.Process) map[string]bool {
	asked := map[string]bool{}
	content, err := os.ReadFile(p.Output)
	if err != nil {
		return asked // it has only just been started
	}
	for line := range strings.Lines(string(content)) {
		asked[strings.TrimSpace(line)] = true
	}
	return asked
}
