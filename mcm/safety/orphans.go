package safety

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
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

// few is how many instances of a class may be without a machine before it matters
// how many have one.
const few = 2

// A found is an orphan and what is remembered of it.
type found struct {
	dispatch.Orphan
	sighting

	gone bool
}

func (f *found) key() key { return key{f.Provider, f.ProviderID} }

// orphans returns the instances without a machine that may be deleted one day, and
// remembers these and all others.
func (p *pass) orphans() []found {
	all, seen := []found{}, p.startOver()
	p.strange = map[key]bool{}
	for k := range p.foreign {
		if !p.looksAt(k.provider) {
			p.strange[k] = true
		}
	}
	for i := range p.lists {
		l := &p.lists[i]
		p.leaveForeign(l)
		if p.doubtList(l) {
			continue
		}
		mine, nobodys := []found{}, 0
		for j := range l.instances {
			instance := &l.instances[j]
			if !p.isOrphan(l, instance) {
				continue
			}
			nobodys++
			f := found{Orphan: dispatch.Orphan{
				Listed: *instance, Namespace: l.class.Object.Namespace, Provider: l.provider, Class: l.class,
			}}
			if first, twice := seen[f.key()]; twice {
				// Two classes may list the same, and one of them be doubted.
				f.sighting = first
				mine = append(mine, f)

				continue
			}
			var known bool
			if f.sighting, known = p.seen[f.key()]; !known {
				f.since = p.now
				p.tell(l, instance)
			}
			seen[f.key()] = f.sighting
			p.Metrics.orphans.WithLabelValues(l.class.Object.Namespace, l.class.Object.Name).Inc()
			mine = append(mine, f)
		}
		if p.doubtMachines(l, nobodys) {
			continue
		}
		for _, f := range mine {
			if !slices.ContainsFunc(all, func(other found) bool { return other.key() == f.key() }) {
				all = append(all, f)
			}
		}
	}
	p.seen, p.foreign = seen, p.strange

	return all
}

// looksAt reports whether all that a provider's drivers have is listed at this look.
func (p *pass) looksAt(provider string) bool {
	return !slices.Contains(p.unlisted, provider) && (p.whole() || slices.Contains(p.providers, provider))
}

// startOver forgets what the metrics show of the classes that are looked at, and
// returns what is remembered of the providers that are not.
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
			"Instance %s was made for this machine too, whose own is %s: it goes with the machine, or delete it at the provider",
			i.ProviderID, m.Spec.ProviderID)

		return false
	default:
		_, inFlight := p.Dispatcher.State(i.MachineUID)

		return !inFlight
	}
}

func (p *pass) tell(l *listing, i *dispatch.Listed) {
	p.Metrics.found.WithLabelValues(l.provider).Inc()
	then := fmt.Sprintf("it will be deleted if it is still without one in %s", p.Settings.Grace)
	if p.Settings.DryRun {
		then = "it is left alone because orphan collection is a dry run"
	}
	p.Events.Eventf(l.class.Object, corev1.EventTypeWarning, EventOrphanFound,
		"Instance %s, made for machine %s (uid %q), belongs to no machine: %s", i.ProviderID, i.MachineName, i.MachineUID, then)
}

// doubtList tells whether a list lacks so much that nothing it says can be
// trusted.
func (p *pass) doubtList(l *listing) bool {
	class := l.class.Object
	missing, known := p.known.missing(client.ObjectKeyFromObject(class), l.instances)
	if 2*(known-missing) >= known {
		return false
	}
	p.Metrics.passes.WithLabelValues(string(doubtful)).Inc()
	p.Events.Eventf(class, corev1.EventTypeWarning, EventOrphansKept,
		"The driver of provider %s lists only %d of the %d instances that machines of this class have: "+
			"no instance of it is deleted until its list is right", l.provider, known-missing, known)

	return true
}

// doubtMachines reports whether the Machines of a class may be lost: so many of the
// instances that its driver lists are without one, or there are instances and no Machine
// at all.
func (p *pass) doubtMachines(l *listing, nobodys int) bool {
	class := l.class.Object
	empty := len(p.known.byClass[client.ObjectKeyFromObject(class)]) == 0
	many := nobodys > few && 2*nobodys > len(l.instances)
	if nobodys == 0 || !empty && !many || class.Annotations[v1alpha1.AnnotationKeyCollectOrphans] == v1alpha1.AnnotationValueTrue {
		return false
	}
	p.Metrics.passes.WithLabelValues(string(doubtful)).Inc()
	why := "if the Machines are lost, restore them"
	if empty {
		why = "this class has no Machine at all, as after the loss of all; if they are lost, restore them"
	}
	p.Events.Eventf(class, corev1.EventTypeWarning, EventOrphansKept,
		"%d of the %d instances that the driver of provider %s lists belong to no machine: %s; "+
			"if the instances may be deleted, annotate this class with %s=%s until they are",
		nobodys, len(l.instances), l.provider, why, v1alpha1.AnnotationKeyCollectOrphans, v1alpha1.AnnotationValueTrue)

	return true
}

// doubt tells every class that nothing is deleted.
func (p *pass) doubt(why error) {
	for i := range p.classes {
		p.Events.Eventf(&p.classes[i], corev1.EventTypeWarning, EventOrphansKept,
			"No instance without a machine is deleted for now: %s", why.Error())
	}
}

// due returns the orphans that have been so for long enough, as many of each
// provider as may go at once: first those whose delete has not failed or has failed
// longest ago, so that none keeps others from their turn, and of these the longest
// known.
func (p *pass) due(orphans []found) []found {
	due := slices.DeleteFunc(orphans, func(f found) bool { return p.now.Sub(f.since) < p.Settings.Grace })
	slices.SortFunc(due, func(a, b found) int {
		return cmp.Or(a.failed.Compare(b.failed), a.since.Compare(b.since), cmp.Compare(a.ProviderID, b.ProviderID))
	})
	of := map[string]int{}
	due = slices.DeleteFunc(due, func(f found) bool {
		of[f.Provider]++

		return of[f.Provider] > p.Settings.MaxPerPass
	})
	for provider, n := range of {
		if n > p.Settings.MaxPerPass {
			p.log.Info("more instances without a machine than may be deleted at once", "provider", provider, "due", n, "max", p.Settings.MaxPerPass)
		}
	}

	return due
}

// remove has orphans deleted, waits for it, and remembers those that are still there.
func (p *pass) remove(ctx context.Context, due []found) {
	var group sync.WaitGroup
	for i := range due {
		group.Go(func() { due[i].gone = p.removeOne(ctx, &due[i].Orphan) })
	}
	group.Wait()
	for i := range due {
		if f := &due[i]; !f.gone && !p.Settings.DryRun {
			p.seen[f.key()] = sighting{since: f.since, failed: p.now}
		}
	}
}

func (p *pass) removeOne(ctx context.Context, o *dispatch.Orphan) (gone bool) {
	log := p.log.WithValues("provider_id", o.ProviderID, "machine", o.MachineName, "uid", o.MachineUID,
		"class", client.ObjectKeyFromObject(o.Class.Object))
	if p.Settings.DryRun {
		log.Info("dry run: instance without a machine would be deleted")

		return false
	}
	// A provider without room must not keep the others' from being looked after.
	bounded, cancel := context.WithTimeout(ctx, 2*p.Settings.DeleteTimeout)
	defer cancel()
	err := p.Dispatcher.Remove(bounded, o, p.Settings.DeleteTimeout, func(ctx context.Context) error {
		return p.stillOrphan(ctx, o)
	})
	if ctx.Err() != nil {
		return false
	}
	if errors.Is(err, errKept) {
		log.Info("instance is left alone", "err", err.Error())

		return false
	}
	code := dispatch.CodeOf(err)
	p.Metrics.deletions.WithLabelValues(o.Provider, code.String()).Inc()
	if code != dispatch.OK && code != dispatch.NotFound {
		p.Events.Eventf(o.Class.Object, corev1.EventTypeWarning, EventOrphanNotDeleted,
			"Instance %s, which belongs to no machine, could not be deleted, will try again in %s: %s",
			o.ProviderID, p.Settings.Period, err.Error())
		log.Info("instance without a machine not deleted", "code", code.String(), "err", err.Error())

		return false
	}
	p.Events.Eventf(o.Class.Object, corev1.EventTypeNormal, EventOrphanDeleted,
		"Deleted instance %s, made for machine %s, which belonged to no machine", o.ProviderID, o.MachineName)
	log.Info("instance without a machine deleted")
	if code == dispatch.OK {
		if err := p.removeNode(ctx, o.ProviderID); err != nil {
			log.Error(err, "the node of the instance is left")
		}
	}
	if err := p.removeToken(ctx, o); err != nil {
		log.Error(err, "the bootstrap token of the machine is left until it expires")
	}

	return true
}

// errKept is wrapped by the reasons not to delete an instance after all.
var errKept = errors.New("kept")

// stillOrphan looks a last time: a machine of the name may have come since.
func (p *pass) stillOrphan(ctx context.Context, o *dispatch.Orphan) error {
	if err := p.bar(); err != nil {
		return fmt.Errorf("%w: %w", errKept, err)
	}
	if _, inFlight := p.Dispatcher.State(o.MachineUID); inFlight {
		return fmt.Errorf("%w: an operation of machine uid %s is in flight", errKept, o.MachineUID)
	}
	m := &v1alpha1.Machine{}
	err := p.Reader.Get(ctx, client.ObjectKey{Namespace: o.Namespace, Name: o.MachineName}, m)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: read machine %s/%s: %w", errKept, o.Namespace, o.MachineName, err)
	}
	if _, how := newRegister([]v1alpha1.Machine{*m}).belongs(&o.Listed); how != orphan {
		return fmt.Errorf("%w: it belongs to machine %s/%s by now", errKept, m.Namespace, m.Name)
	}

	return nil
}
