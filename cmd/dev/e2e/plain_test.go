package e2e

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// plainProvider is served by plainDriver.
const plainProvider = "plain"

// TestPlainDriver creates machines with a minimal driver, which uses only the protocol's
// messages.
func TestPlainDriver(t *testing.T) {
	e := newEnv(t)
	manager, _ := e.startManager("")
	driver := &plainDriver{env: e, instances: map[string]*driverv1.Instance{}}
	driver.serve(manager.NATSURL)

	e.must(e.kube.Create(e.ctx(), e.newSecret(className)))
	class := e.newClass(className, nil)
	class.Provider = plainProvider
	e.must(e.kube.Create(e.ctx(), class))
	names := e.createMachines(3, className)
	e.waitRunning(names...)
	if made := driver.count(); made != len(names) {
		t.Errorf("the driver made %d instances, want %d", made, len(names))
	}
	for _, name := range names {
		e.wantJoined(name)
	}
	e.deleteAll(names...)
	if left := driver.count(); left != 0 {
		t.Errorf("%d instances are left", left)
	}
	e.wantInstances(0) // the virtual cloud had no part in it
}

// A plainDriver answers each request with one Result, and has a map for a cloud.
type plainDriver struct {
	env *env
	// onCreate is called for each create; it may be nil.
	onCreate func(operationID string, request *driverv1.CreateRequest) error

	mu        sync.Mutex
	instances map[string]*driverv1.Instance // by machine uid
}

func (d *plainDriver) serve(natsURL string, opts ...nats.Option) {
	conn, err := nats.Connect(natsURL, opts...)
	d.env.must(err)
	d.env.Cleanup(conn.Close)
	_, err = conn.QueueSubscribe("mcm.v1."+d.env.name+".plain."+plainProvider+".>", "driver", func(m *nats.Msg) {
		var request driverv1.Envelope
		if err := proto.Unmarshal(m.Data, &request); err != nil {
			d.env.Errorf("request on %s: %v", m.Subject, err)
			return
		}
		answer, err := proto.Marshal(&driverv1.Envelope{
			OperationId: request.GetOperationId(), Attempt: request.GetAttempt(),
			Body: &driverv1.Envelope_Result{Result: d.answer(&request)},
		})
		if err == nil {
			err = m.Respond(answer)
		}
		if err != nil {
			d.env.Errorf("answer on %s: %v", m.Subject, err)
		}
	})
	d.env.must(err)
	d.env.must(conn.Flush())
}

func (d *plainDriver) answer(request *driverv1.Envelope) *driverv1.Result {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch body := request.GetBody().(type) {
	case *driverv1.Envelope_Create:
		machine := body.Create.GetMachine()
		if d.onCreate != nil {
			if err := d.onCreate(request.GetOperationId(), body.Create); err != nil {
				return failure(driverv1.Code_CODE_UNAVAILABLE, err)
			}
		}
		instance, ok := d.instances[machine.GetUid()]
		if !ok {
			instance = &driverv1.Instance{
				ProviderId: "plain:///" + machine.GetUid(), NodeName: machine.GetName(),
				MachineName: machine.GetName(), MachineUid: machine.GetUid(),
			}
			if err := d.join(instance); err != nil {
				return failure(driverv1.Code_CODE_UNAVAILABLE, err)
			}
			d.instances[machine.GetUid()] = instance
		}
		return &driverv1.Result{Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{Instance: instance}}}
	case *driverv1.Envelope_Delete:
		machine := body.Delete.GetMachine()
		if err := d.leave(machine.GetName()); err != nil {
			return failure(driverv1.Code_CODE_UNAVAILABLE, err)
		}
		delete(d.instances, machine.GetUid())
		return &driverv1.Result{Payload: &driverv1.Result_Delete{Delete: &driverv1.DeleteResponse{}}}
	case *driverv1.Envelope_List:
		list := &driverv1.ListResponse{}
		for _, instance := range d.instances {
			list.Instances = append(list.Instances, instance)
		}
		return &driverv1.Result{Payload: &driverv1.Result_List{List: list}}
	default:
		return failure(driverv1.Code_CODE_UNIMPLEMENTED, errors.New("this driver creates, deletes and lists"))
	}
}

func failure(code driverv1.Code, err error) *driverv1.Result {
	return &driverv1.Result{Status: &driverv1.Status{Code: code, Message: err.Error()}}
}

// join plays the kubelet of an instance. It may be repeated.
func (d *plainDriver) join(instance *driverv1.Instance) error {
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: instance.GetNodeName()},
		Spec:       corev1.NodeSpec{ProviderID: instance.GetProviderId()},
	}
	ctx := context.Background() // also while the test ends
	if err := d.env.kube.Create(ctx, node); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	// A patch, because controllers of the cluster write to a new Node as well.
	before := client.MergeFrom(node.DeepCopy())
	node.Status.Conditions = []corev1.NodeCondition{{
		Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", LastHeartbeatTime: metav1.Now(),
	}}
	return d.env.kube.Status().Patch(ctx, node, before)
}

func (d *plainDriver) leave(name string) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	return client.IgnoreNotFound(d.env.kube.Delete(context.Background(), node))
}

func (d *plainDriver) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.instances)
}
