package orphans

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/machinebus/machinebus/mcm/dispatch"
)

// EventForeignInstances is the reason of Events on a MachineClass whose driver lists
// instances that belong to no machine and whose owner is not this control cluster.
const EventForeignInstances = "ForeignInstances"

// Why an instance is not ours; values of a metric's label.
const (
	noOwner    = "no_owner"
	otherOwner = "other_owner"
)

// ours reports whether an owner is this control cluster or one of Settings.AdoptOwners.
func (p *pass) ours(owner string) bool {
	if owner == "" {
		return slices.Contains(p.Settings.AdoptOwners, NoOwner)
	}

	return owner == p.Owner || slices.Contains(p.Settings.AdoptOwners, owner)
}

// dropForeign drops from a list the instances without a machine that have another owner.
// Nor do they count when doubtMachines compares.
func (p *pass) dropForeign(l *listing) {
	fresh := map[string]*dispatch.Listed{} // by reason: one that was not seen before
	var kept []dispatch.Listed
	for i := range l.instances {
		instance := &l.instances[i]
		if _, how := p.known.belongs(instance); how != orphan || p.ours(instance.Owner) {
			kept = append(kept, *instance)

			continue
		}
		reason := otherOwner
		if instance.Owner == "" {
			reason = noOwner
		}
		p.Metrics.foreign.WithLabelValues(l.class.Object.Namespace, l.class.Object.Name, reason).Inc()
		k := key{l.provider, instance.ProviderID}
		known := p.foreign[k]
		p.foreignNow[k] = true
		if known {
			continue
		}
		fresh[reason] = instance
		p.log.Info("instance without a machine is not deleted: its owner is not this control cluster", "provider_id", instance.ProviderID,
			"machine", instance.MachineName, "uid", instance.MachineUID, "owner", instance.Owner)
	}
	l.instances = kept
	for reason, instance := range fresh {
		p.Events.Event(l.class.Object, corev1.EventTypeWarning, EventForeignInstances, foreignText(reason, instance))
	}
}

// foreignText returns the Event's text: which instances stay, with an example, and the remedy.
func foreignText(reason string, i *dispatch.Listed) string {
	if reason == noOwner {
		return fmt.Sprintf("mcm never deletes instances without a machine and without an owner, such as %s: if this control plane "+
			"created them before drivers recorded owners, start mcm with --adopt-owner=%s", i.ProviderID, NoOwner)
	}

	return fmt.Sprintf("mcm never deletes instances without a machine that have another owner, such as %s of owner %s: "+
		"if another control plane has the same name, give each its own --cluster-name; "+
		"if this control plane replaces that owner, start mcm with --adopt-owner=%s", i.ProviderID, i.Owner, i.Owner)
}
