package autoscaler_test

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/mcm/kubetest"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// patience bounds every wait; it is far above what is waited for.
const patience = 60 * time.Second

var (
	apiServer *rest.Config // of the API server that all tests share
	scheme    = kubetest.Scheme()
	// now is the server's clock; it stands still.
	now = time.Date(2026, 8, 11, 7, 30, 0, 0, time.UTC)
)

func TestMain(m *testing.M) {
	kubetest.Main(m, kubetest.Environment(), func(cfg *rest.Config) error {
		apiServer = cfg

		return nil
	})
}

// A rig is a namespace with a gateway that serves it, and a client of that.
type rig struct {
	client.Client
	externalgrpc.CloudProviderClient

	t         *testing.T
	namespace string
	conn      *grpc.ClientConn
	cache     cache.Cache
}

func newRig(t *testing.T, change ...func(*rig, *autoscaler.Config)) *rig {
	t.Helper()
	c, namespace := kubetest.Namespace(t, apiServer)
	r := &rig{Client: c, t: t, namespace: namespace}
	mgr, err := ctrl.NewManager(apiServer, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}, Logger: logr.Discard(),
		Cache: cache.Options{DefaultNamespaces: map[string]cache.Config{r.namespace: {}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	r.cache = mgr.GetCache()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error("manager:", err)
		}
	})
	cfg := autoscaler.Config{
		Control: mgr.GetClient(), Live: mgr.GetAPIReader(), Nodes: mgr.GetCache(),
		Events: mgr.GetEventRecorderFor("mcm-autoscaler"), //nolint:staticcheck // the newer API keeps only the first text of a reason
		Now:    func() time.Time { return now },
	}
	for _, f := range change {
		f(r, &cfg)
	}
	server := grpc.NewServer(grpc.UnaryInterceptor(autoscaler.NewObserver().Intercept))
	externalgrpc.RegisterCloudProviderServer(server, autoscaler.New(cfg))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-done; err != nil {
			t.Error("server:", err)
		}
	})
	if r.conn, err = grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.conn.Close() })
	r.CloudProviderClient = externalgrpc.NewCloudProviderClient(r.conn)

	return r
}

func (r *rig) create(o client.Object) {
	r.t.Helper()
	if err := r.Create(r.t.Context(), o); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) id(name string) string { return r.namespace + "/" + name }

// deployment makes a MachineDeployment with its MachineSet; a size makes it a
// group.
func (r *rig) deployment(name string, replicas int32, annotations map[string]string) *v1alpha1.MachineDeployment {
	r.t.Helper()
	d := &v1alpha1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: name, Annotations: annotations},
		Spec: v1alpha1.MachineDeploymentSpec{
			Replicas: replicas,
			Template: v1alpha1.MachineTemplateSpec{Spec: v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: "MachineClass", Name: "small"}}},
		},
	}
	r.create(d)
	set := &v1alpha1.MachineSet{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: name + "-1"}}
	own(set, d, "MachineDeployment")
	r.create(set)

	return d
}

func size(lower, upper string) map[string]string {
	return map[string]string{autoscaler.AnnotationKeyMin: lower, autoscaler.AnnotationKeyMax: upper}
}

func own(o, owner client.Object, kind string) {
	o.SetOwnerReferences([]metav1.OwnerReference{{
		APIVersion: "machine.sapcloud.io/v1alpha1", Kind: kind, Name: owner.GetName(), UID: owner.GetUID(), Controller: new(true),
	}})
}

// machine makes a Machine of a deployment.
func (r *rig) machine(deployment, name string, change ...func(*v1alpha1.Machine)) *v1alpha1.Machine {
	r.t.Helper()
	set := &v1alpha1.MachineSet{}
	if err := r.Get(r.t.Context(), client.ObjectKey{Namespace: r.namespace, Name: deployment + "-1"}, set); err != nil {
		r.t.Fatal(err)
	}
	m := &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: name}}
	own(m, set, "MachineSet")
	for _, f := range change {
		f(m)
	}
	state := m.Status
	r.create(m)
	m.Status = state
	if err := r.Status().Update(r.t.Context(), m); err != nil {
		r.t.Fatal(err)
	}

	return m
}

// joined makes a Machine whose Node is there. Nodes have no namespace.
func (r *rig) joined(deployment, name string, change ...func(*v1alpha1.Machine)) *externalgrpc.ExternalGrpcNode {
	r.t.Helper()
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: r.namespace + "-" + name},
		Spec:       corev1.NodeSpec{ProviderID: "virtual://" + r.namespace + "/" + name},
	}
	r.create(node)
	r.machine(deployment, name, append(change, func(m *v1alpha1.Machine) {
		m.Labels = map[string]string{"node": node.Name}
		m.Spec.ProviderID = "virtual:///elsewhere/" + r.namespace + "/" + name // providers differ from their cloud controllers
	})...)

	return &externalgrpc.ExternalGrpcNode{Name: node.Name, ProviderID: node.Spec.ProviderID}
}

// fake is how the cluster-autoscaler names a machine that has not joined.
func (r *rig) fake(machine string) *externalgrpc.ExternalGrpcNode {
	id := "requested://" + r.namespace + "/" + machine

	return &externalgrpc.ExternalGrpcNode{
		Name: id, ProviderID: id, Annotations: map[string]string{"k8s.io/cluster-autoscaler/fake-node-reason": "unregistered"},
	}
}

// refresh returns once a Refresh has seen what the test has made: so many
// instances in all groups together.
func (r *rig) refresh(groups, instances int) {
	r.t.Helper()
	r.eventually("caches see the objects", func() bool {
		if _, err := r.Refresh(r.t.Context(), &externalgrpc.RefreshRequest{}); err != nil {
			r.t.Fatal(err)
		}
		list, err := r.NodeGroups(r.t.Context(), &externalgrpc.NodeGroupsRequest{})
		if err != nil {
			r.t.Fatal(err)
		}
		have := 0
		for _, g := range list.GetNodeGroups() {
			have += len(r.instances(g.GetId()))
		}

		return len(list.GetNodeGroups()) == groups && have == instances
	})
}

func (r *rig) eventually(what string, ok func() bool) {
	r.t.Helper()
	tick, limit := time.NewTicker(10*time.Millisecond), time.NewTimer(patience)
	defer tick.Stop()
	defer limit.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-limit.C:
			r.t.Fatalf("waited in vain: %s", what)
		}
	}
}

func (r *rig) instances(id string) []*externalgrpc.Instance {
	r.t.Helper()
	out, err := r.NodeGroupNodes(r.t.Context(), &externalgrpc.NodeGroupNodesRequest{Id: id})
	if err != nil {
		r.t.Fatal(err)
	}

	return out.GetInstances()
}

func (r *rig) target(name string) int32 {
	r.t.Helper()
	out, err := r.NodeGroupTargetSize(r.t.Context(), &externalgrpc.NodeGroupTargetSizeRequest{Id: r.id(name)})
	if err != nil {
		r.t.Fatal(err)
	}

	return out.GetTargetSize()
}

func (r *rig) increase(name string, delta int32) error {
	_, err := r.NodeGroupIncreaseSize(r.t.Context(), &externalgrpc.NodeGroupIncreaseSizeRequest{Id: r.id(name), Delta: delta})

	return err
}

func (r *rig) decrease(name string, delta int32) error {
	_, err := r.NodeGroupDecreaseTargetSize(r.t.Context(), &externalgrpc.NodeGroupDecreaseTargetSizeRequest{Id: r.id(name), Delta: delta})

	return err
}

func (r *rig) deleteNodes(name string, nodes ...*externalgrpc.ExternalGrpcNode) error {
	_, err := r.NodeGroupDeleteNodes(r.t.Context(), &externalgrpc.NodeGroupDeleteNodesRequest{Id: r.id(name), Nodes: nodes})

	return err
}

// stored returns what the API server has of a deployment.
func (r *rig) stored(name string) *v1alpha1.MachineDeployment {
	r.t.Helper()
	d := &v1alpha1.MachineDeployment{}
	if err := r.Get(r.t.Context(), client.ObjectKey{Namespace: r.namespace, Name: name}, d); err != nil {
		r.t.Fatal(err)
	}

	return d
}

func (r *rig) wantCode(err error, want codes.Code) {
	r.t.Helper()
	if got := status.Code(err); got != want {
		r.t.Errorf("code %s, want %s: %v", got, want, err)
	}
}
