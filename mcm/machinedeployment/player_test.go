package machinedeployment_test

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A player does what the controllers of MachineSets and Machines would: machines
// of its sets run as soon as they are made, with a Node, unless their class is
// broken, and are gone as soon as they are deleted. It reads no cache.
type player struct {
	client.Client

	mu     sync.Mutex
	broken map[string]bool // classes of which no machine comes up
	asleep bool            // whether it does nothing
	held   map[string]int  // classes of which only so many machines come up
	made   map[string]int  // machines by class
	// most is the largest number of machines there were; least the smallest
	// number of running ones since it was last set.
	most, least int
}

func (p *player) breakClass(class string, broken bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.broken[class] = broken
}

// release lets n machines of a held class come up.
func (p *player) release(class string, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held[class] = n
}

// mayCome reports whether one more machine of a set may come up, running apart.
func (p *player) mayCome(class string, running int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, held := p.held[class]

	return !held || running < n
}

func (p *player) isBroken(class string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()

	return p.broken[class]
}

// watch starts the counts of machines afresh.
func (p *player) watch() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.most, p.least, p.made = 0, 1<<30, map[string]int{}
}

// madeOf returns how many machines of a class were made since watch.
func (p *player) madeOf(class string) int {
	p.mu.Lock()
	defer p.mu.Unlock()

	return p.made[class]
}

// seen returns the largest number of machines and the smallest of running ones
// since watch.
func (p *player) seen() (most, least int) {
	p.mu.Lock()
	defer p.mu.Unlock()

	return p.most, p.least
}

// sleep has the player do nothing from now on.
func (p *player) sleep() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asleep = true
}

func (p *player) sleeps() bool {
	p.mu.Lock()
	defer p.mu.Unlock()

	return p.asleep
}

func (p *player) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	if p.sleeps() {
		return reconcile.Result{}, nil
	}
	set := &v1alpha1.MachineSet{}
	if err := p.Get(ctx, req.NamespacedName, set); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	machines, err := p.machines(ctx, set)
	if err != nil {
		return reconcile.Result{}, err
	}
	// Those that the autoscaler chose go whatever the replicas, and are missed.
	for len(machines) > 0 && chosen(set, &machines[0]) {
		if err := p.remove(ctx, &machines[0]); err != nil {
			return reconcile.Result{}, err
		}
		machines = machines[1:]
	}
	want := int(set.Spec.Replicas)
	if !set.DeletionTimestamp.IsZero() {
		want = 0
	}
	for range want - len(machines) {
		if err := p.make(ctx, set); err != nil {
			return reconcile.Result{}, err
		}
	}
	for i := range machines[:max(0, len(machines)-want)] {
		if err := p.remove(ctx, &machines[i]); err != nil {
			return reconcile.Result{}, err
		}
	}
	if machines, err = p.machines(ctx, set); err != nil {
		return reconcile.Result{}, err
	}
	running := 0
	for i := range machines {
		if machines[i].Status.CurrentStatus.Phase == v1alpha1.MachineRunning {
			running++
		}
	}
	for i := range machines {
		if machines[i].Status.CurrentStatus.Phase == v1alpha1.MachineRunning || !p.mayCome(set.Spec.Template.Spec.Class.Name, running) {
			continue
		}
		if err := p.come(ctx, &machines[i]); err != nil {
			return reconcile.Result{}, err
		}
		running++
	}

	return reconcile.Result{}, p.report(ctx, set)
}

// chosen reports whether the set has heard of the replicas for which the autoscaler
// has chosen the machine.
func chosen(set *v1alpha1.MachineSet, m *v1alpha1.Machine) bool {
	lastChange := set.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler]
	at := m.Annotations[v1alpha1.AnnotationKeyMarkedForDeletionTime]

	// Times of this form sort as text.
	return m.Annotations[v1alpha1.AnnotationKeyMachinePriority] == v1alpha1.MachinePriorityDelete && lastChange != "" && at <= lastChange
}

// machines returns those of a set in the order in which it deletes them.
func (p *player) machines(ctx context.Context, set *v1alpha1.MachineSet) ([]v1alpha1.Machine, error) {
	list := &v1alpha1.MachineList{}
	if err := p.List(ctx, list, client.InNamespace(set.Namespace)); err != nil {
		return nil, err
	}
	p.mu.Lock()
	running := 0
	for i := range list.Items {
		if list.Items[i].Status.CurrentStatus.Phase == v1alpha1.MachineRunning {
			running++
		}
	}
	p.most, p.least = max(p.most, len(list.Items)), min(p.least, running)
	p.mu.Unlock()
	own := slices.DeleteFunc(list.Items, func(m v1alpha1.Machine) bool {
		return !metav1.IsControlledBy(&m, set) || !m.DeletionTimestamp.IsZero()
	})
	slices.SortFunc(own, func(a, b v1alpha1.Machine) int {
		rank := func(m *v1alpha1.Machine) int {
			switch {
			case m.Annotations[v1alpha1.AnnotationKeyMachinePriority] == v1alpha1.MachinePriorityDelete:
				return 0
			case m.Status.CurrentStatus.Phase != v1alpha1.MachineRunning:
				return 1
			default:
				return 2
			}
		}

		return cmp.Or(cmp.Compare(rank(&a), rank(&b)), cmp.Compare(a.Name, b.Name))
	})

	return own, nil
}

func (p *player) make(ctx context.Context, set *v1alpha1.MachineSet) error {
	m := &v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: set.Namespace, GenerateName: set.Name + "-",
			Labels: maps.Clone(set.Spec.Template.Labels), Annotations: maps.Clone(set.Spec.Template.Annotations),
			OwnerReferences: []metav1.OwnerReference{
				*metav1.NewControllerRef(set, v1alpha1.SchemeGroupVersion.WithKind(v1alpha1.KindMachineSet)),
			},
		},
		Spec: *set.Spec.Template.Spec.DeepCopy(),
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.made == nil {
		p.made = map[string]int{}
	}
	p.made[m.Spec.Class.Name]++

	return p.Create(ctx, m)
}

func (p *player) remove(ctx context.Context, m *v1alpha1.Machine) error {
	if err := client.IgnoreNotFound(p.Delete(ctx, m)); err != nil {
		return err
	}

	return client.IgnoreNotFound(p.Delete(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeOf(m)}}))
}

// nodeOf names the Node of a machine: Nodes are in no namespace.
func nodeOf(m *v1alpha1.Machine) string { return m.Namespace + "-" + m.Name }

// come has a machine's Node join, or the machine fail.
func (p *player) come(ctx context.Context, m *v1alpha1.Machine) error {
	before := m.DeepCopy()
	if p.isBroken(m.Spec.Class.Name) {
		m.Status.CurrentStatus.Phase = v1alpha1.MachineCrashLoopBackOff
		m.Status.LastOperation = v1alpha1.LastOperation{
			Type: v1alpha1.MachineOperationCreate, State: v1alpha1.MachineStateFailed, ErrorCode: "ResourceExhausted",
			Description: v1alpha1.CreateFailedText("ResourceExhausted", "no "+m.Spec.Class.Name+" left"),
		}
	} else {
		if m.Labels[v1alpha1.LabelKeyNode] == "" {
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeOf(m)}}
			if err := p.Create(ctx, node); err != nil {
				return fmt.Errorf("node of %s: %w", m.Name, err)
			}
			m.Labels[v1alpha1.LabelKeyNode] = node.Name
			if err := p.Patch(ctx, m, client.MergeFrom(before)); err != nil {
				return err
			}
			before = m.DeepCopy()
		}
		m.Status.CurrentStatus.Phase = v1alpha1.MachineRunning
		m.Status.LastOperation = v1alpha1.LastOperation{Type: v1alpha1.MachineOperationCreate, State: v1alpha1.MachineStateSuccessful}
	}
	if equality.Semantic.DeepEqual(before.Status, m.Status) {
		return nil
	}

	return p.Status().Patch(ctx, m, client.MergeFrom(before))
}

func (p *player) report(ctx context.Context, set *v1alpha1.MachineSet) error {
	machines, err := p.machines(ctx, set)
	if err != nil {
		return err
	}
	before := set.DeepCopy()
	s := &set.Status
	s.Replicas, s.ReadyReplicas, s.AvailableReplicas, s.FailedMachines = int32(len(machines)), 0, 0, nil
	s.ObservedGeneration = set.Generation
	for i := range machines {
		m := &machines[i]
		if m.Status.CurrentStatus.Phase == v1alpha1.MachineRunning {
			s.ReadyReplicas++
			s.AvailableReplicas++
		}
		if m.Status.LastOperation.State == v1alpha1.MachineStateFailed {
			s.FailedMachines = append(s.FailedMachines, v1alpha1.MachineSummary{
				Name: m.Name, OwnerRef: set.Name, LastOperation: m.Status.LastOperation,
			})
		}
	}

	return client.IgnoreNotFound(p.Status().Patch(ctx, set, client.MergeFrom(before)))
}

// heal lets machines of a class come up, and has the sets look again.
func (r *rig) heal(t *testing.T, class string) {
	t.Helper()
	r.player.breakClass(class, false)
	r.nudge(t)
}

// nudge has the sets look again.
func (r *rig) nudge(t *testing.T) {
	t.Helper()
	for _, set := range r.sets(t) {
		before := set.DeepCopy()
		metav1.SetMetaDataAnnotation(&set.ObjectMeta, "test.invalid/look", time.Now().String())
		if err := r.Patch(t.Context(), set, client.MergeFrom(before)); err != nil {
			t.Fatal(err)
		}
	}
}
