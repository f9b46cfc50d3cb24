package machineset

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// parallel is how many requests one pass has under way at once.
const parallel = 16

// scale brings the set to its replicas.
func (p *pass) scale(ctx context.Context) (steps.Next, error) {
	plan := planFor(p.set, p.machines, p.now)
	if plan.nothing() && len(p.orphans) == 0 {
		p.recheck(plan)

		return steps.Proceed, nil
	}
	if n, err := p.findMachinesLive(ctx); n.Stop || err != nil {
		return n, err
	}
	if err := p.adopt(ctx); err != nil {
		return steps.Wait, err
	}
	p.preserve(ctx)
	plan = planFor(p.set, p.machines, p.now)
	p.recheck(plan)
	p.delete(ctx, plan.delete)
	p.create(ctx, plan.create)

	return steps.Proceed, nil
}

func (p *pass) recheck(plan *plan) {
	if !plan.recheck.IsZero() {
		p.LookAgain(plan.recheck.Sub(p.now) + time.Second)
	}
}

// create makes n machines in batches of 1, 2, 4 and so on, and stops at the first
// batch that was refused in part: what one quota or webhook refuses it refuses a
// hundred times. What else was refused in this pass is no reason to make none.
func (p *pass) create(ctx context.Context, n int) {
	before := len(p.errs)
	for batch := 1; n > 0 && len(p.errs) == before; batch *= 2 {
		batch = min(batch, n)
		made := make([]*v1alpha1.Machine, batch)
		errs := inParallel(batch, func(i int) (err error) {
			made[i], err = p.createOne(ctx)

			return err
		})
		for _, m := range made {
			if m != nil {
				p.machines = append(p.machines, m)
			}
		}
		for _, err := range errs {
			if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
				return // as all that is in it
			}
			p.failed(ctx, v1alpha1.ReasonFailedCreate, v1alpha1.EventFailedCreate, err)
		}
		n -= batch
	}
}

func (p *pass) createOne(ctx context.Context) (*v1alpha1.Machine, error) {
	m := machineFor(p.set)
	if err := p.Client.Create(ctx, m); err != nil {
		return nil, fmt.Errorf("create a machine: %w", err)
	}
	p.Events.Eventf(p.set, corev1.EventTypeNormal, v1alpha1.EventSuccessfulCreate, "Created machine %s", m.Name)
	p.log.Info("created machine", "machine", m.Name)

	return m, nil
}

// machineFor returns a machine as the template says.
func machineFor(set *v1alpha1.MachineSet) *v1alpha1.Machine {
	template := set.Spec.Template.DeepCopy()
	m := &v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: set.Name + "-", Namespace: set.Namespace,
			Labels: template.Labels, Annotations: maps.Clone(template.Annotations), Finalizers: template.Finalizers,
			OwnerReferences: []metav1.OwnerReference{controllerRef(set)},
		},
		Spec: template.Spec,
	}
	if text, ok := set.Annotations[v1alpha1.AnnotationKeyEffectiveCreationTimeout]; ok {
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.AnnotationKeyEffectiveCreationTimeout, text)
		if d, err := time.ParseDuration(text); err == nil {
			m.Spec.MachineCreationTimeout = &metav1.Duration{Duration: d}
		}
	}

	return m
}

// delete deletes machines. One that is no longer what was looked at is looked at
// again: it may have recovered, or a user has taken it out of the set.
func (p *pass) delete(ctx context.Context, machines []*v1alpha1.Machine) {
	var mu sync.Mutex
	gone := map[*v1alpha1.Machine]bool{}
	errs := inParallel(len(machines), func(i int) error {
		m := machines[i]
		err := p.Client.Delete(ctx, m.DeepCopy(), client.Preconditions{UID: &m.UID, ResourceVersion: &m.ResourceVersion})
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete machine %s: %w", m.Name, err)
		}
		if err == nil {
			p.reportDeleted(m)
		}
		mu.Lock()
		defer mu.Unlock()
		gone[m] = true

		return nil
	})
	for i, m := range p.machines {
		if gone[m] {
			// What was read may be the cache's.
			p.machines[i] = m.DeepCopy()
			p.machines[i].DeletionTimestamp = &metav1.Time{Time: p.now}
		}
	}
	for _, err := range errs {
		if apierrors.IsConflict(err) {
			p.log.V(1).Info("machine has changed, looking again", "err", err.Error())
			p.LookAgain(steps.ConflictRetry)

			continue
		}
		p.failed(ctx, v1alpha1.ReasonFailedDelete, v1alpha1.EventFailedDelete, err)
	}
}

// reportDeleted reports that a machine's deletion was asked for.
func (p *pass) reportDeleted(m *v1alpha1.Machine) {
	if unhealthy(m) {
		staleMachines.Inc()
	}
	p.Events.Eventf(p.set, corev1.EventTypeNormal, v1alpha1.EventSuccessfulDelete, "Deleted machine %s", m.Name)
	p.log.Info("deleted machine", "machine", m.Name, "phase", m.Status.CurrentStatus.Phase)
}

// failed notes that a machine could not be created or deleted. The first cause
// shows in the set's status; that this manager is being stopped is none.
func (p *pass) failed(ctx context.Context, reason, event string, err error) {
	p.errs = append(p.errs, err)
	if ctx.Err() != nil {
		return
	}
	if p.failure == nil {
		p.failure = &v1alpha1.MachineSetCondition{
			Type: v1alpha1.MachineSetReplicaFailure, Status: corev1.ConditionTrue, Reason: reason, Message: err.Error(),
		}
	}
	p.Events.Eventf(p.set, corev1.EventTypeWarning, event, "%s", err)
}

// inParallel does n things, some at a time, and returns what went wrong.
func inParallel(n int, do func(i int) error) []error {
	var (
		group errgroup.Group
		mu    sync.Mutex
		errs  []error
	)
	group.SetLimit(parallel)
	for i := range n {
		group.Go(func() error {
			if err := do(i); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}

			return nil
		})
	}
	_ = group.Wait()

	return errs
}
