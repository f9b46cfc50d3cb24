package orphans

import (
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// few instances of a class may be without a machine without any doubt about the Machines.
const few = 2

// doubtList reports whether so many instances are missing from a list that it cannot be
// right.
func (p *pass) doubtList(l *listing) bool {
	class := l.class.Object
	missing, known := p.known.missing(client.ObjectKeyFromObject(class), l.instances)
	if 2*(known-missing) >= known {
		return false
	}
	p.Metrics.passes.WithLabelValues(string(doubtful)).Inc()
	p.Events.Eventf(class, corev1.EventTypeWarning, EventOrphansKept,
		"The driver of provider %s lists only %d of the %d instances that machines of this class have: "+
			"mcm deletes no instance of the class until the list is complete", l.provider, known-missing, known)

	return true
}

// doubtMachines reports whether the Machines of a class may be lost: most of the listed
// instances are without a machine, or the class has no Machine at all.
func (p *pass) doubtMachines(l *listing, orphans int) bool {
	class := l.class.Object
	empty := len(p.known.byClass[client.ObjectKeyFromObject(class)]) == 0
	many := orphans > few && 2*orphans > len(l.instances)
	if orphans == 0 || !empty && !many || class.Annotations[v1alpha1.AnnotationKeyCollectOrphans] == v1alpha1.AnnotationValueTrue {
		return false
	}
	p.Metrics.passes.WithLabelValues(string(doubtful)).Inc()
	why := "if the Machines are lost, restore them"
	if empty {
		why = "this class has no Machine at all; if the Machines are lost, restore them"
	}
	p.Events.Eventf(class, corev1.EventTypeWarning, EventOrphansKept,
		"%d of the %d instances that the driver of provider %s lists belong to no machine: %s; "+
			"if the instances may be deleted, annotate this class with %s=%s until they are",
		orphans, len(l.instances), l.provider, why, v1alpha1.AnnotationKeyCollectOrphans, v1alpha1.AnnotationValueTrue)

	return true
}

// reportKept records on every class an Event that nothing is deleted.
func (p *pass) reportKept(why error) {
	for i := range p.classes {
		p.Events.Eventf(&p.classes[i], corev1.EventTypeWarning, EventOrphansKept,
			"mcm deletes no instances without a machine for now: %s", why.Error())
	}
}
