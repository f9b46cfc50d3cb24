package machineset

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// wishOf is what was asked for about the machine's preservation. What its Node says
// wins; the machine controller notes that on the machine.
func wishOf(m *v1alpha1.Machine) string {
	return cmp.Or(m.Annotations[v1alpha1.AnnotationKeyLastAppliedNodePreserveValue], m.Annotations[v1alpha1.AnnotationKeyPreserve])
}

// byChoice reports whether it was the set that wished for the machine's preservation.
// A Node's annotation is a user's wish, whatever the value: the set can neither write nor
// remove it.
func byChoice(m *v1alpha1.Machine) bool {
	return m.Annotations[v1alpha1.AnnotationKeyPreserve] == v1alpha1.PreserveAuto &&
		m.Annotations[v1alpha1.AnnotationKeyLastAppliedNodePreserveValue] == ""
}

// autoPreserved returns the Failed machines that the set preserves by its own
// choice. One whose time is over is on its way out.
func autoPreserved(set *v1alpha1.MachineSet, machines []*v1alpha1.Machine, now time.Time) []*v1alpha1.Machine {
	return failedOnes(set, machines, func(m *v1alpha1.Machine) bool { return byChoice(m) && kept(m, now) })
}

// choosePreserved says which Failed machines the set is to preserve from now on, as
// there is room for them, and which no longer, as there are too many. Of each the
// newest are kept.
func choosePreserved(set *v1alpha1.MachineSet, machines []*v1alpha1.Machine, now time.Time) (keep, letGo []*v1alpha1.Machine) {
	most := 0
	if limit := set.Spec.AutoPreserveFailedMachineMax; limit != nil {
		most = max(0, int(*limit))
	}
	already := autoPreserved(set, machines, now)
	if len(already) >= most {
		return nil, already[most:]
	}
	free := failedOnes(set, machines, func(m *v1alpha1.Machine) bool {
		// One that has a time has been preserved already.
		return wishOf(m) == "" && m.Status.CurrentStatus.PreserveExpiryTime == nil
	})

	return free[:min(most-len(already), len(free))], nil
}

// failedOnes returns the Failed machines for which ok holds, the newest first. Those
// that the autoscaler chose to delete are none of them.
func failedOnes(set *v1alpha1.MachineSet, machines []*v1alpha1.Machine, ok func(*v1alpha1.Machine) bool) []*v1alpha1.Machine {
	var found []*v1alpha1.Machine
	for _, m := range machines {
		if m.Status.CurrentStatus.Phase == v1alpha1.MachineFailed && !leaving(m) && !chosen(set, m) && ok(m) {
			found = append(found, m)
		}
	}
	slices.SortFunc(found, func(a, b *v1alpha1.Machine) int {
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	})

	return found
}

// preserve marks the Failed machines that the set preserves for the machine controller. It
// must only be called with what was read from the API server.
func (p *pass) preserve(ctx context.Context) {
	keep, letGo := choosePreserved(p.set, p.machines, p.now)
	p.annotate(ctx, keep, "Preserves failed machine %s", func(m *v1alpha1.Machine) {
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.AnnotationKeyPreserve, v1alpha1.PreserveAuto)
	})
	p.annotate(ctx, letGo, "No longer preserves failed machine %s", func(m *v1alpha1.Machine) {
		delete(m.Annotations, v1alpha1.AnnotationKeyPreserve)
	})
}

// annotate changes machines, if no other writer has changed them: a user may have decided
// about one.
func (p *pass) annotate(ctx context.Context, machines []*v1alpha1.Machine, format string, change func(*v1alpha1.Machine)) {
	var mu sync.Mutex
	changed := map[*v1alpha1.Machine]*v1alpha1.Machine{}
	errs := inParallel(len(machines), func(i int) error {
		m := machines[i].DeepCopy()
		change(m)
		err := p.Client.Patch(ctx, m, client.MergeFromWithOptions(machines[i], client.MergeFromWithOptimisticLock{}))
		if err != nil {
			return fmt.Errorf("store annotation %s of machine %s: %w", v1alpha1.AnnotationKeyPreserve, m.Name, err)
		}
		p.Events.Eventf(p.set, corev1.EventTypeNormal, v1alpha1.EventAutoPreserve, format, m.Name)
		mu.Lock()
		defer mu.Unlock()
		changed[machines[i]] = m

		return nil
	})
	for i, m := range p.machines {
		if now, ok := changed[m]; ok {
			p.machines[i] = now
		}
	}
	for _, err := range errs {
		if steps.Outdated(err) {
			p.log.V(1).Info("machine has changed, looking again", "err", err.Error())
			p.LookAgain(steps.ConflictRetry)

			continue
		}
		p.errs = append(p.errs, err)
	}
}
