package e2e

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
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

// TestOutOfRange has a driver answer that several instances match a machine, long
// before the next look for instances without a machine. It must not be waited for.
func TestOutOfRange(t *testing.T) {
	e := newEnv(t)
	e.createClass()
	name := e.createMachines(1, className)[0]
	machine, err := e.machine(e.ctx(), name)
	e.must(err)
	before := machine.DeepCopy()
	machine.Finalizers = []string{v1alpha1.FinalizerName} // as another manager leaves it behind
	e.must(e.kube.Patch(e.ctx(), machine, client.MergeFrom(before)))
	before = machine.DeepCopy()
	machine.Status.CurrentStatus.Phase = v1alpha1.MachineCrashLoopBackOff
	e.must(e.kube.Status().Patch(e.ctx(), machine, client.MergeFrom(before)))
	cloud, err := cloudapi.NewClient(e.cloud.Endpoint, e.cloud.APIToken)
	e.must(err)
	for _, token := range []string{"once", "twice"} {
		e.plantFor(cloud, name, string(machine.UID), token)
	}
	manager, tap := e.startManager("", "--machine-safety-orphan-vms-period=1h")
	e.eventually("the look at the start, without a driver", func(context.Context) error {
		return atLeast(e.counter(manager, "mcm_safety_orphan_passes_total", `outcome="done"`), 1)
	})
	orphan := e.plant(cloud, "orphan")
	e.startDrivers(1, manager.NATSURL, tap)
	e.waitEvent(name, corev1.EventTypeWarning, "OutOfRange")
	e.waitClassEvent(corev1.EventTypeWarning, orphan.ProviderID)
	e.must(cloud.Delete(e.ctx(), orphan.ID))
	// The machine's Node cannot be determined; both instances are deleted anyway.
	machine, err = e.machine(e.ctx(), name)
	e.must(err)
	before = machine.DeepCopy()
	metav1.SetMetaDataLabel(&machine.ObjectMeta, v1alpha1.LabelKeyForceDeletion, "true")
	e.must(e.kube.Patch(e.ctx(), machine, client.MergeFrom(before)))
	e.must(e.kube.Delete(e.ctx(), machine))
	e.eventually("the machine is gone", func(ctx context.Context) error {
		_, err := e.machine(ctx, name)
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("machine %s: %w", name, cmp.Or(err, errors.New("it is there")))
	})
	left, err := e.cloud.Instances(e.ctx())
	e.must(err)
	if len(left) != 0 {
		t.Errorf("the cloud has %d instances left", len(left))
	}
}

// plant makes an instance as the env's driver would for a machine that there is
// not.
func (e *env) plant(cloud *cloudapi.Client, name string) *cloudapi.Instance {
	e.Helper()
	return e.plantFor(cloud, e.name+"-"+name, name+"-uid", name)
}

// plantFor makes an instance as the env's driver would for that machine.
func (e *env) plantFor(cloud *cloudapi.Client, name, uid, token string) *cloudapi.Instance {
	e.Helper()
	instance, err := cloud.Create(e.ctx(), cloudapi.CreateRequest{
		Name: name, MachineType: "vm.small", Region: "moon", IdempotencyToken: token,
		Tags: map[string]string{
			"machinebus.io/cluster": e.name, "machinebus.io/class": e.name + "/" + className,
			cloudapi.TagMachineUID: uid, "machinebus.io/machine-name": name, "machinebus.io/owner": e.owner(),
		},
	})
	e.must(err)
	return instance
}

// owner is the uid of the control cluster, with which its instances are tagged.
func (e *env) owner() string {
	e.Helper()
	namespace := &corev1.Namespace{}
	e.must(e.kube.Get(e.ctx(), client.ObjectKey{Name: metav1.NamespaceSystem}, namespace))
	return string(namespace.UID)
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
