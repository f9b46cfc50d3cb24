package machine

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// preservation keeps a machine and its Node for a time.
type preservation struct {
	*object
	node    *machineNode
	target  client.Client // nil without a target cluster
	drainer Drainer       // nil if Nodes are not drained
}

// preserveMachine keeps a machine, Failed or not, for inspection, as long as that is
// wanted and its time lasts. The next pass finds what is left to do in the machine and
// its Node alone: the time is set first and cleared last.
func (p *preservation) preserveMachine(ctx context.Context) (steps.Next, error) {
	if err := p.readWish(ctx); err != nil {
		return steps.Wait, err
	}
	until := p.machine.Status.CurrentStatus.PreserveExpiryTime
	switch {
	case until != nil && !until.After(p.now):
		return steps.Proceed, p.endPreservation(ctx, "its time is over", true)
	case p.wantsPreservation(until != nil):
		p.beginPreservation()
		if err := p.patchStatus(ctx); err != nil {
			return steps.Wait, err
		}
		if until = p.machine.Status.CurrentStatus.PreserveExpiryTime; until == nil {
			p.warnNotPreserved()

			return steps.Proceed, nil
		}
		p.LookAgain(until.Sub(p.now))

		return steps.Proceed, p.preserveNode(ctx, until.Time)
	case p.wish == v1alpha1.PreserveAuto:
		// Its set decides whether it is preserved when it fails again.
		return steps.Proceed, p.endPreservation(ctx, "the machine has recovered", true)
	case p.wish == v1alpha1.PreserveWhenFailed:
		return steps.Proceed, p.endPreservation(ctx, "the machine has recovered", false)
	default:
		return steps.Proceed, p.endPreservation(ctx, "it is not wanted any more", false)
	}
}

// wantsPreservation reports whether the machine is to be preserved as things stand. An unknown
// value changes nothing.
func (o *object) wantsPreservation(preserved bool) bool {
	switch o.wish {
	case v1alpha1.PreserveNow:
		return true
	case v1alpha1.PreserveWhenFailed, v1alpha1.PreserveAuto:
		return o.machine.Status.CurrentStatus.Phase == v1alpha1.MachineFailed
	case v1alpha1.PreserveNever, "":
		return false
	default:
		return preserved
	}
}

// warnNotPreserved warns that CRDs older than preservation have dropped the machine's
// time.
func (p *preservation) warnNotPreserved() {
	text := "It is not preserved: the CRD of Machines knows no status.currentStatus.preserveExpiryTime: apply this version's CRDs"
	if p.isNews(aboutPreserve, text) {
		p.warnf("CannotPreserve", "%s", text)
	}
}

// beginPreservation gives the machine its time if it is to be preserved and has
// none.
func (o *object) beginPreservation() {
	current := &o.machine.Status.CurrentStatus
	if current.PreserveExpiryTime != nil || !o.wantsPreservation(false) {
		return
	}
	timeout := o.settings.PreserveTimeout
	if own := o.machine.Spec.MachinePreserveTimeout; own != nil {
		timeout = own.Duration
	}
	until := metav1.NewTime(o.now.Add(timeout)).Rfc3339Copy() // as it is stored
	current.PreserveExpiryTime = &until
	wish := o.wish
	o.notes = append(o.notes, func() {
		if o.machine.Status.CurrentStatus.PreserveExpiryTime != nil { // or the CRDs have dropped it
			o.sayf("Preserved", "Kept until %s, as %s says %q", until.UTC().Format(time.RFC3339), v1alpha1.AnnotationKeyPreserve, wish)
		}
	})
}

// endPreservation undoes preserveNode and releases the machine. Forget also removes the
// wish, so that it counts only once.
func (p *preservation) endPreservation(ctx context.Context, why string, forget bool) error {
	current := &p.machine.Status.CurrentStatus
	was := current.PreserveExpiryTime
	if p.drainer != nil {
		p.drainer.Forget(p.machine.UID)
	}
	if released, err := p.releaseNode(ctx, forget); !released || err != nil {
		return err
	}
	if forget {
		p.wish = "" // also for what follows in this pass
		delete(p.machine.Annotations, v1alpha1.AnnotationKeyPreserve)
		delete(p.machine.Annotations, v1alpha1.AnnotationKeyLastAppliedNodePreserveValue)
		if err := p.patch(ctx); err != nil {
			return err
		}
	}
	if was == nil || p.awaitsReplacement() {
		return nil
	}
	current.PreserveExpiryTime = nil
	p.sayAfterWritef("PreservationEnded", "Not kept any longer: %s", why)

	return p.patchStatus(ctx)
}

// awaitsReplacement reports whether the machine's set is about to delete it. The expired
// time is the signal for that; without it the set might preserve the machine once more.
func (p *preservation) awaitsReplacement() bool {
	current, owner := p.machine.Status.CurrentStatus, metav1.GetControllerOfNoCopy(p.machine)

	return current.Phase == v1alpha1.MachineFailed && !current.PreserveExpiryTime.After(p.now) &&
		owner != nil && owner.Kind == v1alpha1.KindMachineSet
}

// readWish finds out whether the machine is to be preserved. Its Node's annotation wins,
// also when it was removed. It is noted on the machine, for the machine's set and for
// the time when the Node is gone.
func (p *preservation) readWish(ctx context.Context) error {
	m := p.machine
	if p.target != nil && m.Labels[v1alpha1.LabelKeyNode] != "" {
		if err := p.node.lookupNode(ctx); err != nil {
			return err
		}
	}
	applied := m.Annotations[v1alpha1.AnnotationKeyLastAppliedNodePreserveValue]
	byNode := applied != ""
	if p.node.found != nil {
		var says bool
		applied, says = p.node.found.Annotations[v1alpha1.AnnotationKeyPreserve]
		byNode = byNode || says
	}
	p.wish = m.Annotations[v1alpha1.AnnotationKeyPreserve]
	_, own := m.Annotations[v1alpha1.AnnotationKeyPreserve]
	switch {
	case p.node.found == nil && own:
		applied = "" // it was set on the machine after the Node was gone
	case byNode:
		p.wish = applied
		delete(m.Annotations, v1alpha1.AnnotationKeyPreserve)
	}
	if applied == "" {
		delete(m.Annotations, v1alpha1.AnnotationKeyLastAppliedNodePreserveValue)
	} else {
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.AnnotationKeyLastAppliedNodePreserveValue, applied)
	}
	p.warnInvalidWish()
	if equality.Semantic.DeepEqual(m.Annotations, p.stored.Annotations) {
		return nil // as of most machines
	}

	return p.patch(ctx)
}

// warnInvalidWish says once that the wish is unknown.
func (p *preservation) warnInvalidWish() {
	text := ""
	switch p.wish {
	case "", v1alpha1.PreserveNow, v1alpha1.PreserveWhenFailed, v1alpha1.PreserveAuto, v1alpha1.PreserveNever:
	default:
		text = fmt.Sprintf("annotation %s is %q, which is ignored: want %s, %s or %s", v1alpha1.AnnotationKeyPreserve, p.wish,
			v1alpha1.PreserveNow, v1alpha1.PreserveWhenFailed, v1alpha1.PreserveNever)
	}
	if p.isNews(aboutWish, text) {
		p.warnf("InvalidField", "%s", text)
	}
}

// preservationChanged reports whether something has changed that preserve looks at.
func preservationChanged(before, after client.Object) bool {
	b, ok := before.(*v1alpha1.Machine)
	a, okToo := after.(*v1alpha1.Machine)
	if !ok || !okToo {
		return false
	}
	wish, applied := v1alpha1.AnnotationKeyPreserve, v1alpha1.AnnotationKeyLastAppliedNodePreserveValue
	cares := a.Annotations[wish] != "" || a.Annotations[applied] != "" || a.Status.CurrentStatus.PreserveExpiryTime != nil

	return a.Annotations[wish] != b.Annotations[wish] || a.Annotations[applied] != b.Annotations[applied] ||
		!a.Status.CurrentStatus.PreserveExpiryTime.Equal(b.Status.CurrentStatus.PreserveExpiryTime) ||
		cares && a.Status.CurrentStatus.Phase != b.Status.CurrentStatus.Phase
}
