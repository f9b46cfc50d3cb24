package orphans_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/kubetest"
	"github.com/machinebus/machinebus/mcm/orphans"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	provider    = "virtual"
	clusterName = "default"
	ownerUID    = "owner-uid"
	grace       = 20 * time.Minute
)

var (
	apiServer *rest.Config // of the API server that all tests share
	scheme    = kubetest.Scheme()
)

func TestMain(m *testing.M) {
	kubetest.Main(m, kubetest.Environment(), func(cfg *rest.Config) error {
		apiServer = cfg

		return nil
	})
}

// A rig is a namespace with a class, a bus, a cloud with its driver, and a
// Collector with a clock of its own.
type rig struct {
	client.WithWatch
	*orphans.Collector

	t          *testing.T
	namespace  string
	cloud      *cloud
	dispatcher *dispatch.Dispatcher
	clock      time.Time
}

func newRig(t *testing.T) *rig {
	t.Helper()
	c, namespace := kubetest.Namespace(t, apiServer)
	r := &rig{
		WithWatch: c, t: t, namespace: namespace, clock: time.Now(),
		cloud: &cloud{entered: make(chan *replica.Task, 10)},
	}
	r.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "boot"}})
	r.create(&v1alpha1.MachineClass{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "small"}, Provider: provider,
		ProviderSpec: runtime.RawExtension{Raw: []byte(`{"size":"s"}`)},
		SecretRef:    &corev1.SecretReference{Name: "boot"},
	})
	r.dispatcher = r.newDispatcher()
	r.Collector = r.newCollector(r.dispatcher)

	return r
}

func (r *rig) newCollector(dispatcher *dispatch.Dispatcher) *orphans.Collector {
	settings := orphans.DefaultSettings()
	settings.Namespace, settings.DeleteTimeout = r.namespace, time.Minute

	return &orphans.Collector{
		Reader: r.WithWatch, Cache: r.WithWatch, Dispatcher: dispatcher, Events: r.newRecorder(), Metrics: orphans.NewMetrics(), Owner: ownerUID,
		Settings: settings, Now: func() time.Time { return r.clock },
	}
}

// newDispatcher starts a bus with a driver on it.
func (r *rig) newDispatcher() *dispatch.Dispatcher {
	nats := bustest.Server(r.t, embedded.Options{})
	conn := bustest.Connect(r.t, bus.Config{URLs: []string{nats.URL()}, Name: "mcm"})
	asking, err := caller.New(conn, caller.Config{
		Cluster: clusterName, Operations: &caller.StreamConfig{Memory: true}, Logger: bustest.Quiet(),
	})
	r.must(err)
	announcer, err := bus.NewAnnouncer(conn, clusterName)
	r.must(err)
	ctx, cancel := context.WithCancel(r.t.Context())
	dispatcher := dispatch.New(ctx, asking, announcer)
	r.t.Cleanup(func() { cancel(); dispatcher.Wait(); asking.Close() })

	server, err := replica.New(
		bustest.Connect(r.t, bus.Config{URLs: []string{nats.URL()}, Name: "driver", InboxPrefix: bus.InboxPrefix(provider)}),
		replica.Config{
			Provider: provider, Logger: bustest.Quiet(), DrainTimeout: 10 * time.Millisecond,
			CreateIdentity: driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN,
			Capabilities: []driverv1.Operation{
				driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_DELETE, driverv1.Operation_OPERATION_LIST,
			},
		}, replica.HandlerFunc(r.cloud.handle))
	r.must(err)
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	r.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			r.t.Error(err)
		}
	})
	bustest.Eventually(r.t, "session of the driver", func() bool { return len(asking.Replicas()) == 1 })

	return dispatcher
}

// newRecorder writes Events to the API server.
func (r *rig) newRecorder() record.EventRecorder {
	clientset, err := kubernetes.NewForConfig(apiServer)
	r.must(err)
	broadcaster := record.NewBroadcaster()
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: clientset.CoreV1().Events("")})
	r.t.Cleanup(broadcaster.Shutdown)

	return broadcaster.NewRecorder(scheme, corev1.EventSource{Component: "mcm"})
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) create(o client.Object) {
	r.t.Helper()
	r.must(r.Create(r.t.Context(), o))
}

// machine makes a Machine; with a providerID it has its instance.
func (r *rig) machine(name, providerID string) *v1alpha1.Machine {
	r.t.Helper()
	m := &v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: name},
		Spec: v1alpha1.MachineSpec{
			Class: v1alpha1.ClassSpec{Kind: v1alpha1.KindMachineClass, Name: "small"}, ProviderID: providerID,
		},
	}
	r.create(m)

	return m
}

func (r *rig) classObject() *v1alpha1.MachineClass {
	return &v1alpha1.MachineClass{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "small"}}
}

// made makes a Machine and its instance.
func (r *rig) made(name string) *v1alpha1.Machine {
	r.t.Helper()
	m := r.machine(name, "virtual:///"+name)
	r.cloud.add(m.Spec.ProviderID, name, m.UID)

	return m
}

// passes looks, lets time pass, and looks again, so that an orphan would be
// deleted.
func (r *rig) passes() {
	r.Pass(r.t.Context())
	r.clock = r.clock.Add(grace)
	r.Pass(r.t.Context())
}

// event waits for an Event with that reason and text.
func (r *rig) event(reason, part string) {
	r.t.Helper()
	bustest.Eventually(r.t, "Event "+reason+" with "+part, func() bool { return r.hasEvent(reason, part) })
}

func (r *rig) hasEvent(reason, part string) bool {
	r.t.Helper()
	list := &corev1.EventList{}
	r.must(r.List(r.t.Context(), list, client.InNamespace(r.namespace)))
	for i := range list.Items {
		if e := &list.Items[i]; e.Reason == reason && strings.Contains(e.Message, part) {
			return true
		}
	}

	return false
}

// A cloud is the one thing here that is not real, together with a driver for it.
type cloud struct {
	mu        sync.Mutex
	instances []*driverv1.Instance
	hidden    int // of the instances, this many are not listed
	fail      *driverv1.Status
	lists     int
	listed    map[string]int           // by class
	refuse    map[string]driverv1.Code // by class, what its lists end with
	deletes   []*driverv1.Envelope
	entered   chan *replica.Task // gets creates, which never end by themselves
}

func (c *cloud) add(providerID, machine string, uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.instances = append(c.instances, &driverv1.Instance{ProviderId: providerID, MachineName: machine, MachineUid: string(uid), Owner: ownerUID})
}

// addOf adds an instance of another owner, or of none.
func (c *cloud) addOf(owner, providerID string) {
	c.add(providerID, "gone", types.UID(providerID+"-uid"))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.instances[len(c.instances)-1].Owner = owner
}

func (c *cloud) hide(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hidden = n
}

// failing makes deletes fail; nil ends that.
func (c *cloud) failing(status *driverv1.Status) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail = status
}

// lose lets an instance go without a successful delete.
func (c *cloud) lose(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.instances = slices.DeleteFunc(c.instances, func(i *driverv1.Instance) bool { return i.GetProviderId() == id })
}

// left returns the ids of what lives.
func (c *cloud) left() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var ids []string
	for _, i := range c.instances {
		ids = append(ids, i.GetProviderId())
	}

	return ids
}

func (c *cloud) deleted() []*driverv1.Envelope {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.deletes
}

func (c *cloud) handle(ctx context.Context, t *replica.Task) *driverv1.Result {
	if t.Operation == driverv1.Operation_OPERATION_CREATE {
		c.entered <- t
		<-ctx.Done()

		return &driverv1.Result{Status: bus.StatusOf(ctx.Err())}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.Operation == driverv1.Operation_OPERATION_LIST {
		c.lists++
		class := bus.ClassOf(t.Request).GetClass().GetName()
		if c.listed == nil {
			c.listed = map[string]int{}
		}
		c.listed[class]++
		if code := c.refuse[class]; code != driverv1.Code_CODE_OK {
			return &driverv1.Result{Status: &driverv1.Status{Code: code, Message: "no luck"}}
		}
		list := &driverv1.ListResponse{Instances: c.instances[c.hidden:]}

		return &driverv1.Result{Payload: &driverv1.Result_List{List: list}}
	}
	c.deletes = append(c.deletes, t.Request)
	if c.fail != nil {
		return &driverv1.Result{Status: c.fail}
	}
	var left []*driverv1.Instance
	for _, i := range c.instances {
		if i.GetProviderId() != bus.MachineOf(t.Request).GetProviderId() {
			left = append(left, i)
		}
	}
	c.instances = left

	return &driverv1.Result{Payload: &driverv1.Result_Delete{Delete: &driverv1.DeleteResponse{}}}
}
