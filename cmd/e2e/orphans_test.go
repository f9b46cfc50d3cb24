package e2e

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/internal/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// TestOrphans leaves an instance without a machine in the cloud, which must go,
// while a create is in flight, whose instance must stay; and then takes most
// instances away behind everybody's back: now nothing more may go.
func TestOrphans(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("",
		"--machine-safety-orphan-vms-period=200ms", "--machine-safety-orphan-vms-grace=2s")
	drivers := e.startDrivers(1, manager.NATSURL, tap)
	e.createClass()
	names := e.createMachines(3, className)
	e.waitRunning(names...)
	cloud, err := cloudapi.NewClient(e.cloud.Endpoint, e.cloud.APIToken)
	e.must(err)

	late := e.name + "-late"
	e.must(e.cloud.Hold(e.ctx(), late))
	e.createMachine(late, className)
	e.waitHeld(1, tap, drivers)
	orphan := e.plant(cloud, "orphan")
	e.waitClassEvent(corev1.EventTypeWarning, orphan.ProviderID)
	e.eventually("the orphan is gone", func(ctx context.Context) error { return e.absent(ctx, cloud, orphan.ID) })
	e.waitClassEvent(corev1.EventTypeNormal, orphan.ProviderID)
	e.must(e.cloud.Hold(e.ctx()))
	e.waitRunning(append(names, late)...)
	stats, err := e.cloud.Admin.Stats(e.ctx())
	e.must(err)
	if stats.Deleted != 1 {
		t.Errorf("%d instances were deleted, want the orphan alone", stats.Deleted)
	}

	e.loseInstances(cloud, 3)
	passes := func() float64 { return e.counter(manager, "mcm_safety_orphan_passes_total", `outcome="doubtful"`) }
	e.eventually("a look is doubtful", func(context.Context) error { return atLeast(passes(), 1) })
	kept := e.plant(cloud, "kept")
	e.waitClassEvent(corev1.EventTypeWarning, "lists only 1 of the 4 instances")
	before := passes()
	const many = 20 // looks, which take longer than the grace period
	e.eventually("there were many more looks", func(context.Context) error { return atLeast(passes(), before+many) })
	if _, err := cloud.Get(e.ctx(), kept.ID); err != nil {
		t.Errorf("instance %s, which a doubtful list shows: %v", kept.ID, err)
	}
}

// plant makes an instance as the env's driver would for a machine that there is
// not.
func (e *env) plant(cloud *cloudapi.Client, name string) *cloudapi.Instance {
	e.Helper()
	instance, err := cloud.Create(e.ctx(), cloudapi.CreateRequest{
		Name: e.name + "-" + name, MachineType: "vm.small", Region: "moon", IdempotencyToken: name,
		Tags: map[string]string{
			"machinebus.io/cluster": e.name, "machinebus.io/class": e.name + "/" + className,
			cloudapi.TagMachineUID: name + "-uid", "machinebus.io/machine-name": e.name + "-" + name,
		},
	})
	e.must(err)
	return instance
}

// loseInstances removes n instances that machines have, without telling anybody.
func (e *env) loseInstances(cloud *cloudapi.Client, n int) {
	e.Helper()
	instances, err := e.cloud.Instances(e.ctx())
	e.must(err)
	for _, instance := range instances[:n] {
		e.must(cloud.Delete(e.ctx(), instance.ID))
	}
}

// absent is nil when the cloud has no such instance.
func (e *env) absent(ctx context.Context, cloud *cloudapi.Client, id string) error {
	_, err := cloud.Get(ctx, id)
	if err == nil {
		return fmt.Errorf("instance %s is there", id)
	}
	if cloudapi.CodeOf(err) == cloudapi.CodeNotFound {
		return nil
	}
	return err
}

// waitClassEvent waits for an Event about the env's class.
func (e *env) waitClassEvent(eventType, text string) {
	e.Helper()
	e.eventually(fmt.Sprintf("a %s Event on the class says %q", eventType, text), func(ctx context.Context) error {
		var all corev1.EventList
		if err := e.kube.List(ctx, &all, client.InNamespace(e.name)); err != nil {
			return err
		}
		for _, event := range all.Items {
			if event.InvolvedObject.Kind == "MachineClass" && event.Type == eventType && strings.Contains(event.Message, text) {
				return nil
			}
		}
		return fmt.Errorf("it is not among %d Events", len(all.Items))
	})
}

// counter returns a counter of mcm's metrics, 0 when it is not there.
func (e *env) counter(manager *stack.Manager, name, label string) float64 {
	e.Helper()
	request, err := http.NewRequestWithContext(e.ctx(), http.MethodGet, "http://"+manager.Address+"/metrics", http.NoBody)
	e.must(err)
	response, err := http.DefaultClient.Do(request)
	e.must(err)
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		if line := lines.Text(); strings.HasPrefix(line, name+"{") && strings.Contains(line, label) {
			value, err := strconv.ParseFloat(line[strings.LastIndex(line, " ")+1:], 64)
			e.must(err)
			return value
		}
	}
	e.must(lines.Err())
	return 0
}

func atLeast(got, want float64) error {
	if got < want {
		return fmt.Errorf("there were %g of %g", got, want)
	}
	return nil
}
