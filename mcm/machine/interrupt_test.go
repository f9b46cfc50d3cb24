package machine_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/bootstrap"
	"github.com/machinebus/machinebus/mcm/dispatch"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestDeleteDuringCreate(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	open := make(chan struct{})
	defer close(open)
	r.cloud.hold(open)
	m := r.machine("a")
	r.create(t, m)
	bustest.Receive(t, "the driver to get the create", r.cloud.entered)
	r.delete(t, m)
	r.gone(t, m) // though the create was never let through
	if there, made := r.cloud.has(); there != 0 || made != 0 {
		t.Errorf("the cloud has %d instances of %d", there, made)
	}
	if n := r.cloud.count(remove); n != 1 {
		t.Errorf("%d deletes, want 1: a cancelled create may have made something", n)
	}
}

// hasToken reports whether there is a token to join with as a machine.
func (r *rig) hasToken(t *testing.T, m *v1alpha1.Machine) bool {
	t.Helper()
	secrets := &corev1.SecretList{}
	err := r.List(t.Context(), secrets, client.InNamespace(metav1.NamespaceSystem),
		client.MatchingLabels{bootstrap.LabelKeyMachineUID: string(m.UID)})
	if err != nil {
		t.Fatal(err)
	}

	return len(secrets.Items) > 0
}

// Where mcm may not touch tokens, machines come and go all the same.
func TestWithoutRightToTokens(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	stranger := rest.CopyConfig(apiServer)
	stranger.Impersonate.UserName = "nobody"
	target, err := client.New(stranger, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	r.tokens = &bootstrap.Tokens{Target: target}
	r.startDriver(t)
	r.startManager(t)
	joins, stays := r.machine("joins"), r.machine("stays")
	r.create(t, joins)
	r.create(t, stays)
	r.phase(t, stays, v1alpha1.MachinePending)
	r.join(t, joins)
	r.phase(t, joins, v1alpha1.MachineRunning)
	for _, m := range []*v1alpha1.Machine{joins, stays} {
		r.delete(t, m)
		r.gone(t, m)
		r.event(t, m, "TokenLeft", "cannot get resource")
	}
}

// An API server that fails for a while neither holds a machine up nor keeps its
// token, whichever manager leads when it is back.
func TestTokenThatCannotBeDeleted(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	faulty := rest.CopyConfig(apiServer)
	var fails atomic.Bool
	faulty.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(req *http.Request) (*http.Response, error) {
			if fails.Load() {
				return nil, errors.New("the API server cannot be reached")
			}

			return next.RoundTrip(req)
		})
	})
	target, err := client.New(faulty, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	r.tokens = &bootstrap.Tokens{Target: target}
	r.startDriver(t)
	r.startManager(t)
	stays, goes := r.machine("stays"), r.machine("goes")
	for _, m := range []*v1alpha1.Machine{stays, goes} {
		r.create(t, m)
		r.phase(t, m, v1alpha1.MachinePending)
		if _, err := r.tokens.Ensure(t.Context(), m, time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	fails.Store(true)
	for _, m := range []*v1alpha1.Machine{stays, goes} {
		r.join(t, m)
		r.phase(t, m, v1alpha1.MachineRunning)
		if !r.hasToken(t, m) {
			t.Fatal("its token was deleted through an API server that cannot be reached")
		}
	}
	r.stop()
	r.delete(t, goes)
	r.tokens = &bootstrap.Tokens{Target: target} // the next manager knows of none
	fails.Store(false)
	r.startManager(t)
	r.gone(t, goes)
	for _, m := range []*v1alpha1.Machine{stays, goes} {
		bustest.Eventually(t, "the end of its token", func() bool { return !r.hasToken(t, m) })
	}
	r.until(t, "no more is said of it", stays, func(m *v1alpha1.Machine) bool {
		return !strings.Contains(m.Annotations[v1alpha1.AnnotationKeyOperation], "token")
	})
}

// A roundTripper is a function that sends requests.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// A token outlives neither its use nor its machine.
func TestDeleteBeforeJoining(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.tokens = &bootstrap.Tokens{Target: r.Client}
	r.startDriver(t)
	r.startManager(t)
	m := r.machine("a")
	r.create(t, m)
	r.phase(t, m, v1alpha1.MachinePending)
	if _, err := r.tokens.Ensure(t.Context(), m, time.Hour); err != nil {
		t.Fatal(err)
	}
	r.delete(t, m)
	r.gone(t, m)
	if r.hasToken(t, m) {
		t.Error("an instance could still join with the token of a machine that is gone")
	}
}

// Between the cloud's last word and its being stored, a deletion must learn of
// the instance.
func TestDeleteAfterCreate(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	open := make(chan struct{})
	r.cloud.hold(open)
	m := r.machine("a")
	r.create(t, m)
	bustest.Receive(t, "the driver to get the create", r.cloud.entered)
	close(open)
	r.delete(t, m)
	r.gone(t, m)
	if there, _ := r.cloud.has(); there != 0 {
		t.Errorf("the cloud has %d instances", there)
	}
}

// What a create that ends after the deletion has made is stored with what its driver
// remembers: the delete request has both, and the Node is deleted too.
func TestCreateEndsAfterDeletion(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	open := make(chan struct{})
	defer close(open)
	began := make(chan *driverv1.Machine, 1)
	r.cloud.answer(func(ctx context.Context, task *replica.Task) *driverv1.Result {
		switch task.Operation {
		case create:
			r.cloud.entered <- task
			<-ctx.Done() // and yet it succeeds
		case remove:
			select {
			case began <- bus.MachineOf(task.Request):
			default:
			}
			select {
			case <-open:
			case <-ctx.Done():
			}
		}

		return nil
	})
	m := r.machine("a")
	r.create(t, m)
	bustest.Receive(t, "the driver to get the create", r.cloud.entered)
	r.delete(t, m)
	asked := bustest.Receive(t, "the driver to get the delete", began)
	got := r.get(t, m)
	type stored struct{ ProviderID, Node, State string }
	want := stored{"virtual://" + m.Name, m.Name, "made"}
	if diff := cmp.Diff(want, stored{got.Spec.ProviderID, got.Labels[v1alpha1.LabelKeyNode], got.Status.LastKnownState}); diff != "" {
		t.Errorf("stored (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want, stored{asked.GetProviderId(), asked.GetLabels()[v1alpha1.LabelKeyNode], asked.GetLastKnownState()}); diff != "" {
		t.Errorf("the delete request has (-want +got):\n%s", diff)
	}
	if n := r.cloud.count(status); n != 0 {
		t.Errorf("the driver was asked %d times for what it had said", n)
	}
}

// A deletion says what it waits for.
func TestDeletionReportsTheCreate(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	open := make(chan struct{})
	r.cloud.answer(func(_ context.Context, task *replica.Task) *driverv1.Result {
		if task.Operation == create {
			r.cloud.entered <- task
			<-open // a cloud's call that cannot be cancelled
		}

		return nil
	})
	m := r.machine("a")
	r.create(t, m)
	bustest.Receive(t, "the driver to get the create", r.cloud.entered)
	r.delete(t, m)
	r.event(t, m, "EndingCreation", "The earlier create is cancelled; waiting for it to end: it is at driver replica")
	text := r.get(t, m).Status.LastOperation.Description
	if !strings.HasPrefix(text, v1alpha1.DeletionTextGetVMStatus) || !strings.Contains(text, "waiting for the earlier create") {
		t.Errorf("description is %q", text)
	}
	close(open)
	r.gone(t, m)
}

// Another manager may have created an instance for what this one has only started to
// wait for.
func TestDeleteOfATakenOverCreateThatWaits(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.limits = dispatch.Limits{Provider: dispatch.Limit{InFlight: 1}}
	open, busy := make(chan struct{}), make(chan struct{})
	defer close(open)
	r.cloud.answer(func(ctx context.Context, task *replica.Task) *driverv1.Result {
		until := open
		switch task.Operation {
		case create:
			r.cloud.entered <- task
		case status:
			until = busy
		default:
			return nil
		}
		select {
		case <-until:
		case <-ctx.Done():
		}

		return nil
	})
	m := r.machine("a")
	m.Finalizers = []string{v1alpha1.FinalizerName}
	r.crashed(t, m)
	r.create(t, r.machine("first"))
	r.startDriver(t)
	r.startManager(t)
	bustest.Receive(t, "the driver to get the other machine's create", r.cloud.entered)
	close(busy) // now m has no instance, and no room for its create
	r.until(t, "its create to begin", m, func(m *v1alpha1.Machine) bool {
		return strings.Contains(m.Annotations[v1alpha1.AnnotationKeyOperation], `"operation":"create"`)
	})
	r.delete(t, m)
	r.gone(t, m)
	if creates, deletes := r.cloud.of(create, m), r.cloud.of(remove, m); creates != 0 || deletes != 1 {
		t.Errorf("%d creates and %d deletes, want the delete alone", creates, deletes)
	}
}

// A create whose replica is lost may make its instance after the delete has found
// none.
func TestDeleteOfALostCreate(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.settings.OperationTimeout = 8 * time.Second
	proxy := bustest.NewProxy(t, r.nats.URL())
	r.startDriverOf(t, provider, r.cloud, proxy.URL())
	r.startManager(t)
	open := make(chan struct{})
	r.cloud.hold(open)
	m := r.machine("a")
	r.create(t, m)
	bustest.Receive(t, "the driver to get the create", r.cloud.entered)
	proxy.Cut()
	r.delete(t, m)
	r.event(t, m, "CreationLost", "looked for again")
	r.startDriver(t)
	bustest.Eventually(t, "the first delete", func() bool { return r.cloud.count(remove) == 1 })
	close(open)
	bustest.Eventually(t, "the late instance", func() bool { _, made := r.cloud.has(); return made == 1 })
	got := r.until(t, "waiting for the lost create", m, func(m *v1alpha1.Machine) bool {
		return strings.Contains(m.Status.LastOperation.Description, "a lost attempt at the creation")
	})
	if len(got.Finalizers) == 0 {
		t.Error("the machine is let go while an instance may appear")
	}
	r.gone(t, m)
	if there, _ := r.cloud.has(); there != 0 {
		t.Errorf("the cloud has %d instances", there)
	}
}

func TestDeleteWithoutADriver(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.startManager(t)
	m := r.machine("a")
	r.create(t, m)
	r.event(t, m, "OperationWaiting", "no driver for provider virtual")
	r.delete(t, m)
	r.gone(t, m) // nothing ever ran, so no driver has to be asked
	r.startDriver(t)
	other := r.machine("b")
	r.create(t, other)
	r.phase(t, other, v1alpha1.MachinePending)
	if _, made := r.cloud.has(); made != 1 {
		t.Errorf("%d instances were made, want that of the other machine alone", made)
	}
}

// A finalizer removed by force leaves no instance.
func TestMachineTornAway(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.startManager(t)
	m := r.machine("a")
	r.create(t, m)
	r.event(t, m, "OperationWaiting", "no driver for provider virtual")
	r.change(t, m, func() { m.Finalizers = nil })
	r.delete(t, m)
	r.gone(t, m)
	r.startDriver(t)
	other := r.machine("b")
	r.create(t, other)
	r.phase(t, other, v1alpha1.MachinePending)
	if _, made := r.cloud.has(); made != 1 {
		t.Errorf("%d instances were made, want that of the other machine alone", made)
	}
}

func TestRestartDuringCreate(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	open := make(chan struct{})
	r.cloud.hold(open)
	m := r.machine("a")
	r.create(t, m)
	first := bustest.Receive(t, "the driver to get the create", r.cloud.entered).Request.GetOperationId()
	if want := string(m.UID) + ".create.0"; first != want {
		t.Errorf("operation id is %s, want %s", first, want)
	}
	r.stop()
	r.startManager(t)
	close(open)
	got := r.phase(t, m, v1alpha1.MachinePending)
	if got.Spec.ProviderID != "virtual://"+m.Name {
		t.Errorf("providerID is %q", got.Spec.ProviderID)
	}
	r.event(t, m, "Created", "attempt 1")
	taken := r.logged(t, "resuming an operation that began earlier")
	if len(taken) != 1 {
		t.Fatalf("%d lines say that the create is taken up, want 1", len(taken))
	}
	for key, want := range map[string]any{
		"machine": m.Namespace + "/" + m.Name, "uid": string(m.UID), "operation_id": first, "attempt": 0.0, "replica": "",
	} {
		if got := taken[0][key]; got != want {
			t.Errorf("%s is %v, want %v: no replica is known at that moment", key, got, want)
		}
	}
	if n := r.cloud.count(create); n != 1 {
		t.Errorf("the driver got %d creates, want the one that went on", n)
	}
}

// A manager that was replaced without knowing may still have a create that reached no
// driver for it. It must see that another one has taken the create up, or it lets the
// Machine go without a delete.
func TestTakenUpIsNotUntouched(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.slots = 1
	r.startDriver(t)
	r.startManager(t)
	open := make(chan struct{})
	defer close(open)
	r.cloud.hold(open)
	inTheWay, waits := r.machine("in-the-way"), r.machine("waits")
	r.create(t, inTheWay)
	bustest.Receive(t, "the driver to get the create that fills it", r.cloud.entered)
	r.create(t, waits)
	const untouched = `"first":true`
	r.until(t, "its create reached no driver", waits, func(m *v1alpha1.Machine) bool {
		return strings.Contains(m.Annotations[v1alpha1.AnnotationKeyOperation], untouched)
	})
	r.stop()
	r.startManager(t)
	r.until(t, "the next manager has taken the create up", waits, func(m *v1alpha1.Machine) bool {
		return !strings.Contains(m.Annotations[v1alpha1.AnnotationKeyOperation], untouched)
	})
}

func TestRestartThenDelete(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	open := make(chan struct{})
	defer close(open)
	r.cloud.hold(open)
	m := r.machine("a")
	r.create(t, m)
	bustest.Receive(t, "the driver to get the create", r.cloud.entered)
	r.stop()
	r.delete(t, m)
	r.startManager(t)
	r.gone(t, m) // the new manager found the create, and cancelled it
	if there, made := r.cloud.has(); there != 0 || made != 0 {
		t.Errorf("the cloud has %d instances of %d", there, made)
	}
}

func TestRestartWhileRunning(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.machine("a")
	r.create(t, m)
	r.join(t, m)
	r.phase(t, m, v1alpha1.MachineRunning)
	r.stop()
	r.startManager(t)
	r.delete(t, m)
	r.gone(t, m)
	if there, made := r.cloud.has(); there != 0 || made != 1 {
		t.Errorf("the cloud has %d instances of %d", there, made)
	}
}

func TestJournalTurnedBack(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.machine("a")
	r.create(t, m)
	r.phase(t, m, v1alpha1.MachinePending)
	r.change(t, m, func() { delete(m.Annotations, v1alpha1.AnnotationKeyOperation) })
	r.delete(t, m)
	r.gone(t, m)
	if there, _ := r.cloud.has(); there != 0 {
		t.Errorf("the cloud has %d instances", there)
	}
}

func TestJournalUnreadable(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.machine("a")
	m.Annotations = map[string]string{v1alpha1.AnnotationKeyOperation: "what?"}
	r.create(t, m)
	r.event(t, m, "InvalidJournal", v1alpha1.AnnotationKeyOperation)
	r.change(t, m, func() { m.Annotations[v1alpha1.AnnotationKeyOperation] = `{"settled":4}` })
	r.phase(t, m, v1alpha1.MachinePending)
}

// A machine that another manager left behind says nothing of what it has.
func TestDeleteTakenOver(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	m := r.machine("a")
	m.Finalizers = []string{v1alpha1.FinalizerName}
	r.create(t, m)
	r.delete(t, m)
	r.startDriver(t)
	r.startManager(t)
	r.gone(t, m)
	if n := r.cloud.count(remove); n != 1 {
		t.Errorf("%d deletes, want 1", n)
	}
}

func TestNodeDeleted(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.machine("a")
	r.create(t, m)
	node := r.join(t, m)
	r.phase(t, m, v1alpha1.MachineRunning)
	r.delete(t, node)
	r.gone(t, m)
	r.event(t, m, "NodeDeleted", node.Name)
	if r.node(t, node.Name) != nil {
		t.Error("the node is still there")
	}
	if there, _ := r.cloud.has(); there != 0 {
		t.Errorf("the cloud has %d instances", there)
	}
}

// A Node that has the name but is another instance is none of ours.
func TestNodeOfAnother(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.machine("a")
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: m.Name}, Spec: corev1.NodeSpec{ProviderID: "virtual://another"},
	}
	r.create(t, node)
	t.Cleanup(func() { r.forceDelete(t, node) })
	r.condition(t, node, ready(corev1.ConditionTrue))
	r.create(t, m)
	r.phase(t, m, v1alpha1.MachinePending)
	r.delete(t, m)
	r.gone(t, m)
	got := r.node(t, m.Name)
	if got == nil || len(got.Finalizers) != 0 || got.Labels[v1alpha1.LabelKeyMachineName] != "" {
		t.Errorf("the node of another instance was touched: %+v", got)
	}
}

func TestCriticalComponents(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.machine("a")
	r.create(t, m)
	r.phase(t, m, v1alpha1.MachinePending)
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: m.Name},
		Spec: corev1.NodeSpec{ProviderID: "virtual://" + m.Name, Taints: []corev1.Taint{
			{Key: v1alpha1.TaintKeyCriticalComponentsNotReady, Effect: corev1.TaintEffectNoSchedule},
		}},
	}
	r.create(t, node)
	t.Cleanup(func() { r.forceDelete(t, node) })
	r.condition(t, node, ready(corev1.ConditionTrue))
	got := r.until(t, "copied conditions", m, func(m *v1alpha1.Machine) bool { return len(m.Status.Conditions) == 1 })
	if got.Status.CurrentStatus.Phase != v1alpha1.MachinePending {
		t.Errorf("phase is %q", got.Status.CurrentStatus.Phase)
	}
	r.change(t, node, func() { node.Spec.Taints = nil })
	r.phase(t, m, v1alpha1.MachineRunning)
}

// A Machine from an older backup counts fewer operations than the driver's stream has
// seen, by far where an earlier release collected its instance. It goes on behind them
// at once.
func TestJournalBehind(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.nats, r.streams = bustest.Server(t, embedded.Options{StoreDir: t.TempDir()}), &caller.StreamConfig{}
	r.startDriver(t)
	r.startManager(t)
	m := r.machine("a")
	r.create(t, m)
	m = r.phase(t, m, v1alpha1.MachinePending)
	const late = 1_790_000_000_000
	_, err := r.caller.Call(t.Context(), caller.Request{
		Provider: provider, Namespace: m.Namespace, Name: m.Name, Timeout: patience,
		OperationID: dispatch.OperationID(m.UID, dispatch.Delete, late),
		Body: &driverv1.Envelope{Body: &driverv1.Envelope_Delete{Delete: &driverv1.DeleteRequest{
			Machine: &driverv1.Machine{Namespace: m.Namespace, Name: m.Name, Uid: string(m.UID)},
			Class:   &driverv1.ClassReference{Class: &driverv1.ObjectReference{Namespace: m.Namespace, Name: "small"}},
		}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	r.stop()
	r.change(t, m, func() {
		m.Spec.ProviderID = ""
		m.Annotations[v1alpha1.AnnotationKeyOperation] = `{"settled":0}`
	})
	before := m.DeepCopy()
	m.Status.CurrentStatus = v1alpha1.CurrentStatus{}
	if err := r.Status().Patch(t.Context(), m, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	r.startManager(t)
	r.phase(t, m, v1alpha1.MachinePending)
	r.event(t, m, "JournalBehind", "1790000000000")
	if there, made := r.cloud.has(); there != 1 || made != 2 {
		t.Errorf("the cloud has %d instances of %d", there, made)
	}
	if n := r.cloud.operations(create); n != 2 {
		t.Errorf("the driver got %d creates, want one of before the restore and one after it", n)
	}
	r.delete(t, m)
	r.gone(t, m)
}
