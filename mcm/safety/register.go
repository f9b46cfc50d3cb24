package safety

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// A register finds the machine that an instance belongs to.
type register struct {
	byUID        map[types.UID]*v1alpha1.Machine
	byProviderID map[string]*v1alpha1.Machine
	unmade       map[string]*v1alpha1.Machine // by name: machines without a providerID
	byClass      map[types.NamespacedName][]*v1alpha1.Machine
}

func newRegister(machines []v1alpha1.Machine) *register {
	r := &register{
		byUID: map[types.UID]*v1alpha1.Machine{}, byProviderID: map[string]*v1alpha1.Machine{},
		unmade: map[string]*v1alpha1.Machine{}, byClass: map[types.NamespacedName][]*v1alpha1.Machine{},
	}
	for i := range machines {
		m := &machines[i]
		r.byUID[m.UID] = m
		class := types.NamespacedName{Namespace: m.Namespace, Name: m.Spec.Class.Name}
		r.byClass[class] = append(r.byClass[class], m)
		if id := m.Spec.ProviderID; id != "" {
			r.byProviderID[id] = m
		} else {
			r.unmade[m.Name] = m
		}
	}

	return r
}

// A belonging is how an instance belongs to a machine.
type belonging int

const (
	orphan    belonging = iota // to none
	owned                      // it is the machine's, or may become it
	duplicate                  // it was made for a machine that has another one
)

// belongs tells to which machine an instance belongs.
func (r *register) belongs(i *dispatch.Listed) (*v1alpha1.Machine, belonging) {
	if m, ok := r.byProviderID[i.ProviderID]; ok {
		return m, owned
	}
	if m, ok := r.byUID[i.MachineUID]; ok && i.MachineUID != "" {
		if m.Spec.ProviderID == "" {
			return m, owned // its create has not ended yet
		}

		return m, duplicate
	}
	if m, ok := r.unmade[i.MachineName]; ok && i.MachineUID == "" {
		// A driver that knows instances by name may still find it. One with another uid is
		// an earlier machine's of this name: no create ever returns it [CREATE-2].
		return m, owned
	}

	return nil, orphan
}

// nodes returns the names of all machines, and those of their Nodes.
func (r *register) nodes() (machines, nodes map[string]bool) {
	machines, nodes = map[string]bool{}, map[string]bool{}
	for _, m := range r.byUID {
		machines[m.Name] = true
		if node := m.Labels[v1alpha1.LabelKeyNode]; node != "" {
			nodes[node] = true
		}
	}

	return machines, nodes
}

// missing counts the instances that a class's machines have, and how many of
// them are not in a list of the class. Those that are on their way out may be
// gone.
func (r *register) missing(class types.NamespacedName, list []dispatch.Listed) (missing, known int) {
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
