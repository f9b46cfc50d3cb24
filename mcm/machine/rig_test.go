package machine_test

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/cluster"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/bootstrap"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/drain"
	"github.com/machinebus/machinebus/mcm/kubetest"
	"github.com/machinebus/machinebus/mcm/machine"
	"github.com/machinebus/machinebus/mcm/machineclass"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	provider    = "virtual"
	clusterName = "default"
	// patience bounds every wait; it is far above what is waited for.
	patience = 30 * time.Second
)

var (
	apiServer *rest.Config // of the API server that all tests share
	scheme    = kubetest.Scheme()
)

func TestMain(m *testing.M) {
	kubetest.Main(m, kubetest.Environment(), func(cfg *rest.Config) error {
		apiServer = cfg

		return flag.Set("test.parallel", "8") // they wait more than they work
	})
}

// A rig is a namespace with a class, a bus, a cloud and its driver, and a
// running manager.
type rig struct {
	client.Client

	t         *testing.T
	namespace string
	settings  machine.Settings
	limits    dispatch.Limits // of the manager's dispatcher
	noTarget  bool
	tokens    *bootstrap.Tokens // nil for none
	control   *gate             // the manager's way to the Machines
	target    *gate             // and to the Nodes
	now       func() time.Time  // the manager's clock; nil for the real one
	outage    *machine.OutageSettings
	unwatched time.Duration        // how long no manager had led
	memory    outageMemory         // of managers, for freezes
	guard     *machine.OutageGuard // nil without settings
	metrics   *prometheus.Registry
	nats      *embedded.Server
	streams   *caller.StreamConfig // of the manager
	key       *bus.SealKey         // of the control plane: drivers seal what they store for it
	cloud     *cloud
	requests  atomic.Int64   // of the manager to the API server
	lines     lines          // of the manager's log
	stop      func()         // stops the manager
	seen      client.Reader  // what the manager has heard of, from its cache
	caller    *caller.Caller // the manager's
	slots     int            // of each driver; 0 means plenty

	dispatcher *dispatch.Dispatcher // the manager's
}

// newRig prepares everything but driver and manager.
func newRig(t *testing.T) *rig {
	t.Helper()
	c, namespace := kubetest.Namespace(t, apiServer)
	key, err := bus.NewSealKey()
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{
		Client: c, t: t, namespace: namespace, nats: bustest.Server(t, embedded.Options{}), key: key,
		streams: &caller.StreamConfig{Memory: true}, cloud: newCloud(), settings: machine.DefaultSettings(), control: newGate(), target: newGate(),
	}
	r.settings.Retry = machine.Retry{
		Short: 100 * time.Millisecond, Medium: 200 * time.Millisecond, Long: 300 * time.Millisecond,
		ResourceExhausted: 400 * time.Millisecond,
	}
	r.create(t, r.secret())
	r.create(t, r.class())

	return r
}

// lines are what a log has said, in JSON.
type lines struct {
	mu  sync.Mutex
	all []string
}

func (r *rig) log(line string) {
	r.lines.mu.Lock()
	defer r.lines.mu.Unlock()
	r.lines.all = append(r.lines.all, line)
}

// logged returns the fields of the log's lines with that message.
func (r *rig) logged(t *testing.T, message string) []map[string]any {
	t.Helper()
	r.lines.mu.Lock()
	defer r.lines.mu.Unlock()
	var found []map[string]any
	for _, line := range r.lines.all {
		fields := map[string]any{}
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if fields["msg"] == message {
			found = append(found, fields)
		}
	}

	return found
}

// newRunningRig is newRig with a driver and a manager.
func newRunningRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t)
	r.startDriver(t)
	r.startManager(t)

	return r
}

func (r *rig) secret() *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "boot"},
		Data:       map[string][]byte{"userData": []byte("#!/bin/sh")},
	}
}

func (r *rig) class() *v1alpha1.MachineClass {
	return &v1alpha1.MachineClass{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "small"}, Provider: provider,
		ProviderSpec: runtime.RawExtension{Raw: []byte(`{"size":"s"}`)},
		SecretRef:    &corev1.SecretReference{Namespace: r.namespace, Name: "boot"},
	}
}

// machine returns a Machine; names of machines are names of Nodes, which have no
// namespaces.
func (r *rig) machine(name string) *v1alpha1.Machine {
	return &v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: r.namespace + "-" + name},
		Spec:       v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: "MachineClass", Name: "small"}},
	}
}

func (r *rig) create(t *testing.T, o client.Object) {
	t.Helper()
	if err := r.Create(t.Context(), o); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) delete(t *testing.T, o client.Object) {
	t.Helper()
	if err := r.Delete(t.Context(), o); err != nil {
		t.Fatal(err)
	}
}

// startManager runs what cmd/mcm runs, until the test ends or r.stop is called.
func (r *rig) startManager(t *testing.T) {
	t.Helper()
	cfg := r.config(r.control)
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}, Logger: funcr.NewJSON(r.log, funcr.Options{}),
		Cache:      cache.Options{DefaultNamespaces: map[string]cache.Config{r.namespace: {}}},
		Controller: config.Controller{SkipNameValidation: new(true)},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	conn, err := bus.Connect(ctx, bus.Config{URLs: []string{r.nats.URL()}, Name: "mcm", Logger: bustest.Quiet()})
	if err != nil {
		t.Fatal(err)
	}
	asking, err := caller.New(conn, caller.Config{Cluster: clusterName, Operations: r.streams, Key: r.key, Logger: bustest.Quiet()})
	if err != nil {
		t.Fatal(err)
	}
	r.caller = asking
	announcer, err := bus.NewAnnouncer(conn, clusterName)
	if err != nil {
		t.Fatal(err)
	}
	dispatcher := dispatch.New(logr.NewContext(ctx, mgr.GetLogger()), asking, announcer)
	r.dispatcher = dispatcher
	dispatcher.Limit(r.limits)
	r.seen = mgr.GetClient()
	removed := machineclass.NewRemoved(mgr.GetClient())
	reconciler := &machine.Reconciler{
		Control: mgr.GetClient(), Dispatcher: dispatcher, Settings: r.settings, Removed: removed,
		Events: mgr.GetEventRecorderFor("mcm"), //nolint:staticcheck // the newer API keeps only the first text of a reason
		Live:   mgr.GetAPIReader(), Now: r.now,
	}
	var nodes cache.Cache
	waitForDrains := func() {}
	if !r.noTarget {
		cfg := r.config(r.target)
		target, err := cluster.New(cfg, func(o *cluster.Options) { o.Scheme = scheme })
		if err != nil {
			t.Fatal(err)
		}
		if err := mgr.Add(target); err != nil {
			t.Fatal(err)
		}
		reconciler.Target, nodes, reconciler.LiveNodes = target.GetClient(), target.GetCache(), target.GetAPIReader()
		drainer := drain.New(ctx, kubernetes.NewForConfigOrDie(cfg), drain.Settings{
			Poll: 20 * time.Millisecond, EvictRetry: 50 * time.Millisecond,
		})
		reconciler.Drainer, waitForDrains = drainer, drainer.Wait
		if r.tokens != nil {
			reconciler.Tokens = r.tokens
		}
	}
	r.metrics = prometheus.NewPedanticRegistry()
	r.metrics.MustRegister(reconciler.Collectors()...)
	r.addOutageGuard(t, mgr, reconciler)
	if err := reconciler.SetupWithManager(ctx, mgr, nodes, dispatcher, 4); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error("manager:", err)
		}
		dispatcher.Wait()
		waitForDrains()
		asking.Close()
		conn.Close()
	})
	t.Cleanup(r.stop)
	if !mgr.GetCache().WaitForCacheSync(ctx) {
		t.Fatal("the manager's caches do not fill")
	}
	if err := removed.Watch(ctx, mgr.GetCache()); err != nil {
		t.Fatal(err)
	}
}

// config is the manager's, for an API server that it reaches through g.
func (r *rig) config(g *gate) *rest.Config {
	cfg := rest.CopyConfig(apiServer)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return counter{next, &r.requests} })
	cfg.Wrap(g.wrap)

	return cfg
}

// addOutageGuard adds an OutageGuard if there are settings for one.
func (r *rig) addOutageGuard(t *testing.T, mgr ctrl.Manager, reconciler *machine.Reconciler) {
	t.Helper()
	if r.outage == nil {
		return
	}
	control, err := client.New(mgr.GetConfig(), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	r.guard = &machine.OutageGuard{
		Control: control, Target: reconciler.LiveNodes, Namespace: r.namespace, Settings: *r.outage,
		Unwatched: func() time.Duration { return r.unwatched }, Memory: &r.memory, Events: reconciler.Events,
	}
	reconciler.OutageGuard = r.guard
	r.metrics.MustRegister(r.guard.Collectors()...)
	log := mgr.GetLogger()
	if err := mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		return r.guard.Start(ctrl.LoggerInto(ctx, log))
	})); err != nil {
		t.Fatal(err)
	}
}

// A outageMemory is what the manager's Lease is otherwise.
type outageMemory struct{ frozen atomic.Bool }

func (f *outageMemory) Frozen(context.Context) (bool, error) { return f.frozen.Load(), nil }

func (f *outageMemory) SetFrozen(frozen bool) { f.frozen.Store(frozen) }

// metric returns the sum of a gauge of the manager.
func (r *rig) metric(t *testing.T, name string) (sum float64) {
	t.Helper()
	families, err := r.metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() == name {
			for _, m := range family.GetMetric() {
				sum += m.GetGauge().GetValue()
			}
		}
	}

	return sum
}

// A counter counts requests, without Events, watches and what fills the caches.
type counter struct {
	next http.RoundTripper
	n    *atomic.Int64
}

func (c counter) RoundTrip(req *http.Request) (*http.Response, error) {
	path, query := req.URL.Path, req.URL.Query()
	isList := query.Has("limit") && !query.Has("fieldSelector") || query.Has("resourceVersion") // a drain selects
	if !strings.HasSuffix(path, "/events") && !strings.Contains(path, "/events/") &&
		!query.Has("watch") && (req.Method != http.MethodGet || !isList) {
		c.n.Add(1)
	}

	return c.next.RoundTrip(req)
}

// startDriver starts a replica of the cloud's driver.
func (r *rig) startDriver(t *testing.T) (replicaID string) {
	t.Helper()

	return r.startDriverOf(t, provider, r.cloud, r.nats.URL())
}

// stoppableDriver is startDriver with a way to stop it before the test ends.
func (r *rig) stoppableDriver(t *testing.T) (stop func()) {
	t.Helper()
	_, stop = r.runDriver(t, provider, r.cloud, r.nats.URL())

	return stop
}

// startDriverOf is startDriver for any provider, with its own way to the bus.
func (r *rig) startDriverOf(t *testing.T, provider string, cloud *cloud, url string) (replicaID string) {
	t.Helper()
	replicaID, _ = r.runDriver(t, provider, cloud, url)

	return replicaID
}

func (r *rig) runDriver(t *testing.T, provider string, cloud *cloud, url string) (id string, stop func()) {
	t.Helper()
	conn := bustest.Connect(t, bus.Config{
		URLs: []string{url}, Name: "driver", InboxPrefix: bus.InboxPrefix(provider),
	})
	server, err := replica.New(conn, replica.Config{
		Provider: provider, Slots: cmp.Or(r.slots, 100), Logger: bustest.Quiet(), DrainTimeout: 10 * time.Millisecond,
		CreateIdentity: driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN, Capabilities: cloud.capabilities(),
		// On a busy machine an outcome may be read from the operations stream first.
		Seal: func(_ string, m proto.Message) *driverv1.Sealed {
			box, err := r.key.Seal(m, r.key.Public())
			if err != nil {
				t.Error(err)
			}

			return box
		},
	}, replica.HandlerFunc(cloud.handle))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)

	return server.Replica(), stop
}

// get returns the stored machine, nil when there is none.
func (r *rig) get(t *testing.T, m *v1alpha1.Machine) *v1alpha1.Machine {
	t.Helper()
	got := &v1alpha1.Machine{}
	err := r.Get(t.Context(), client.ObjectKeyFromObject(m), got)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}

	return got
}

// until waits until the machine is as wanted and returns it; nil when it is
// gone.
func (r *rig) until(t *testing.T, what string, m *v1alpha1.Machine, ok func(*v1alpha1.Machine) bool) *v1alpha1.Machine {
	t.Helper()
	var got *v1alpha1.Machine
	if !poll(t, func() bool { got = r.get(t, m); return ok(got) }) {
		if got != nil {
			got.ManagedFields = nil
		}
		t.Fatalf("waited in vain for machine %s: %s; it is\n%+v\nwith events\n%s", m.Name, what, got,
			strings.Join(r.events(t, m), "\n"))
	}

	return got
}

// poll waits until ok holds; false means that this takes unreasonably long.
func poll(t *testing.T, ok func() bool) bool {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-limit.C:
			return false
		}
	}

	return true
}

func (r *rig) phase(t *testing.T, m *v1alpha1.Machine, want v1alpha1.MachinePhase) *v1alpha1.Machine {
	t.Helper()

	return r.until(t, "phase "+string(want), m, func(m *v1alpha1.Machine) bool {
		return m != nil && m.Status.CurrentStatus.Phase == want
	})
}

func (r *rig) gone(t *testing.T, m *v1alpha1.Machine) {
	t.Helper()
	r.until(t, "gone", m, func(m *v1alpha1.Machine) bool { return m == nil })
}

// watch reports all that happens to machines of the rig's namespace from now on, in
// order, until the test ends.
func (r *rig) watch(t *testing.T, report func(what watch.EventType, m *v1alpha1.Machine)) {
	t.Helper()
	c, err := client.NewWithWatch(apiServer, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	w, err := c.Watch(t.Context(), &v1alpha1.MachineList{}, client.InNamespace(r.namespace))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for e := range w.ResultChan() {
			if m, ok := e.Object.(*v1alpha1.Machine); ok {
				report(e.Type, m)
			}
		}
	}()
	t.Cleanup(func() { w.Stop(); <-done })
}

// events returns an object's Events as "Reason: message".
func (r *rig) events(t *testing.T, o client.Object) []string {
	t.Helper()
	list := &corev1.EventList{}
	if err := r.List(t.Context(), list, client.InNamespace(r.namespace)); err != nil {
		t.Fatal(err)
	}
	var texts []string
	for i := range list.Items {
		if e := &list.Items[i]; e.InvolvedObject.Name == o.GetName() {
			texts = append(texts, e.Reason+": "+e.Message)
		}
	}

	return texts
}

// event waits for an Event of an object with that reason and text.
func (r *rig) event(t *testing.T, o client.Object, reason, part string) {
	t.Helper()
	var all []string
	if !poll(t, func() bool {
		all = r.events(t, o)
		for _, text := range all {
			if strings.HasPrefix(text, reason+": ") && strings.Contains(text, part) {
				return true
			}
		}

		return false
	}) {
		t.Errorf("no Event %s with %q on %s; there are\n%s", reason, part, o.GetName(), strings.Join(all, "\n"))
	}
}

// join makes the machine's Node, as its kubelet would.
func (r *rig) join(t *testing.T, m *v1alpha1.Machine, conditions ...corev1.NodeCondition) *corev1.Node {
	t.Helper()
	if len(conditions) == 0 {
		conditions = []corev1.NodeCondition{ready(corev1.ConditionTrue)}
	}
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: m.Name}, Spec: corev1.NodeSpec{ProviderID: "virtual://" + m.Name},
	}
	r.create(t, node)
	t.Cleanup(func() { r.forceDelete(t, node) })
	r.condition(t, node, conditions...)

	return node
}

// forceDelete leaves no Node behind that a failed test made.
func (r *rig) forceDelete(t *testing.T, node *corev1.Node) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
	for _, err := range []error{r.Patch(ctx, node.DeepCopy(), patch), r.Delete(ctx, node.DeepCopy())} {
		if client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	}
}

func (r *rig) condition(t *testing.T, node *corev1.Node, conditions ...corev1.NodeCondition) {
	t.Helper()
	before := node.DeepCopy()
	node.Status.Conditions = conditions
	if err := r.Status().Patch(t.Context(), node, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
}

func ready(status corev1.ConditionStatus) corev1.NodeCondition {
	return corev1.NodeCondition{Type: corev1.NodeReady, Status: status, Reason: "Test"}
}

// node returns a stored Node, nil when there is none.
func (r *rig) node(t *testing.T, name string) *corev1.Node {
	t.Helper()
	node := &corev1.Node{}
	err := r.Get(t.Context(), client.ObjectKey{Name: name}, node)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}

	return node
}
