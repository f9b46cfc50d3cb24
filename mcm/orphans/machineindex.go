package orphans

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// A machineIndex finds the machine that an instance belongs to.
type machineIndex struct {
	byUID        map[types.UID]*v1alpha1.Machine
	byProviderID map[string]*v1alpha1.Machine
	byName       map[string]*v1alpha1.Machine // only machines without a providerID
	byClass      map[types.NamespacedName][]*v1alpha1.Machine
}

func newMachineIndex(machines []v1alpha1.Machine) *machineIndex {
	r := &machineIndex{
		byUID: map[types.UID]*v1alpha1.Machine{}, byProviderID: map[string]*v1alpha1.Machine{},
		byName: map[string]*v1alpha1.Machine{}, byClass: map[types.NamespacedName][]*v1alpha1.Machine{},
	}
	for i := range machines {
		m := &machines[i]
		r.byUID[m.UID] = m
		class := types.NamespacedName{Namespace: m.Namespace, Name: m.Spec.Class.Name}
		r.byClass[class] = append(r.byClass[class], m)
		if id := m.Spec.ProviderID; id != "" {
			r.byProviderID[id] = m
		} else {
			r.byName[m.Name] = m
		}
	}

	return r
}

// A belonging says how an instance belongs to a machine.
type belonging int

const (
	orphan    belonging = iota // it belongs to no machine
	owned                      // it is the machine's instance, or may become it
	duplicate                  // it was created for a machine that has another instance
)

// belongs returns the machine that an instance belongs to.
func (r *machineIndex) belongs(i *dispatch.Listed) (*v1alpha1.Machine, belonging) {
	if m, ok := r.byProviderID[i.ProviderID]; ok {
		return m, owned
	}
	if m, ok := r.byUID[i.MachineUID]; ok && i.MachineUID != "" {
		if m.Spec.ProviderID == "" {
			return m, owned // its create has not ended yet
		}

		return m, duplicate
	}
	if m, ok := r.byName[i.MachineName]; ok && i.MachineUID == "" {
		// A driver that finds instances by name may return it. An instance with another uid
		// belongs to an earlier machine of this name: no create returns it [CREATE-2].
		return m, owned
	}

	return nil, orphan
}

// nodes returns the names of all machines, and those of their Nodes.
func (r *machineIndex) nodes() (machines, nodes map[string]bool) {
	machines, nodes = map[string]bool{}, map[string]bool{}
	for _, m := range r.byUID {
		machines[m.Name] = true
		if node := m.Labels[v1alpha1.LabelKeyNode]; node != "" {
			nodes[node] = true
		}
	}

	return machines, nodes
}

// missing returns how many instances the machines of a class have, and how many of them are
// not in a list of the class. Machines that are being deleted do not count.
func (r *machineIndex) missing(class types.NamespacedName, list []dispatch.Listed) (missing, known int) {
	there := make(map[string]bool, len(list))
	for i := range list {
		there[list[i].ProviderID] = true
	}
	for _, m := range r.byClass[class] {
		if m.Spec.ProviderID == "" || !m.DeletionTimestamp.IsZero() {
			continue
		}
		known++
		if !there[m.Spec.ProviderID] {
			missing++
		}
	}

	return missing, known
}
