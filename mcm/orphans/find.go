package orphans

import (
	"fmt"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"

	"github.com/machinebus/machinebus/mcm/dispatch"
)

// Reasons of Events on the MachineClass that lists an instance, or on its Machine.
const (
	EventOrphanFound       = "OrphanFound"
	EventOrphanDeleted     = "OrphanDeleted"
	EventOrphanNotDeleted  = "OrphanNotDeleted"
	EventOrphansKept       = "OrphansKept"
	EventDuplicateInstance = "DuplicateInstance"
)

// A found is an orphan and its sighting.
type found struct {
	dispatch.Orphan
	sighting

	gone bool
	lost bool // its delete failed, and may have had its effect all the same
}

func (f *found) key() key { return key{f.Provider, f.ProviderID} }

// orphans returns the instances without a machine that may be deleted once their grace
// period is over. It remembers the sightings of all instances without a machine.
func (p *pass) orphans() []found {
	all, seen := []found{}, p.startOver()
	p.foreignNow = map[key]bool{}
	for k := range p.foreign {
		if !p.looksAt(k.provider) {
			p.foreignNow[k] = true
		}
	}
	for i := range p.lists {
		l := &p.lists[i]
		p.dropForeign(l)
		if l.doubtful = p.doubtList(l); l.doubtful {
			continue
		}
		ofClass, orphans := []found{}, 0
		for j := range l.instances {
			instance := &l.instances[j]
			if !p.isOrphan(l, instance) {
				continue
			}
			orphans++
			f := found{Orphan: dispatch.Orphan{
				Listed: *instance, Namespace: l.class.Object.Namespace, Provider: l.provider, Class: l.class,
			}}
			if first, twice := seen[f.key()]; twice {
				// Two classes may list the same instance, and only one of them be doubted.
				f.sighting = first
				ofClass = append(ofClass, f)

				continue
			}
			var known bool
			if f.sighting, known = p.seen[f.key()]; !known {
				f.since = p.now
				p.reportFound(l, instance)
			}
			seen[f.key()] = f.sighting
			p.Metrics.orphans.WithLabelValues(l.class.Object.Namespace, l.class.Object.Name).Inc()
			ofClass = append(ofClass, f)
		}
		if p.doubtMachines(l, orphans) {
			continue
		}
		for _, f := range ofClass {
			if !slices.ContainsFunc(all, func(other found) bool { return other.key() == f.key() }) {
				all = append(all, f)
			}
		}
	}
	p.seen, p.foreign = seen, p.foreignNow

	return all
}

// looksAt reports whether this pass lists all classes of a provider.
func (p *pass) looksAt(provider string) bool {
	return !slices.Contains(p.unlisted, provider) && (p.whole() || slices.Contains(p.providers, provider))
}

// startOver resets the metrics of the classes that this pass looks at. It returns the
// sightings of the other providers.
func (p *pass) startOver() map[key]sighting {
	seen := map[key]sighting{}
	if p.whole() {
		p.Metrics.orphans.Reset() // classes may be gone
		p.Metrics.duplicates.Reset()
		p.Metrics.foreign.Reset()

		return seen
	}
	for i := range p.classes {
		p.Metrics.orphans.DeleteLabelValues(p.classes[i].Namespace, p.classes[i].Name)
		p.Metrics.duplicates.DeleteLabelValues(p.classes[i].Namespace, p.classes[i].Name)
		p.Metrics.foreign.DeletePartialMatch(prometheus.Labels{"namespace": p.classes[i].Namespace, "class": p.classes[i].Name})
	}
	for k, s := range p.seen {
		if !slices.Contains(p.providers, k.provider) {
			seen[k] = s
		}
	}

	return seen
}

func (p *pass) isOrphan(l *listing, i *dispatch.Listed) bool {
	m, how := p.known.belongs(i)
	switch how {
	case owned:
		return false
	case duplicate:
		// A driver may delete by uid, which would hit the machine's own instance too.
		p.Metrics.duplicates.WithLabelValues(l.class.Object.Namespace, l.class.Object.Name).Inc()
		p.Events.Eventf(m, corev1.EventTypeWarning, EventDuplicateInstance,
			"Instance %s was also created for this machine, whose instance is %s: "+
				"it is deleted together with the machine, or you can delete it at the provider",
			i.ProviderID, m.Spec.ProviderID)

		return false
	default:
		_, inFlight := p.Dispatcher.State(i.MachineUID)

		return !inFlight
	}
}

// reportFound counts an instance that was not seen without a machine before, and records an
// Event.
func (p *pass) reportFound(l *listing, i *dispatch.Listed) {
	p.Metrics.found.WithLabelValues(l.provider).Inc()
	then := fmt.Sprintf("mcm deletes it if it is still without a machine in %s", p.Settings.Grace)
	if p.Settings.DryRun {
		then = "mcm does not delete it because of --machine-safety-orphan-vms-dry-run"
	}
	p.Events.Eventf(l.class.Object, corev1.EventTypeWarning, EventOrphanFound,
		"Instance %s, created for machine %s (uid %q), belongs to no machine: %s", i.ProviderID, i.MachineName, i.MachineUID, then)
}
