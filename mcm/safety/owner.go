package safety

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

// ours reports whether an owner is this control cluster, or one whose instances it has
// adopted.
func (p *pass) ours(owner string) bool {
	if owner == "" {
		return slices.Contains(p.Settings.AdoptOwners, NoOwner)
	}

	return owner == p.Owner || slices.Contains(p.Settings.AdoptOwners, owner)
}

// leaveForeign drops from a list the instances that belong to no machine and are not
// ours: they prove nothing about our Machines either.
func (p *pass) leaveForeign(l *listing) {
	fresh := map[string]*dispatch.Listed{} // one of each reason that is news
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
		p.strange[k] = true
		if known {
			continue
		}
		fresh[reason] = instance
		p.log.Info("instance is left alone: its owner is not this control cluster", "provider_id", instance.ProviderID,
			"machine", instance.MachineName, "uid", instance.MachineUID, "owner", instance.Owner)
	}
	l.instances = kept
	for reason, instance := range fresh {
		p.Events.Event(l.class.Object, corev1.EventTypeWarning, EventForeignInstances, foreignText(reason, instance))
	}
}

// foreignText says what instances are left alone, of which one is given, and what to do.
func foreignText(reason string, i *dispatch.Listed) string {
	if reason == noOwner {
		return fmt.Sprintf("Instances without a machine and without an owner, such as %s, are never deleted: if this control plane made them "+
			"before drivers recorded owners, start mcm with --adopt-owner=%s", i.ProviderID, NoOwner)
	}

	return fmt.Sprintf("Instances without a machine and of another owner, such as %s of %s, are never deleted: if another control plane "+
		"has this one's name, give each its own --cluster-name; if this one was restored from there, start mcm with --adopt-owner=%s",
		i.ProviderID, i.Owner, i.Owner)
}
