package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestThreeProviders has a hundred machines of three providers in one namespace.
// Each provider has a driver and a cloud of its own.
func TestThreeProviders(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	shares := map[string]int{"north": 34, "west": 33, "south": 33}
	clouds := map[string]*stack.Cloud{}
	names := map[string][]string{}
	var all []string
	for provider, share := range shares {
		cloud := e.startCloud("cloud-" + provider)
		clouds[provider] = cloud
		e.secret["API token of "+provider] = cloud.APIToken
		_, err := e.site.StartDriver(e.ctx(), tap, stack.DriverOptions{
			Name: "driver-" + provider, NATSURL: manager.NATSURL, Clusters: []string{e.name},
			Args: []string{"--provider", provider},
		})
		e.must(err)
		secret := e.newSecret(provider)
		secret.StringData["apiToken"] = cloud.APIToken
		e.must(e.kube.Create(e.ctx(), secret))
		class := e.newClass(provider, map[string]any{"endpoint": cloud.Endpoint})
		class.Provider = provider
		e.must(e.kube.Create(e.ctx(), class))
		names[provider] = e.createMachines(share, provider)
		all = append(all, names[provider]...)
	}
	e.waitPhase(v1alpha1.MachineRunning, all)
	for provider, cloud := range clouds {
		created, err := cloud.Created(e.ctx())
		e.must(err)
		if len(created) != shares[provider] {
			t.Errorf("the cloud of %s made %d instances, want %d", provider, len(created), shares[provider])
		}
		for _, entry := range created {
			if !strings.HasPrefix(entry.Name, e.name+"-"+provider+"-") {
				t.Errorf("the cloud of %s made an instance of %s", provider, entry.Name)
			}
		}
	}
	for _, name := range all {
		e.deleteMachine(name)
	}
	e.waitPhase("", nil)
	for provider, cloud := range clouds {
		stats, err := cloud.Admin.Stats(e.ctx())
		e.must(err)
		if stats.Live != 0 || stats.Created != shares[provider] || stats.DuplicatesEver != 0 {
			t.Errorf("of the cloud of %s %d instances live, it made %d, of which duplicates %d; want 0, %d, 0",
				provider, stats.Live, stats.Created, stats.DuplicatesEver, shares[provider])
		}
	}
	e.wantInstances(0) // the cloud of no provider
}

// waitPhase waits until these machines are in a phase, and the namespace has no
// others. It asks for all at once.
func (e *env) waitPhase(phase v1alpha1.MachinePhase, names []string) {
	e.Helper()
	e.eventually(fmt.Sprintf("%d machines are in phase %q", len(names), phase), func(ctx context.Context) error {
		machines, err := e.machines(ctx)
		if err != nil {
			return err
		}
		there := 0
		for _, name := range names {
			if m := machines[name]; m != nil && m.Status.CurrentStatus.Phase == phase {
				there++
			}
		}
		if there != len(names) || len(machines) != len(names) {
			return fmt.Errorf("of %d machines %d are", len(machines), there)
		}
		return nil
	})
}
