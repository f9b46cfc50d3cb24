package main

import (
	"context"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// state holds a world's objects in Kubernetes and the cloud: Machines and instances by
// uid of the Machine, pools and Nodes by name.
type state struct {
	pools     map[string]*v1alpha1.MachineDeployment
	machines  map[types.UID]*v1alpha1.Machine
	instances map[types.UID][]cloudapi.Instance
	nodes     map[string]*corev1.Node
}

func (w *world) look(ctx context.Context) (*state, error) {
	s := &state{
		pools: map[string]*v1alpha1.MachineDeployment{}, machines: map[types.UID]*v1alpha1.Machine{},
		instances: map[types.UID][]cloudapi.Instance{}, nodes: map[string]*corev1.Node{},
	}
	var pools v1alpha1.MachineDeploymentList
	var machines v1alpha1.MachineList
	var nodes corev1.NodeList
	for _, list := range []client.ObjectList{&pools, &machines} {
		if err := w.kube.List(ctx, list, client.InNamespace(w.name)); err != nil {
			return nil, err
		}
	}
	if err := w.kube.List(ctx, &nodes); err != nil {
		return nil, err
	}
	for i := range pools.Items {
		s.pools[pools.Items[i].Name] = &pools.Items[i]
	}
	for i := range machines.Items {
		s.machines[machines.Items[i].UID] = &machines.Items[i]
	}
	for i := range nodes.Items {
		if !w.foreign[nodes.Items[i].UID] {
			s.nodes[nodes.Items[i].Name] = &nodes.Items[i]
		}
	}
	live, err := w.cloud.Instances(ctx)
	for i := range live {
		uid := types.UID(live[i].Tags[cloudapi.TagMachineUID])
		s.instances[uid] = append(s.instances[uid], live[i])
	}
	return s, err
}

// flaws returns what is not as desired: every pool must have the desired number of
// machines of its last revision, all Running, each with one instance whose provider id it
// and its Node have. There must be no other instances.
func (s *state) flaws() []finding {
	var found []finding
	have, going := map[string]int{}, map[string]int{}
	for _, uid := range slices.Sorted(maps.Keys(s.machines)) {
		m := s.machines[uid]
		pool := m.Labels[v1alpha1.LabelKeyMachineDeployment] // none for a Machine of reuseName
		have[pool]++
		if m.DeletionTimestamp != nil {
			going[pool]++
		}
		found = append(found, s.flawsOf(m)...)
	}
	for _, name := range slices.Sorted(maps.Keys(s.pools)) {
		want := int(s.pools[name].Spec.Replicas)
		// Machines that are not deleted in time are findings of their own.
		if off := max(want-have[name], have[name]-going[name]-want); off > 0 {
			found = append(found, foundf(stuck, "pool "+name, off, "pool %s has %d Machines, want %d", name, have[name], want))
		}
	}
	return append(found, s.orphans()...)
}

func (s *state) flawsOf(m *v1alpha1.Machine) []finding {
	uid := string(m.UID)
	what := m.Name + " (" + uid + ")"
	instances, node := s.instances[m.UID], s.nodes[m.Labels[v1alpha1.LabelKeyNode]]
	pool := s.pools[m.Labels[v1alpha1.LabelKeyMachineDeployment]]
	switch {
	case m.Status.CurrentStatus.Phase != v1alpha1.MachineRunning || m.DeletionTimestamp != nil:
		return []finding{foundf(stuck, uid, 1, "machine %s is %q with %d instances, deleted: %t: %s", what,
			m.Status.CurrentStatus.Phase, len(instances), m.DeletionTimestamp != nil, m.Status.LastOperation.Description)}
	case len(instances) == 0:
		return []finding{foundf(lost, uid, 1, "machine %s is Running without an instance", what)}
	case len(instances) > 1:
		return []finding{foundf(doubled, uid, len(instances)-1, "machine %s has %d instances", what, len(instances))}
	case instances[0].ProviderID != m.Spec.ProviderID:
		return []finding{foundf(lost, uid, 1, "machine %s has provider id %q, its instance %q", what, m.Spec.ProviderID, instances[0].ProviderID)}
	case node == nil || node.Spec.ProviderID != m.Spec.ProviderID || !isReady(node):
		return []finding{foundf(stuck, uid, 1, "machine %s is Running without a Node of its own that is Ready", what)}
	case pool != nil && pool.Spec.Template.Labels[revisionLabel] != m.Labels[revisionLabel]:
		return []finding{foundf(stuck, uid, 1, "machine %s is of revision %q, want %q", what,
			m.Labels[revisionLabel], pool.Spec.Template.Labels[revisionLabel])}
	default:
		return nil
	}
}

func isReady(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// orphans returns the instances without a Machine.
func (s *state) orphans() []finding {
	var found []finding
	for _, uid := range slices.Sorted(maps.Keys(s.instances)) {
		if instances := s.instances[uid]; s.machines[uid] == nil {
			found = append(found, foundf(leaked, string(uid), len(instances), "%d instances of machine %s (%s), which is gone",
				len(instances), instances[0].Name, uid))
		}
	}
	return found
}

// noteForeign records the Nodes that an earlier world has left in the cluster.
func (w *world) noteForeign(ctx context.Context) error {
	var nodes corev1.NodeList
	if err := w.kube.List(ctx, &nodes); err != nil {
		return err
	}
	w.foreign = map[types.UID]bool{}
	for i := range nodes.Items {
		w.foreign[nodes.Items[i].UID] = true
	}
	return nil
}

// remains returns what is left of pools that are gone. A Node counts if it has mcm's
// finalizer, which keeps others from deleting it, and its Machine is gone.
func (s *state) remains() []finding {
	var found []finding
	left := map[string]bool{}
	for _, uid := range slices.Sorted(maps.Keys(s.machines)) {
		m := s.machines[uid]
		left[m.Name] = true
		found = append(found, foundf(stuck, string(uid), 1, "machine %s (%s) is still being deleted: %s",
			m.Name, uid, m.Status.LastOperation.Description))
	}
	for _, name := range slices.Sorted(maps.Keys(s.nodes)) {
		node := s.nodes[name]
		machine := node.Labels[v1alpha1.LabelKeyMachineName]
		if slices.Contains(node.Finalizers, v1alpha1.FinalizerNameNode) && !left[machine] {
			found = append(found, foundf(stuck, "node "+name, 1, "Node %s of machine %s, which is gone, is kept by mcm's finalizer, deleted: %t",
				name, machine, node.DeletionTimestamp != nil))
		}
	}
	return append(found, s.orphans()...)
}
