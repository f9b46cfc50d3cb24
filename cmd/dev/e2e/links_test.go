package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus/chaos"
	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// silence is how long one direction of a link is held: long enough for mcm to give
// the replica's operations to another one.
const silence = 5 * time.Second

// TestOneWayLoss holds back messages from or to a replica in the middle
// of creates. All of it arrives in the end.
func TestOneWayLoss(t *testing.T) {
	t.Parallel()
	for name, direction := range map[string]chaos.Direction{"to the server": chaos.ToServer, "to the replica": chaos.ToClient} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			manager, tap := e.startManager("")
			link, err := chaos.OpenLink(e.ctx(), strings.TrimPrefix(manager.NATSURL, "nats://"))
			e.must(err)
			e.atEnd = append(e.atEnd, link.Close)
			victim := e.startDrivers(1, "nats://"+link.Address(), tap)[0]
			e.createClass()
			const machines = 6
			e.slowCreates(2 * time.Second)
			names := e.createMachines(machines, className)
			e.waitCreating(tap, []*stack.Driver{victim})
			_, err = e.site.StartDriver(e.ctx(), tap, stack.DriverOptions{
				Name: "driver-virtual-other", NATSURL: manager.NATSURL, Clusters: []string{e.name},
			})
			e.must(err)
			link.Hold(direction)
			over := time.NewTimer(silence) // its length is what is tested
			select {
			case <-over.C:
			case <-e.ctx().Done():
				t.Fatal("the test was ended")
			}
			link.Mend()
			e.waitRunning(names...)
			e.wantInstances(machines)
			e.wantNoDuplicates()
			e.deleteAll(names...)
			e.wantInstances(machines)
		})
	}
}
