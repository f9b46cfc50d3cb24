package e2e

import (
	"context"
	"errors"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestFreeze gives a pool's set more machines than it may have, as a manager gone
// wrong would, and looks on while mcm freezes, deletes and goes on. It runs above
// another machine controller, played here: machines are few enough only when that
// lets them go.
func TestFreeze(t *testing.T) {
	e := newEnv(t)
	e.startManager("", "--controllers=*,-machine", "--machine-safety-overshooting-period=1s")
	other := &otherController{env: e}
	d := e.newPoolObject()
	d.Spec.Replicas = 2
	e.must(e.kube.Create(e.ctx(), d))
	other.runUntil("the pool has its machines", func(ctx context.Context) error { return e.poolHas(ctx, d, 2) })
	set := e.onlySet()

	// The deployment's replicas, its surge of 1, and 2 for safety.
	for range 3 {
		m := &v1alpha1.Machine{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: e.name, GenerateName: "stray-", Labels: set.Spec.Template.Labels, Finalizers: []string{v1alpha1.FinalizerName},
				OwnerReferences: []metav1.OwnerReference{
					*metav1.NewControllerRef(set, v1alpha1.SchemeGroupVersion.WithKind(v1alpha1.KindMachineSet)),
				},
			},
			Spec: set.Spec.Template.Spec,
		}
		e.must(e.kube.Create(e.ctx(), m))
	}
	e.eventually("set and pool are frozen", func(ctx context.Context) error { return e.frozenIs(ctx, d, set, true) })
	e.waitEventOf(v1alpha1.KindMachineSet, set.Name, corev1.EventTypeWarning, "no more are made until")

	// Nothing lets machines go now, so there are still too many.
	e.must(e.kube.Get(e.ctx(), client.ObjectKeyFromObject(d), d))
	before := d.DeepCopy()
	metav1.SetMetaDataAnnotation(&d.ObjectMeta, v1alpha1.AnnotationKeyUnfreeze, "true")
	e.must(e.kube.Patch(e.ctx(), d, client.MergeFrom(before)))
	e.waitEventOf(v1alpha1.KindMachineSet, set.Name, corev1.EventTypeNormal, "Machines are made again")
	e.eventually("they are frozen again, and the request is answered", func(ctx context.Context) error {
		err := e.frozenIs(ctx, d, set, true)
		if _, asked := d.Annotations[v1alpha1.AnnotationKeyUnfreeze]; asked {
			err = errors.Join(err, errors.New("the annotation is there"))
		}
		return err
	})

	other.runUntil("the surplus is gone, and with it the freeze", func(ctx context.Context) error {
		return errors.Join(e.poolHas(ctx, d, 2), e.frozenIs(ctx, d, set, false))
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

// frozenIs returns an error unless label and condition of a pool and its set say
// whether it is frozen. It reads both anew.
func (e *env) frozenIs(ctx context.Context, d *v1alpha1.MachineDeployment, set *v1alpha1.MachineSet, want bool) error {
	if err := errors.Join(
		e.kube.Get(ctx, client.ObjectKeyFromObject(d), d), e.kube.Get(ctx, client.ObjectKeyFromObject(set), set),
	); err != nil {
		return err
	}
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
