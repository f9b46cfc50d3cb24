package machinedeployment

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// deletionMarks mark the machines that the cluster-autoscaler wants deleted.
type deletionMarks struct{ *ownedSets }

// markTriggered marks the machines that the cluster-autoscaler wants deleted, so
// that their sets choose them when they shrink. What is not, or no longer, a
// machine to delete is dropped from the deployment's annotation.
func (d *deletionMarks) markTriggered(ctx context.Context) (steps.Next, error) {
	text, ok := d.deployment.Annotations[v1alpha1.AnnotationKeyTriggerDeletion]
	if !ok {
		return steps.Proceed, nil
	}
	machines := map[string]*v1alpha1.Machine{}
	for _, set := range d.sets {
		for _, m := range d.machines[set.UID] {
			machines[m.Name] = m
		}
	}
	var kept []string
	untimed := d.defaultMarkTime()
	seen := map[string]bool{}
	for entry := range strings.SplitSeq(text, ",") {
		name, at, timed := strings.Cut(strings.TrimSpace(entry), "~")
		if !timed {
			at = untimed
		}
		m, err := d.findTriggered(ctx, machines, name, at)
		if err != nil {
			return steps.Wait, err
		}
		if m == nil || seen[name] {
			d.log.V(1).Info("no machine to delete", "entry", entry)

			continue
		}
		seen[name] = true
		if err := d.markMachine(ctx, m, at); err != nil {
			return steps.Wait, err
		}
		kept = append(kept, name+"~"+at)
	}
	if len(kept) == 0 {
		delete(d.deployment.Annotations, v1alpha1.AnnotationKeyTriggerDeletion)
	} else {
		d.deployment.Annotations[v1alpha1.AnnotationKeyTriggerDeletion] = strings.Join(kept, ",")
	}

	return steps.Proceed, d.patch(ctx)
}

// defaultMarkTime is the time of an entry of an autoscaler that gives none: that of the
// change of replicas in the same write. A change that sets have heard of already
// was another one: by its time they would delete the machine before they have the
// replicas for that, and make one more.
func (d *deletionMarks) defaultMarkTime() string {
	at := d.deployment.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler]
	heard := slices.ContainsFunc(d.sets, func(set *v1alpha1.MachineSet) bool {
		return set.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler] == at
	})
	if isTime(at) && !heard {
		return at
	}

	return d.now.UTC().Format(time.RFC3339Nano)
}

// findTriggered is the machine that an entry of the annotation means; nil when it is not
// one to delete. The cache may not show a new one yet: it is added to machines.
func (d *deletionMarks) findTriggered(ctx context.Context, machines map[string]*v1alpha1.Machine, name, at string) (*v1alpha1.Machine, error) {
	if name == "" || !isTime(at) {
		return nil, nil
	}
	m := machines[name]
	if m == nil {
		m = &v1alpha1.Machine{}
		err := d.live.Get(ctx, client.ObjectKey{Namespace: d.deployment.Namespace, Name: name}, m)
		if client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("read machine %s: %w", name, err)
		}
		i := slices.IndexFunc(d.sets, func(set *v1alpha1.MachineSet) bool { return metav1.IsControlledBy(m, set) })
		if i < 0 {
			return nil, nil
		}
		machines[name] = m
		d.machines[d.sets[i].UID] = append(d.machines[d.sets[i].UID], m)
	}
	if going(m) {
		return nil, nil
	}

	return m, nil
}

func isTime(text string) bool {
	_, err := time.Parse(time.RFC3339, text)

	return err == nil
}

// going reports whether a machine is on its way out. A Failed one is not: it may
// recover, or be preserved, and then its set would delete another one in its place.
func going(m *v1alpha1.Machine) bool {
	return !m.DeletionTimestamp.IsZero() || m.Status.CurrentStatus.Phase == v1alpha1.MachineTerminating
}

// lost reports whether no work can be put on a machine any more.
func lost(m *v1alpha1.Machine) bool {
	return going(m) || m.Status.CurrentStatus.Phase == v1alpha1.MachineFailed
}

func (d *deletionMarks) markMachine(ctx context.Context, m *v1alpha1.Machine, at string) error {
	if m.Annotations[v1alpha1.AnnotationKeyMachinePriority] == v1alpha1.MachinePriorityDelete &&
		m.Annotations[v1alpha1.AnnotationKeyMarkedForDeletionTime] == at {
		return nil
	}
	marked := m.DeepCopy()
	metav1.SetMetaDataAnnotation(&marked.ObjectMeta, v1alpha1.AnnotationKeyMachinePriority, v1alpha1.MachinePriorityDelete)
	metav1.SetMetaDataAnnotation(&marked.ObjectMeta, v1alpha1.AnnotationKeyMarkedForDeletionTime, at)
	if err := d.control.Patch(ctx, marked, client.MergeFrom(m)); err != nil {
		return fmt.Errorf("mark machine %s for deletion: %w", m.Name, err)
	}
	// The rest of the pass counts what is marked; the cache's object is not ours to change.
	for _, set := range d.sets {
		for i, other := range d.machines[set.UID] {
			if other == m {
				d.machines[set.UID][i] = marked
			}
		}
	}

	return nil
}

// isMarked reports whether a set deletes the machine for the cluster-autoscaler once it
// hears of the deployment's last change.
func (o *ownedSets) isMarked(m *v1alpha1.Machine) bool {
	last, err := time.Parse(time.RFC3339, o.deployment.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler])
	if err != nil || going(m) || m.Annotations[v1alpha1.AnnotationKeyMachinePriority] != v1alpha1.MachinePriorityDelete {
		return false
	}
	at, err := time.Parse(time.RFC3339, m.Annotations[v1alpha1.AnnotationKeyMarkedForDeletionTime])

	return err == nil && !at.After(last)
}
