package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/bootstrap"
)

const (
	createLatency = 300 * time.Millisecond
	deleteLatency = 200 * time.Millisecond
	bootDelay     = 200 * time.Millisecond

	mostReplicas = 5
	// loadLane is the lane of the random numbers that decide about the pools.
	loadLane = 1
	// revisionLabel is what a rollout changes.
	revisionLabel = "revision"
)

// createPools creates a class, its secret and a MachineDeployment with the same name for
// each identity.
func (w *world) createPools(ctx context.Context) error {
	for _, identity := range identities {
		if err := w.createClass(ctx, w.kube, identity); err != nil {
			return err
		}
		if err := w.kube.Create(ctx, w.pool(identity)); err != nil {
			return err
		}
	}
	return nil
}

// createClass creates the class of an identity and its secret.
func (w *world) createClass(ctx context.Context, kube client.Client, identity string) error {
	if err := kube.Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: objectName(identity), Namespace: w.name},
		StringData: map[string]string{
			"userData": "#cloud-config\nhostname: <<MACHINE_NAME>>\ntoken: " + bootstrap.Placeholder + "\n",
			"apiToken": w.cloud.APIToken,
		},
	}); err != nil {
		return err
	}
	class, err := w.class(identity)
	if err != nil {
		return err
	}
	return kube.Create(ctx, class)
}

// objectName returns an identity as a valid Kubernetes name.
func objectName(identity string) string {
	return strings.ReplaceAll(identity, "_", "-")
}

// class returns the class of deploy/examples for one provider.
func (w *world) class(identity string) (*v1alpha1.MachineClass, error) {
	objects, err := stack.LoadYAML(w.examples + "/machineclass.yaml")
	if err != nil {
		return nil, err
	}
	class := &v1alpha1.MachineClass{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(objects[0].Object, class); err != nil {
		return nil, err
	}
	class.ObjectMeta = metav1.ObjectMeta{
		Name: objectName(identity), Namespace: w.name,
		// Orphans must be collected even at the end, when there are no Machines.
		Annotations: map[string]string{v1alpha1.AnnotationKeyCollectOrphans: v1alpha1.AnnotationValueTrue},
	}
	class.Provider = identity
	class.SecretRef = &corev1.SecretReference{Name: objectName(identity), Namespace: w.name}
	var spec map[string]any
	if err := json.Unmarshal(class.ProviderSpec.Raw, &spec); err != nil {
		return nil, err
	}
	maps.Copy(spec, map[string]any{"endpoint": "http://" + w.cloudLinks[identity].link.Address()})
	class.ProviderSpec.Raw, err = json.Marshal(spec)
	return class, err
}

func (w *world) pool(identity string) *v1alpha1.MachineDeployment {
	name := objectName(identity)
	// Nodes of two worlds' Machines are in one cluster.
	labels := map[string]string{v1alpha1.LabelKeyMachineDeployment: name}
	surge, missing := intstr.FromInt32(2), intstr.FromInt32(1)
	d := &v1alpha1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: w.name},
		Spec: v1alpha1.MachineDeploymentSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Strategy: v1alpha1.MachineDeploymentStrategy{
				Type:          "RollingUpdate",
				RollingUpdate: &v1alpha1.RollingUpdateMachineDeployment{},
			},
			Template: v1alpha1.MachineTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: v1alpha1.KindMachineClass, Name: name}},
			},
		},
	}
	d.Spec.Strategy.RollingUpdate.MaxSurge, d.Spec.Strategy.RollingUpdate.MaxUnavailable = &surge, &missing
	return d
}

// live makes faults and changes until enough machines have come and gone.
func (w *world) live(ctx context.Context, out io.Writer) error {
	outer := ctx
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	log, err := newJournal(w.site.Dir())
	if err != nil {
		return err
	}
	defer log.close()
	var group sync.WaitGroup
	errs := make(chan error, lanes)
	kinds, absent := w.kindsHere()
	w.tally.expect(kinds, absent)
	if len(kinds) == 0 {
		return fmt.Errorf("none of the kinds %v can happen on this bus", w.kinds)
	}
	plan := newPlan(w.seed, kinds, w.longest)
	for range lanes {
		group.Go(func() {
			if err := w.inject(ctx, plan, log.sayf); err != nil {
				errs <- err
				end(err)
			}
		})
	}
	for i, identity := range identities {
		group.Go(func() { w.change(ctx, identity, uint64(loadLane+i), log.sayf) })
	}
	within, cancel := context.WithTimeoutCause(ctx, w.limit, fmt.Errorf("not within %s", w.limit))
	defer cancel()
	err = stack.Poll(within, fmt.Sprintf("%d machines have come and gone", w.tally.asked), func(context.Context) error {
		if n, missing := w.witness.lives(), w.tally.missing(); n < w.tally.asked || len(missing) > 0 {
			return fmt.Errorf("%d have, and these faults have not happened often enough: %v", n, missing)
		}
		if w.damage {
			return w.broken(within)
		}
		return nil
	})
	end(nil)
	group.Wait()
	close(errs)
	for failed := range errs {
		return failed
	}
	if err != nil && within.Err() != nil && outer.Err() == nil {
		fmt.Fprintf(out, "%s: %v\n", w.kind, err) // the verdict lists what is missing
		return nil
	}
	return err
}

// broken returns an error until the cloud's log has an instance that must not have been
// created. Lost instances do not count, as the witness may not have seen a deletion yet.
func (w *world) broken(ctx context.Context) error {
	entries, err := w.cloud.Admin.Log(ctx, 0)
	if err != nil {
		return err
	}
	if found, _ := readLog(entries, w.witness); !slices.ContainsFunc(found, finding.broken) {
		return errUnbroken
	}
	return nil
}

// kindsHere returns the chosen kinds: those with targets in this world, and the others.
func (w *world) kindsHere() (here, absent []string) {
	for _, f := range faults {
		switch {
		case !slices.Contains(w.kinds, f.name):
		case len(f.targets(w)) > 0:
			here = append(here, f.name)
		default:
			absent = append(absent, f.name)
		}
	}
	return here, absent
}

// change scales, rolls and shrinks one pool until ctx ends.
func (w *world) change(ctx context.Context, identity string, lane uint64, sayf func(string, ...any)) {
	r := rand.New(rand.NewPCG(w.seed, lane))
	for revision := 1; ctx.Err() == nil; revision++ {
		// All are drawn in each step, so that the sequence does not depend on their use.
		size, roll, pause := int32(r.IntN(mostReplicas+1)), r.IntN(3) == 0, time.Duration(r.Int64N(int64(3*time.Second)))
		err := w.setPool(ctx, identity, func(d *v1alpha1.MachineDeployment) {
			d.Spec.Replicas = size
			if roll {
				d.Spec.Template.Labels[revisionLabel] = fmt.Sprint(revision)
			}
		})
		sayf("pool %s: %d replicas, roll: %t, %v", identity, size, roll, err) // the API server may be down
		const least = 2 * time.Second
		if wait(ctx, least+pause) != nil {
			return
		}
	}
}

func (w *world) setPool(ctx context.Context, identity string, change func(*v1alpha1.MachineDeployment)) error {
	const patience = 5 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	d := &v1alpha1.MachineDeployment{}
	if err := w.kube.Get(ctx, client.ObjectKey{Namespace: w.name, Name: objectName(identity)}, d); err != nil {
		return err
	}
	before := d.DeepCopy()
	change(d)
	return w.kube.Patch(ctx, d, client.MergeFrom(before))
}
