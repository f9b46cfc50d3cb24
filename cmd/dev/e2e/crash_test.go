package e2e

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/bootstrap"
)

// A crashPoint is where mcm is killed: at a request of its own to the API server,
// or at one of the driver to the cloud. In paths, MACHINE stands for the machine's
// name, which is the Node's too.
type crashPoint struct {
	reason string
	kube   stopAt
	cloud  stopAt
	// missed lets the cloud's answer reach the driver while there is no manager;
	// otherwise it comes under the next one.
	missed bool
}

const (
	machinePath = "/apis/machine.sapcloud.io/v1alpha1/namespaces/*/machines/MACHINE"
	statusPath  = machinePath + "/status"
	nodePath    = "/api/v1/nodes/MACHINE"
	tokensPath  = "/api/v1/namespaces/kube-system/secrets"
	patch       = http.MethodPatch
)

// createPoints are in the order of a machine's creation.
var createPoints = []crashPoint{
	{reason: "nothing is stored", kube: stopAt{method: patch, path: machinePath, body: v1alpha1.FinalizerName}},
	{reason: "finalizer and journal are stored, nothing is sent", kube: stopAt{method: patch, path: machinePath, body: v1alpha1.FinalizerName, answered: true}},
	{reason: "a driver has accepted, and asks for the bootstrap token", kube: stopAt{method: http.MethodPost, path: tokensPath}},
	{reason: "the token is made, the driver does not have it", kube: stopAt{method: http.MethodPost, path: tokensPath, answered: true}},
	{reason: "the cloud is being called", cloud: stopAt{method: http.MethodPost, path: "/v1/instances"}},
	{reason: "the instance exists, but mcm does not know it", cloud: stopAt{method: http.MethodPost, path: "/v1/instances", answered: true}},
	{reason: "the driver's result comes while there is no manager", cloud: stopAt{method: http.MethodPost, path: "/v1/instances", answered: true}, missed: true},
	{reason: "the result is there, but not stored", kube: stopAt{method: patch, path: machinePath, body: "providerID"}},
	{reason: "the result is stored, the replica still has it", kube: stopAt{method: patch, path: machinePath, body: "providerID", answered: true}},
	{reason: "the instance is being initialized", cloud: stopAt{method: http.MethodPost, path: "/v1/instances/*/initialize"}},
	{reason: "it is initialized, while there is no manager", cloud: stopAt{method: http.MethodPost, path: "/v1/instances/*/initialize", answered: true}, missed: true},
	{reason: "that it is initialized is not stored", kube: stopAt{method: patch, path: statusPath, body: `"Pending"`}},
	{reason: "Pending is stored, the replica still has the result", kube: stopAt{method: patch, path: statusPath, body: `"Pending"`, answered: true}},
	{reason: "the Node has joined and has no owner", kube: stopAt{method: patch, path: nodePath, body: v1alpha1.FinalizerNameNode}},
	{reason: "the token is spent, but still there", kube: stopAt{method: http.MethodDelete, path: tokensPath + "/bootstrap-token-*"}},
	{reason: "the token is gone, the machine not yet Running", kube: stopAt{method: patch, path: statusPath, body: `"Running"`}},
	{reason: "all is done, mcm does not know", kube: stopAt{method: patch, path: statusPath, body: `"Running"`, answered: true}},
}

// deletePoints are in the order of a machine's deletion.
var deletePoints = []crashPoint{
	{reason: "nothing is stored", kube: stopAt{method: patch, path: statusPath, body: `"Terminating"`}},
	{reason: "Terminating is stored", kube: stopAt{method: patch, path: statusPath, body: `"Terminating"`, answered: true}},
	{reason: "the Node shows its deletion", kube: stopAt{method: patch, path: nodePath + "/status", answered: true}},
	{reason: "the Node is cordoned", kube: stopAt{method: patch, path: nodePath, body: "unschedulable", answered: true}},
	{reason: "a pod is to be evicted", kube: stopAt{method: http.MethodPost, path: "/api/v1/namespaces/*/pods/MACHINE/eviction"}},
	{reason: "the pod is evicted", kube: stopAt{method: http.MethodPost, path: "/api/v1/namespaces/*/pods/MACHINE/eviction", answered: true}},
	{reason: "the Node is drained, and that not stored", kube: stopAt{method: patch, path: statusPath, body: v1alpha1.DeletionTextDeleteVM}},
	{reason: "the delete is journaled, nothing is sent", kube: stopAt{method: patch, path: machinePath, body: "delete", answered: true}},
	{reason: "the cloud is being called", cloud: stopAt{method: http.MethodDelete, path: "/v1/instances/*"}},
	{reason: "the instance is gone, but mcm does not know it", cloud: stopAt{method: http.MethodDelete, path: "/v1/instances/*", answered: true}},
	{reason: "the driver's result comes while there is no manager", cloud: stopAt{method: http.MethodDelete, path: "/v1/instances/*", answered: true}, missed: true},
	{reason: "the result is there, but not stored", kube: stopAt{method: patch, path: statusPath, body: v1alpha1.TextVMDeleted}},
	{reason: "the result is stored", kube: stopAt{method: patch, path: statusPath, body: v1alpha1.TextVMDeleted, answered: true}},
	{reason: "the Node has lost its finalizer", kube: stopAt{method: patch, path: nodePath, body: "finalizers", answered: true}},
	{reason: "the Node is deleted", kube: stopAt{method: http.MethodDelete, path: nodePath, answered: true}},
	{reason: "the Machine is to lose its finalizer", kube: stopAt{method: patch, path: machinePath, body: "finalizers"}},
	{reason: "the Machine is gone, the replica still has the result", kube: stopAt{method: patch, path: machinePath, body: "finalizers", answered: true}},
}

// TestManagerKilledInCreate kills mcm at each point of a creation.
func TestManagerKilledInCreate(t *testing.T) {
	e := newEnv(t)
	c := e.newCrashes("")
	var names []string
	for i, p := range createPoints {
		name := fmt.Sprintf("%s-%02d", e.name, i)
		reached := c.arm(p, name)
		e.createMachine(name, className)
		c.kill(p, reached)
		e.waitRunning(name)
		e.wantLinked(name) // an Event may be lost with the manager that was to record it
		e.wantNoToken(name)
		names = append(names, name)
		e.wantInstances(len(names))
		if t.Failed() {
			t.Fatalf("killed where %s", p.reason)
		}
	}
	e.wantNoDuplicates()
	e.deleteAll(names...)
	e.wantInstances(len(names))
}

// TestManagerKilledInDelete kills mcm at each point of a deletion. Here the bus
// survives.
func TestManagerKilledInDelete(t *testing.T) {
	e := newEnv(t)
	nats, err := e.site.StartNATS(e.ctx())
	e.must(err)
	c := e.newCrashes(nats.URL)
	var names []string
	for i := range deletePoints {
		names = append(names, fmt.Sprintf("%s-%02d", e.name, i))
		e.createMachine(names[i], className)
	}
	e.waitRunning(names...)
	for i, p := range deletePoints {
		e.createPod(names[i])
		reached := c.arm(p, names[i])
		e.deleteMachine(names[i])
		c.kill(p, reached)
		e.waitGone(names[i])
		e.wantNoPod(names[i])
		if t.Failed() {
			t.Fatalf("killed where %s", p.reason)
		}
	}
	e.wantInstances(len(names))
}

// crashes is an env with gates.
type crashes struct {
	*env

	manager             *stack.Manager
	kubeGate, cloudGate *gate
}

// newCrashes starts a manager whose requests go through a gate, as do those of
// its driver.
func (e *env) newCrashes(natsURL string) *crashes {
	e.Helper()
	c := &crashes{env: e, cloudGate: e.openGate(e.cloud.Endpoint, nil)}
	var kubeconfig string
	c.kubeGate, kubeconfig = e.openKubeGate()
	var err error
	c.manager, err = e.site.StartManager(e.ctx(), stack.ManagerOptions{
		Control: kubeconfig, Namespace: e.name, Cluster: e.name, NATSURL: natsURL, Args: []string{"-v=2"},
	})
	e.must(err)
	e.startDrivers(1, c.manager.NATSURL, e.tap(c.manager.NATSURL))
	secret := e.newSecret(className)
	secret.StringData["userData"] += "token: " + bootstrap.Placeholder + "\n"
	e.must(e.kube.Create(e.ctx(), secret))
	e.must(e.kube.Create(e.ctx(), e.newClass(className, map[string]any{"endpoint": c.cloudGate.url})))
	return c
}

func (c *crashes) arm(p crashPoint, machine string) *stop {
	g, at := c.kubeGate, p.kube
	if p.cloud.method != "" {
		g, at = c.cloudGate, p.cloud
	}
	at.path = strings.ReplaceAll(at.path, "MACHINE", machine)
	return g.arm(at)
}

// kill kills the manager once the point is reached, and starts it again.
func (c *crashes) kill(p crashPoint, reached *stop) {
	c.Helper()
	c.await(reached, "is there", reached.reached)
	c.must(c.manager.Kill())
	if p.missed || p.cloud.method == "" {
		if p.missed {
			close(reached.letGo)
		}
		c.await(reached, "is over", reached.over)
		c.must(c.manager.Restart(c.ctx()))
		return
	}
	c.must(c.manager.Restart(c.ctx()))
	close(reached.letGo)
}

// wantNoToken expects that a machine's bootstrap token is gone.
func (e *env) wantNoToken(machine string) {
	e.Helper()
	if tokens := e.tokens(machine); len(tokens) > 0 {
		e.Errorf("machine %s has joined, and %d bootstrap tokens are left", machine, len(tokens))
	}
}

// TestTokenOfAMachineThatNeverJoined deletes a machine whose Node does not come. The
// token that it would have joined with must not outlive it.
func TestTokenOfAMachineThatNeverJoined(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	e.startDrivers(1, manager.NATSURL, tap)
	secret := e.newSecret(className)
	secret.StringData["userData"] += "token: " + bootstrap.Placeholder + "\n"
	e.must(e.kube.Create(e.ctx(), secret))
	e.must(e.kube.Create(e.ctx(), e.newClass(className, nil)))
	_, err := e.cloud.Admin.Patch(e.ctx(), cloudapi.KnobsPatch{NodeRefuse: &[]string{"*"}})
	e.must(err)
	name := e.createMachines(1, className)[0]
	e.eventually("the machine waits for its Node", func(ctx context.Context) error {
		return e.inPhase(ctx, name, v1alpha1.MachinePending)
	})
	tokens := e.tokens(name)
	if len(tokens) != 1 {
		t.Fatalf("the machine has %d tokens, want 1", len(tokens))
	}
	e.deleteAll(name)
	err = e.kube.Get(e.ctx(), client.ObjectKeyFromObject(&tokens[0]), &corev1.Secret{})
	if client.IgnoreNotFound(err) != nil || err == nil {
		t.Errorf("the token of a machine that is gone is there: %v", err)
	}
}

// tokens returns the Secrets of a machine's bootstrap tokens.
func (e *env) tokens(machine string) []corev1.Secret {
	e.Helper()
	m, err := e.machine(e.ctx(), machine)
	e.must(err)
	var secrets corev1.SecretList
	e.must(e.kube.List(e.ctx(), &secrets, client.InNamespace(metav1.NamespaceSystem),
		client.MatchingLabels{bootstrap.LabelKeyMachineUID: string(m.UID)}))
	return secrets.Items
}

// createPod makes a pod of the Node's name that runs on it. There is no kubelet
// to end it, so it may be ended at once.
func (e *env) createPod(node string) {
	e.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: e.name, Name: node},
		Spec: corev1.PodSpec{
			NodeName: node, TerminationGracePeriodSeconds: new(int64),
			Containers: []corev1.Container{{Name: "none", Image: "none.invalid/none"}},
		},
	}
	e.eventually("the namespace takes pods", func(ctx context.Context) error {
		return e.kube.Create(ctx, pod.DeepCopy()) // needs the ServiceAccount that a controller makes
	})
}

// wantNoPod expects that createPod's was evicted.
func (e *env) wantNoPod(node string) {
	e.Helper()
	err := e.kube.Get(e.ctx(), client.ObjectKey{Namespace: e.name, Name: node}, &corev1.Pod{})
	if client.IgnoreNotFound(err) != nil || err == nil {
		e.Errorf("the pod of node %s is there: %v", node, err)
	}
}
