package join

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/kubetest"
)

// period is short, so that tests see many renewals.
const period = 20 * time.Millisecond

// apiServer is a real one, which all tests share; each has Node names of its own.
var apiServer *rest.Config

func TestMain(m *testing.M) {
	kubetest.Main(m, &envtest.Environment{}, func(cfg *rest.Config) error {
		apiServer = cfg

		return nil
	})
}

// bundle is a Joiner that runs, and a client to watch it with.
type bundle struct {
	*Joiner

	api kubernetes.Interface
	net *network
	log *syncBuffer
}

func setup(t *testing.T) *bundle {
	t.Helper()
	b := &bundle{net: &network{}, log: &syncBuffer{}}
	throughNetwork := rest.CopyConfig(apiServer)
	throughNetwork.Dial = b.net.dial
	client, err := kubernetes.NewForConfig(throughNetwork)
	if err != nil {
		t.Fatal(err)
	}
	if b.api, err = kubernetes.NewForConfig(apiServer); err != nil {
		t.Fatal(err)
	}
	b.Joiner = New(client, period, slog.New(slog.NewTextHandler(b.log, nil)))
	ctx, stop := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() { b.Run(ctx) })
	t.Cleanup(func() {
		stop()
		work.Wait()
	})

	return b
}

// network is the way to the API server.
type network struct {
	mu    sync.Mutex
	down  bool
	conns []net.Conn
}

func (n *network) dial(ctx context.Context, kind, address string) (net.Conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down {
		return nil, errors.New("the network is down")
	}
	conn, err := new(net.Dialer).DialContext(ctx, kind, address)
	if err == nil {
		n.conns = append(n.conns, conn)
	}

	return conn, err
}

// set takes the network down, with all connections, or up.
func (n *network) set(down bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.down = down
	for _, c := range n.conns {
		c.Close()
	}
	n.conns = nil
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.b.String()
}

func instance(id, name string) cloudapi.Instance {
	return cloudapi.Instance{
		ID: id, Name: name, MachineType: "small", Region: "here", Zone: "here-a",
		NodeName: name, ProviderID: "virtual:///here/" + id,
		Addresses: []cloudapi.Address{{Type: "InternalIP", Address: "10.0.0.1"}, {Type: "Hostname", Address: name}},
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(30 * time.Second)
	for !ok() {
		select {
		case <-time.After(5 * time.Millisecond):
		case <-deadline:
			t.Fatalf("not in time: %s", what)
		}
	}
}

// node returns nil when there is none.
func (b *bundle) node(t *testing.T, name string) *corev1.Node {
	t.Helper()
	node, err := b.api.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}

	return node
}

func (b *bundle) isReady(t *testing.T, name string, want corev1.ConditionStatus) func() bool {
	t.Helper()

	return func() bool {
		node := b.node(t, name)

		return node != nil && readiness(node) == want
	}
}

// renewal returns nil when there is no Lease.
func (b *bundle) renewal(t *testing.T, name string) *coordinationv1.Lease {
	t.Helper()
	lease, err := b.api.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}

	return lease
}

// renewed waits until a Lease has been renewed so many times.
func (b *bundle) renewed(t *testing.T, name string, times int) {
	t.Helper()
	for range times {
		before := b.renewal(t, name)
		eventually(t, "renewal of "+name, func() bool {
			now := b.renewal(t, name)

			return now != nil && (before == nil || now.Spec.RenewTime.After(before.Spec.RenewTime.Time))
		})
	}
}

// silent checks that a Lease is not renewed while a witness's is.
func (b *bundle) silent(t *testing.T, name, witness string) {
	t.Helper()
	b.renewed(t, witness, 3) // a request that was on its way has arrived
	before := b.renewal(t, name)
	b.renewed(t, witness, 5)
	if diff := cmp.Diff(before, b.renewal(t, name)); diff != "" {
		t.Errorf("the lease of %s was written (-before +after):\n%s", name, diff)
	}
}

func TestLifeOfANode(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.Booted(instance("i-1", "life"))
	b.Booted(instance("i-2", "life-witness"))
	b.renewed(t, "life", 2)

	node := b.node(t, "life")
	if node.Spec.ProviderID != "virtual:///here/i-1" || readiness(node) != corev1.ConditionTrue {
		t.Errorf("provider id %q, ready %q", node.Spec.ProviderID, readiness(node))
	}
	wantLabels := map[string]string{
		"kubernetes.io/hostname": "life", "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
		"node.kubernetes.io/instance-type": "small",
		"topology.kubernetes.io/region":    "here", "topology.kubernetes.io/zone": "here-a",
	}
	if diff := cmp.Diff(wantLabels, node.Labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	if len(node.Status.Addresses) != 2 || node.Status.Allocatable.Cpu().IsZero() || node.Status.NodeInfo.KubeletVersion == "" {
		t.Errorf("status is not a kubelet's: %+v", node.Status)
	}
	lease := b.renewal(t, "life")
	if len(lease.OwnerReferences) != 1 || lease.OwnerReferences[0].UID != node.UID {
		t.Errorf("the lease's owners are %v, want the node", lease.OwnerReferences)
	}

	b.Knobs(cloudapi.Knobs{NodeNotReady: []string{"life"}})
	eventually(t, "the node is not ready", b.isReady(t, "life", corev1.ConditionFalse))
	b.Knobs(cloudapi.Knobs{})
	eventually(t, "the node is ready again", b.isReady(t, "life", corev1.ConditionTrue))

	b.Knobs(cloudapi.Knobs{NodeSilent: []string{"life"}})
	b.silent(t, "life", "life-witness")
	b.Knobs(cloudapi.Knobs{})
	b.renewed(t, "life", 1)

	b.Stopped("i-1")
	b.silent(t, "life", "life-witness")
	if b.node(t, "life") == nil {
		t.Error("the node went with its instance; a dead kubelet leaves it")
	}
}

func TestUnknownIsMended(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.Booted(instance("i-1", "mended"))
	b.renewed(t, "mended", 1)
	// As the node lifecycle controller does when a kubelet was away.
	patch := []byte(`{"status":{"conditions":[{"type":"Ready","status":"Unknown"}]}}`)
	if _, err := b.api.CoreV1().Nodes().PatchStatus(t.Context(), "mended", patch); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the node is ready again", b.isReady(t, "mended", corev1.ConditionTrue))
}

func TestExistingNode(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		reason     string
		providerID string
		joins      bool
	}{
		"none":    {reason: "a Node without provider id is taken over", joins: true},
		"own":     {reason: "the instance's own Node is taken over", providerID: "virtual:///here/i-own", joins: true},
		"foreign": {reason: "another instance's Node is in the way", providerID: "virtual:///here/i-0"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			nodeName := "existing-" + name
			existing := &corev1.Node{
				ObjectMeta: metav1.ObjectMeta{Name: nodeName, Labels: map[string]string{"other": "set"}},
				Spec:       corev1.NodeSpec{ProviderID: tc.providerID},
			}
			if _, err := b.api.CoreV1().Nodes().Create(t.Context(), existing, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			b.Booted(instance("i-"+name, nodeName))
			if !tc.joins {
				eventually(t, tc.reason, func() bool { return strings.Contains(b.log.String(), "is taken by another instance") })
				if readiness(b.node(t, nodeName)) != "" || b.renewal(t, nodeName) != nil {
					t.Errorf("%s, but was written to", tc.reason)
				}
				if err := b.api.CoreV1().Nodes().Delete(t.Context(), nodeName, metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			b.renewed(t, nodeName, 1)
			node := b.node(t, nodeName)
			if node.Spec.ProviderID != "virtual:///here/i-"+name || readiness(node) != corev1.ConditionTrue {
				t.Errorf("%s: provider id %q, ready %q", tc.reason, node.Spec.ProviderID, readiness(node))
			}
			if _, kept := node.Labels["other"]; kept != tc.joins || node.Labels[corev1.LabelHostname] != nodeName {
				t.Errorf("%s: labels %v", tc.reason, node.Labels)
			}
		})
	}
}

func TestRefusedNodeJoinsLater(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.Knobs(cloudapi.Knobs{NodeRefuse: []string{"refused-*"}})
	b.Booted(instance("i-1", "refused-1"))
	b.Booted(instance("i-2", "witness-of-refusal"))
	b.renewed(t, "witness-of-refusal", 3)
	if b.node(t, "refused-1") != nil {
		t.Error("the instance joined although a knob forbids it")
	}
	b.Knobs(cloudapi.Knobs{})
	b.renewed(t, "refused-1", 1)
}

func TestDeletedNodeStaysAway(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.Booted(instance("i-1", "deleted"))
	b.Booted(instance("i-2", "deleted-witness"))
	b.renewed(t, "deleted", 1)
	if err := b.api.CoreV1().Nodes().Delete(t.Context(), "deleted", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the deletion is noticed", func() bool { return strings.Contains(b.log.String(), "node deleted") })
	b.silent(t, "deleted", "deleted-witness")
	if b.node(t, "deleted") != nil {
		t.Error("the node came back; a kubelet registers only when it starts")
	}
}

func TestManyNodesThroughAnOutage(t *testing.T) {
	const nodes = 200
	b := setup(t)
	goroutines := runtime.NumGoroutine()
	for n := range nodes {
		b.Booted(instance(fmt.Sprintf("i-%d", n), fmt.Sprintf("many-%d", n)))
	}
	b.allRenewed(t, nodes)
	if more := runtime.NumGoroutine() - goroutines; more > nodes/2 {
		t.Errorf("%d more goroutines for %d nodes", more, nodes)
	}

	b.net.set(true)
	b.Booted(instance("i-new", "many-new"))
	eventually(t, "the outage is logged", func() bool { return strings.Contains(b.log.String(), "cannot update their Nodes") })
	b.net.set(false)
	b.allRenewed(t, nodes+1)
	if lines := strings.Count(b.log.String(), "cannot update their Nodes"); lines > 5 {
		t.Errorf("%d lines about one outage", lines)
	}
}

// allRenewed waits until the Leases of so many nodes have been renewed.
func (b *bundle) allRenewed(t *testing.T, nodes int) {
	t.Helper()
	since := time.Now()
	eventually(t, "every lease is renewed", func() bool {
		leases, err := b.api.CoordinationV1().Leases(corev1.NamespaceNodeLease).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		renewed := 0
		for _, l := range leases.Items {
			if strings.HasPrefix(l.Name, "many-") && l.Spec.RenewTime.After(since) {
				renewed++
			}
		}

		return renewed == nodes
	})
}
