package drain

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/machinebus/machinebus/mcm/kubetest"
)

// patience bounds every wait; it is far above what is waited for.
const patience = 60 * time.Second

var apiServer *rest.Config // of the API server that all tests share

func TestMain(m *testing.M) {
	kubetest.Main(m, &envtest.Environment{}, func(cfg *rest.Config) error {
		apiServer = cfg

		return kubetest.Create(cfg, "deploy/kustomize/target-cluster/nodes.yaml")
	})
}

var rigs atomic.Int64

// A rig is a Node without a kubelet, a namespace for its pods, and a Drainer.
type rig struct {
	kubernetes.Interface

	namespace string
	node      *corev1.Node
	drainer   *Drainer
	stop      context.CancelFunc
	notices   chan types.NamespacedName
}

// newRig makes one whose Drainer has the rights of a deployed mcm; wrap, if not nil, sees the Drainer's requests.
func newRig(t *testing.T, settings Settings, wrap func(*rest.Config)) *rig {
	t.Helper()
	c, err := kubernetes.NewForConfig(apiServer)
	if err != nil {
		t.Fatal(err)
	}
	cfg := kubetest.AsMCM(apiServer)
	if wrap != nil {
		wrap(cfg)
	}
	own, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	n := rigs.Add(1)
	r := &rig{Interface: c, namespace: fmt.Sprintf("t%d", n), notices: make(chan types.NamespacedName, 1000)}
	must(t)(c.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{Name: r.namespace},
	}, metav1.CreateOptions{}))
	r.node = r.addNode(t, fmt.Sprintf("node-%d", n))
	if settings.Poll == 0 {
		settings.Poll = 20 * time.Millisecond
	}
	if settings.EvictRetry == 0 {
		settings.EvictRetry = 50 * time.Millisecond
	}
	ctx, cancel := context.WithCancel(t.Context())
	r.stop = cancel
	r.drainer = New(ctx, own, settings)
	r.drainer.Notify(func(name types.NamespacedName) { r.notices <- name })
	t.Cleanup(func() { cancel(); r.drainer.Wait() })

	return r
}

// must fails the test if a request did.
func must(t *testing.T) func(_ any, err error) {
	t.Helper()

	return func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
}

func (r *rig) addNode(t *testing.T, name string) *corev1.Node {
	t.Helper()
	node, err := r.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Test"}}
	if node, err = r.CoreV1().Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}

	return node
}

// A podOption changes a pod before it is made.
type podOption func(*corev1.Pod)

func labelled(value string) podOption {
	return func(p *corev1.Pod) { p.Labels = map[string]string{"app": value} }
}

func slowToEnd(p *corev1.Pod) { p.Spec.TerminationGracePeriodSeconds = new(int64(600)) }

// pod makes a pod on the Node that ends at once when it is evicted.
func (r *rig) pod(t *testing.T, name string, options ...podOption) *corev1.Pod {
	t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: name},
		Spec: corev1.PodSpec{
			NodeName: r.node.Name, TerminationGracePeriodSeconds: new(int64),
			Containers: []corev1.Container{{Name: "main", Image: "none.invalid/none"}},
		},
	}
	for _, change := range options {
		change(pod)
	}
	got, err := r.CoreV1().Pods(r.namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	got.Status.Phase = corev1.PodRunning
	// Budgets do not protect pods that are not ready.
	got.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	if got, err = r.CoreV1().Pods(r.namespace).UpdateStatus(t.Context(), got, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}

	return got
}

// kill removes a pod, as its kubelet does when it has ended.
func (r *rig) kill(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	err := r.CoreV1().Pods(pod.Namespace).Delete(t.Context(), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
	if err != nil {
		t.Fatal(err)
	}
}

// pods returns the names of all pods, and of those that are not in deletion.
func (r *rig) pods(t *testing.T) (all, untouched []string) {
	t.Helper()
	list, err := r.CoreV1().Pods(r.namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range list.Items {
		all = append(all, list.Items[i].Name)
		if list.Items[i].DeletionTimestamp.IsZero() {
			untouched = append(untouched, list.Items[i].Name)
		}
	}
	slices.Sort(all)
	slices.Sort(untouched)

	return all, untouched
}

// budget makes a disruption budget for the pods with that label, with the status
// that its controller would give it.
func (r *rig) budget(t *testing.T, app string, status policyv1.PodDisruptionBudgetStatus) *policyv1.PodDisruptionBudget {
	t.Helper()
	pdbs := r.PolicyV1().PodDisruptionBudgets(r.namespace)
	budget, err := pdbs.Create(t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: app},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}

	return r.setBudget(t, budget, status)
}

func (r *rig) setBudget(
	t *testing.T, budget *policyv1.PodDisruptionBudget, status policyv1.PodDisruptionBudgetStatus,
) *policyv1.PodDisruptionBudget {
	t.Helper()
	status.ObservedGeneration = budget.Generation
	budget.Status = status
	budget, err := r.PolicyV1().PodDisruptionBudgets(r.namespace).UpdateStatus(t.Context(), budget, metav1.UpdateOptions{})
	if err != nil {
		t.Fatal(err)
	}

	return budget
}

// busy is the status of a budget one of whose pods is not well.
var busy = policyv1.PodDisruptionBudgetStatus{ExpectedPods: 2, CurrentHealthy: 1, DesiredHealthy: 1}

// strict is the status of a budget that never allows anything.
var strict = policyv1.PodDisruptionBudgetStatus{ExpectedPods: 1, CurrentHealthy: 1, DesiredHealthy: 1}

func (r *rig) attachment(t *testing.T, name, node string, finalizers ...string) {
	t.Helper()
	must(t)(r.StorageV1().VolumeAttachments().Create(t.Context(), &storagev1.VolumeAttachment{
		ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: finalizers},
		Spec: storagev1.VolumeAttachmentSpec{
			Attacher: "test", NodeName: node, Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: new("volume")},
		},
	}, metav1.CreateOptions{}))
}

// attached reports whether a VolumeAttachment exists and is not in deletion.
func (r *rig) attached(t *testing.T, name string) bool {
	t.Helper()
	a, err := r.StorageV1().VolumeAttachments().Get(t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false
	}
	if err != nil {
		t.Fatal(err)
	}

	return a.DeletionTimestamp.IsZero()
}

// request is for the rig's Node.
func (r *rig) request() Request {
	return Request{
		UID: types.UID(r.namespace), Machine: types.NamespacedName{Namespace: r.namespace, Name: "m"}, Node: r.node,
		Timeout: time.Hour, MaxEvictRetries: 1 << 20,
	}
}

// until waits for a state of the drain.
func (r *rig) until(t *testing.T, what string, ok func(State) bool) State {
	t.Helper()
	var got State
	if !poll(func() bool { got, _ = r.drainer.State(types.UID(r.namespace)); return ok(got) }) {
		all, _ := r.pods(t)
		t.Fatalf("waited in vain: %s; the drain is %+v and the pods are %s", what, got, strings.Join(all, ", "))
	}

	return got
}

func (r *rig) done(t *testing.T) State {
	t.Helper()

	return r.until(t, "done", func(s State) bool { return s.Phase == Done })
}

// succeed drains and wants success.
func (r *rig) succeed(t *testing.T, req Request) State {
	t.Helper()
	r.drainer.Start(req)
	s := r.done(t)
	if s.Err != nil {
		t.Fatal("the drain failed:", s.Err)
	}

	return s
}

// noticed waits for a notice of the machine.
func (r *rig) noticed(t *testing.T) {
	t.Helper()
	select {
	case name := <-r.notices:
		if name != r.request().Machine {
			t.Errorf("notice of %s, want one of %s", name, r.request().Machine)
		}
	case <-time.After(patience):
		t.Fatal("no notice")
	}
}

// poll waits until ok holds; false means that this takes unreasonably long.
func poll(ok func() bool) bool {
	tick, limit := time.NewTicker(10*time.Millisecond), time.NewTimer(patience)
	defer tick.Stop()
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
