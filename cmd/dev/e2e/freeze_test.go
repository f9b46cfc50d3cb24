package e2e

import (
	"context"
	"errors"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestFreeze gives a pool's set more machines than it may have, as a manager gone
// wrong would, and looks on while mcm freezes, deletes and goes on. It runs above
// another machine controller, played here.
func TestFreeze(t *testing.T) {
	e := newEnv(t)
	e.startManager("", "--controllers=*,-machine", "--machine-safety-overshooting-period=1s")
	other := &otherController{env: e}
	d := e.newPoolObject()
	d.Spec.Replicas = 2
	e.must(e.kube.Create(e.ctx(), d))
	other.runUntil("the pool has its machines", func(ctx context.Context) error { return e.poolHas(ctx, d, 2) })
	e.overshoot(d)
	e.askToThaw(d)
	e.letStraysGo()
	other.runUntil("the surplus is gone, and with it the freeze", func(ctx context.Context) error {
		return errors.Join(e.poolHas(ctx, d, 2), e.frozenIs(ctx, d, false))
	})
	e.must(e.kube.Patch(e.ctx(), d, client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"replicas":4}}`))))
	other.runUntil("the pool grows again", func(ctx context.Context) error { return e.poolHas(ctx, d, 4) })
	e.must(e.kube.Delete(e.ctx(), d))
	other.runUntil("nothing is left", func(ctx context.Context) error {
		names, err := e.machineNames(ctx)
		if err == nil && len(names) > 0 {
			err = fmt.Errorf("machines %q", names)
		}
		return err
	})
}

// TestFreeze_Mishaps has instances of the surplus come and go in a cloud, and loses
// a driver replica and the leading manager while the pool is frozen.
func TestFreeze_Mishaps(t *testing.T) {
	e := newEnv(t)
	// A machine that goes while its create is lost waits for the end of that attempt.
	m, tap := e.startManagers("--machine-safety-overshooting-period=1s", "--machine-operation-timeout=6s")
	p := newPool(e, m.nats, tap)
	p.scale(2)
	p.settled(2, className)
	m.standBy()
	d, err := p.get(e.ctx())
	e.must(err)
	e.must(e.cloud.Hold(e.ctx(), "*"))
	e.overshoot(d)
	p.working(create)
	p.loseDriver()
	m.failOver()
	e.askToThaw(d) // which the new leader does
	e.must(e.cloud.Hold(e.ctx()))
	e.letStraysGo()
	p.settled(2, className) // its conditions show no freeze
	e.must(e.frozenIs(e.ctx(), d, false))

	// More replicas end a freeze, too, although the surplus is still there: machines are
	// made again, perhaps so many that with the surplus there are too many once more.
	e.must(e.cloud.Hold(e.ctx(), "*"))
	e.overshoot(d)
	e.eventually("all but the pool's own are on their way out", e.surplusGoes)
	p.scale(9)
	e.eventually("machines are made again", func(ctx context.Context) error {
		staying, _, err := e.staying(ctx)
		if staying <= 2 {
			err = errors.Join(err, errors.New("there are no more than the 2 from before"))
		}
		return err
	})
	p.working(create)
	m.failOver()
	e.must(e.cloud.Hold(e.ctx()))
	e.letStraysGo()
	p.settled(9, className)
	e.must(e.frozenIs(e.ctx(), d, false))
	p.delete()
	p.gone()
}

// overshoot makes machines of a pool of 2 behind its back, and goes on while those
// are deleted, until mcm freezes pool and set.
func (e *env) overshoot(d *v1alpha1.MachineDeployment) {
	e.Helper()
	// The deployment's replicas, its surge of 1, and 2 for safety.
	e.strays(3)
	e.eventually("the set makes no more", func(ctx context.Context) error {
		if e.onlySet().Labels[v1alpha1.LabelKeyFreeze] == v1alpha1.LabelValueTrue {
			return nil
		}
		err := e.surplusGoes(ctx)
		if err == nil {
			e.strays(1)
		}
		return errors.Join(err, errors.New("it is not frozen"))
	})
	e.eventually("set and pool are frozen", func(ctx context.Context) error { return e.frozenIs(ctx, d, true) })
	e.waitEventOf(v1alpha1.KindMachineSet, e.onlySet().Name, corev1.EventTypeWarning, "the set creates no more until")
}

// strayFinalizer keeps strays until the test lets them go, whatever becomes of their
// instances.
const strayFinalizer = "example.org/stray"

// letStraysGo takes their finalizer.
func (e *env) letStraysGo() {
	e.Helper()
	e.eventually("the strays may go", func(ctx context.Context) error {
		machines, err := e.machines(ctx)
		for _, m := range machines {
			stored := m.DeepCopy()
			if controllerutil.RemoveFinalizer(m, strayFinalizer) {
				patch := client.MergeFromWithOptions(stored, client.MergeFromWithOptimisticLock{})
				err = errors.Join(err, e.kube.Patch(ctx, m, patch)) // others take theirs
			}
		}
		return err
	})
}

// strays makes n machines of the only set.
func (e *env) strays(n int) {
	e.Helper()
	set := e.onlySet()
	for range n {
		e.must(e.kube.Create(e.ctx(), &v1alpha1.Machine{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: e.name, GenerateName: "stray-", Labels: set.Spec.Template.Labels, Finalizers: []string{v1alpha1.FinalizerName, strayFinalizer},
				OwnerReferences: []metav1.OwnerReference{
					*metav1.NewControllerRef(set, v1alpha1.SchemeGroupVersion.WithKind(v1alpha1.KindMachineSet)),
				},
			},
			Spec: set.Spec.Template.Spec,
		}))
	}
}

// surplusGoes returns an error until all machines but 2 are on their way out.
func (e *env) surplusGoes(ctx context.Context) error {
	staying, all, err := e.staying(ctx)
	if staying > 2 {
		err = errors.Join(err, fmt.Errorf("%d of %d machines stay", staying, all))
	}
	return err
}

// staying counts the machines that are not on their way out, and all.
func (e *env) staying(ctx context.Context) (staying, all int, err error) {
	machines, err := e.machines(ctx)
	for _, m := range machines {
		if m.DeletionTimestamp.IsZero() {
			staying++
		}
	}
	return staying, len(machines), err
}

// askToThaw ends the freeze of a pool whose surplus is still there, and has it frozen
// again by more of it.
func (e *env) askToThaw(d *v1alpha1.MachineDeployment) {
	e.Helper()
	e.eventually("the surplus is on its way out", e.surplusGoes)
	e.strays(3)
	e.must(e.kube.Get(e.ctx(), client.ObjectKeyFromObject(d), d))
	before := d.DeepCopy()
	metav1.SetMetaDataAnnotation(&d.ObjectMeta, v1alpha1.AnnotationKeyUnfreeze, "true")
	e.must(e.kube.Patch(e.ctx(), d, client.MergeFrom(before)))
	e.waitEventOf(v1alpha1.KindMachineSet, e.onlySet().Name, corev1.EventTypeNormal, "The set creates machines again")
	e.eventually("they are frozen again, and the request is answered", func(ctx context.Context) error {
		err := e.frozenIs(ctx, d, true)
		if _, asked := d.Annotations[v1alpha1.AnnotationKeyUnfreeze]; asked {
			err = errors.Join(err, errors.New("the annotation is there"))
		}
		return err
	})
}

// onlySet returns the one MachineSet that there is.
func (e *env) onlySet() *v1alpha1.MachineSet {
	e.Helper()
	var sets v1alpha1.MachineSetList
	e.must(e.kube.List(e.ctx(), &sets, client.InNamespace(e.name)))
	if len(sets.Items) != 1 {
		e.Fatalf("there are %d sets, want one", len(sets.Items))
	}
	return &sets.Items[0]
}

// frozenIs returns an error unless label and condition of a pool and its only set
// say whether it is frozen. It reads the pool again.
func (e *env) frozenIs(ctx context.Context, d *v1alpha1.MachineDeployment, want bool) error {
	if err := e.kube.Get(ctx, client.ObjectKeyFromObject(d), d); err != nil {
		return err
	}
	set := e.onlySet()
	labels := [2]bool{d.Labels[v1alpha1.LabelKeyFreeze] == v1alpha1.LabelValueTrue, set.Labels[v1alpha1.LabelKeyFreeze] == v1alpha1.LabelValueTrue}
	var conditions [2]bool
	for _, c := range d.Status.Conditions {
		conditions[0] = conditions[0] || c.Type == v1alpha1.MachineDeploymentFrozen && c.Status == corev1.ConditionTrue
	}
	for _, c := range set.Status.Conditions {
		conditions[1] = conditions[1] || c.Type == v1alpha1.MachineSetFrozen && c.Status == corev1.ConditionTrue
	}
	if all := [2]bool{want, want}; labels != all || conditions != all {
		return fmt.Errorf("pool and set have labels %v and conditions %v, want %v", labels, conditions, want)
	}
	return nil
}
