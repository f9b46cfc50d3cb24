package main

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// peerNamespace holds the peer's machines; mcm does not look there.
const peerNamespace = "blocking"

// A peer makes machines with the same calls to the API server and to the cloud
// as mcm and its driver, but its workers wait for the cloud.
type peer struct {
	world *world
	cloud *cloudapi.Client
}

func newPeer(ctx context.Context, w *world) (*peer, error) {
	cloud, err := cloudapi.NewClient(w.cloud.Endpoint, w.cloud.APIToken)
	if err != nil {
		return nil, err
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: peerNamespace}}
	return &peer{world: w, cloud: cloud}, w.kube.Create(ctx, namespace)
}

// createMachines makes machines and returns when all are Running.
func (p *peer) createMachines(ctx context.Context, names []string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not within %s", patience))
	defer cancel()
	nodes, err := p.world.kube.Watch(ctx, &corev1.NodeList{})
	if err != nil {
		return err
	}
	defer nodes.Stop()
	err = inParallel(names, func(name string) error {
		return p.world.kube.Create(ctx, newMachine(peerNamespace, name))
	})
	if err != nil {
		return err
	}

	// One queue for both kinds of work, with room for all there can be.
	work := make(chan func() step, 2*len(names))
	defer close(work)
	for _, name := range names {
		work <- func() step { return p.create(ctx, name) }
	}
	done := make(chan step, 2*len(names))
	for range workers {
		go func() {
			for do := range work {
				done <- do()
			}
		}()
	}
	return p.finish(ctx, len(names), nodes.ResultChan(), work, done)
}

// A step is one piece of work that has ended.
type step struct {
	machine *v1alpha1.Machine
	joined  bool // it was the last one
	err     error
}

// finish queues the last step of each machine once it is created and its Node exists, in
// any order.
func (p *peer) finish(ctx context.Context, n int, nodes <-chan watch.Event, work chan<- func() step, done <-chan step) error {
	created, ready := map[string]*v1alpha1.Machine{}, map[string]*corev1.Node{}
	meet := func(name string) {
		if m, node := created[name], ready[name]; m != nil && node != nil {
			delete(created, name)
			work <- func() step { return p.join(ctx, m, node) }
		}
	}
	for joined := 0; joined < n; {
		select {
		case s := <-done:
			switch {
			case s.err != nil:
				return s.err
			case s.joined:
				joined++
			default:
				created[s.machine.Name] = s.machine
				meet(s.machine.Name)
			}
		case event, ok := <-nodes:
			if !ok {
				return errors.New("the API server ended the watch of Nodes")
			}
			if node, isNode := event.Object.(*corev1.Node); isNode && event.Type != watch.Deleted {
				ready[node.Name] = node
				meet(node.Name)
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// create makes the instance, and waits for the cloud.
func (p *peer) create(ctx context.Context, name string) step {
	m := &v1alpha1.Machine{}
	kube := p.world.kube
	err := kube.Get(ctx, client.ObjectKey{Namespace: peerNamespace, Name: name}, m)
	if err != nil {
		return step{err: err}
	}
	err = p.patch(ctx, m, func() {
		controllerutil.AddFinalizer(m, v1alpha1.FinalizerName)
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.AnnotationKeyOperation, `{"settled":0,"operation":"create"}`)
	})
	if err == nil {
		err = kube.Create(ctx, tokenOf(m))
	}
	if err != nil {
		return step{err: err}
	}
	instance, err := p.cloud.Create(ctx, cloudapi.CreateRequest{
		Name: name, MachineType: "small", Region: "moon", IdempotencyToken: string(m.UID),
		Tags: map[string]string{cloudapi.TagMachineUID: string(m.UID)}, UserData: []byte("#cloud-config"),
	})
	if err != nil {
		return step{err: err}
	}
	err = p.patch(ctx, m, func() {
		m.Spec.ProviderID = instance.ProviderID
		metav1.SetMetaDataLabel(&m.ObjectMeta, v1alpha1.LabelKeyNode, instance.NodeName)
	})
	if err == nil {
		_, err = p.cloud.Initialize(ctx, instance.ID)
	}
	if err == nil {
		err = p.setPhase(ctx, m, v1alpha1.MachinePending)
	}
	return step{machine: m, err: err}
}

// join claims the Node and makes the machine Running.
func (p *peer) join(ctx context.Context, m *v1alpha1.Machine, node *corev1.Node) step {
	before := client.MergeFrom(node.DeepCopy())
	metav1.SetMetaDataLabel(&node.ObjectMeta, v1alpha1.LabelKeyMachineName, m.Name)
	controllerutil.AddFinalizer(node, v1alpha1.FinalizerNameNode)
	err := p.world.kube.Patch(ctx, node, before)
	token := tokenOf(m)
	if err == nil {
		err = p.world.kube.Get(ctx, client.ObjectKeyFromObject(token), token)
	}
	if err == nil {
		err = p.world.kube.Delete(ctx, token)
	}
	if err == nil {
		err = p.setPhase(ctx, m, v1alpha1.MachineRunning)
	}
	return step{machine: m, joined: true, err: err}
}

func (p *peer) patch(ctx context.Context, m *v1alpha1.Machine, change func()) error {
	before := client.MergeFrom(m.DeepCopy())
	change()
	return p.world.kube.Patch(ctx, m, before)
}

func (p *peer) setPhase(ctx context.Context, m *v1alpha1.Machine, phase v1alpha1.MachinePhase) error {
	before := client.MergeFrom(m.DeepCopy())
	m.Status.CurrentStatus = v1alpha1.CurrentStatus{Phase: phase, LastUpdateTime: metav1.Now()}
	return p.world.kube.Status().Patch(ctx, m, before)
}

// tokenOf returns a Secret instead of the machine's bootstrap token.
func tokenOf(m *v1alpha1.Machine) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: peerNamespace, Name: m.Name},
		StringData: map[string]string{"token-id": "bench0"},
	}
}

// deleteMachines deletes everything that createMachines has created. It is not measured.
func (p *peer) deleteMachines(ctx context.Context, names []string) error {
	instances, err := p.cloud.List(ctx, cloudapi.Filter{})
	if err != nil {
		return err
	}
	ids := map[string]string{}
	for _, i := range instances {
		ids[i.Name] = i.ID
	}
	return inParallel(names, func(name string) error {
		if err := p.cloud.Delete(ctx, ids[name]); err != nil {
			return err
		}
		m := &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: peerNamespace, Name: name}}
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		release := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))
		for _, object := range []client.Object{node, m} {
			err := errors.Join(p.world.kube.Patch(ctx, object, release), p.world.kube.Delete(ctx, object))
			if err != nil {
				return err
			}
		}
		return nil
	})
}
