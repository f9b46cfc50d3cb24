package machine

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// indexReplaced finds the machines of a pool that count as being replaced: of most
// pools there are none.
const indexReplaced = "replaced"

// repeatHeld is the time after which a waiting machine may name another machine that it
// waits for: a thousand may wait.
const repeatHeld = time.Minute

// A pool is the machines of which only so many are replaced at a time, so that a
// fault that makes all their Nodes unhealthy does not cost all their instances:
// those that name one MachineDeployment in their label, or else those of one set.
type pool struct {
	namespace, deployment string
	set                   types.UID // without the label
}

// poolOf returns a machine's pool; false when it has no owner that would replace it.
func poolOf(m *v1alpha1.Machine) (pool, bool) {
	if name := m.Labels[v1alpha1.LabelKeyMachineDeployment]; name != "" {
		return pool{namespace: m.Namespace, deployment: name}, true
	}
	if owner := metav1.GetControllerOfNoCopy(m); owner != nil {
		return pool{namespace: m.Namespace, set: owner.UID}, true
	}

	return pool{}, false
}

func (p pool) String() string {
	if p.deployment == "" {
		return "its MachineSet"
	}

	return "MachineDeployment " + p.deployment
}

// key is the pool's in the index, which knows of namespaces itself.
func (p pool) key() string {
	if p.deployment == "" {
		return "set/" + string(p.set)
	}

	return "deployment/" + p.deployment
}

// replaced reports whether a machine counts as one that is being replaced: it is on
// its way out, or another one on its way in. Each counts once.
func replaced(m *v1alpha1.Machine) bool {
	if !m.DeletionTimestamp.IsZero() {
		return true
	}
	switch current := m.Status.CurrentStatus; current.Phase {
	case v1alpha1.MachineRunning, v1alpha1.MachineUnknown:
		return false
	case v1alpha1.MachineInPlaceUpdateFailed:
		return false // like Unknown: it waits for its turn, and two of them must not wait for each other
	default:
		return current.PreserveExpiryTime == nil
	}
}

func replacedIn(o client.Object) []string {
	m, ok := o.(*v1alpha1.Machine)
	if !ok || !replaced(m) {
		return nil
	}
	if own, ok := poolOf(m); ok {
		return []string{own.key()}
	}

	return nil
}

// replacement decides whether an unhealthy machine may be given up now.
type replacement struct {
	*object
	live         client.Reader
	replacements *replacements

	held bool // the machine would be Failed if not for others of its pool
}

// mayFail reports whether a machine that has been unhealthy for longer than limit may
// become Failed now, or has to wait for others of its pool.
func (r *replacement) mayFail(ctx context.Context, limit time.Duration) (bool, error) {
	own, ok := poolOf(r.machine)
	if !ok {
		return true, nil
	}
	other, free, err := r.replacements.take(ctx, r.control, own, r.stored, r.settings.MaxReplacements)
	if err == nil && free {
		// The cache may not show yet what the leader before did, or users.
		other, free, err = r.confirmTaken(ctx, own)
	}
	if err != nil {
		return false, fmt.Errorf("count the machines of %s that are being replaced: %w", own, err)
	}
	if !free {
		r.reportHeld(own, other, limit)
	}

	return free, nil
}

// confirmTaken asks the API server itself whether there is room for one more, and
// gives back what was taken if there is not.
func (r *replacement) confirmTaken(ctx context.Context, own pool) (other string, free bool, err error) {
	opts := []client.ListOption{client.InNamespace(own.namespace)}
	if own.deployment != "" {
		opts = append(opts, client.MatchingLabels{v1alpha1.LabelKeyMachineDeployment: own.deployment})
	}
	list := &v1alpha1.MachineList{}
	if err := r.live.List(ctx, list, opts...); err != nil {
		r.replacements.release(r.machine.UID)

		return "", false, err
	}
	other, free = r.replacements.confirm(own, r.machine.UID, list.Items, r.settings.MaxReplacements)

	return other, free, nil
}

// reportHeld has the machine say what it waits for, with an Event at first.
func (r *replacement) reportHeld(own pool, other string, limit time.Duration) {
	r.held = true
	r.replacements.wait(r.machine, own)
	current, last := r.machine.Status.CurrentStatus, r.machine.Status.LastOperation
	// Nothing but this is said of a machine once its time is over.
	first := last.LastUpdateTime.Time.Before(current.LastUpdateTime.Add(limit))
	if !first && r.now.Sub(last.LastUpdateTime.Time) < repeatHeld {
		return
	}
	text := fmt.Sprintf("Machine %s is unhealthy for longer than %s and is not replaced yet: "+
		"at most %d of %s may be replaced at a time (--machine-max-replacements), and %s is starting, failed or being deleted", r.machine.Name, limit, r.settings.MaxReplacements, own, other)
	r.setLastOperation(v1alpha1.MachineOperationHealthCheck, v1alpha1.MachineStateProcessing, "", text)
	if first {
		r.warnAfterWritef("ReplacementDelayed", "%s", text)
	}
}

// replacementEnded has machines that wait looked at when there may be room.
func (r *Reconciler) replacementEnded() handler.EventHandler {
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	ended := func(o client.Object, q queue) {
		m, ok := o.(*v1alpha1.Machine)
		if !ok || !replaced(m) {
			return
		}
		own, ok := poolOf(m)
		if !ok {
			return
		}
		for _, name := range r.replacements.waitingIn(own) {
			q.Add(reconcile.Request{NamespacedName: name})
		}
	}

	return handler.Funcs{
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) {
			if m, ok := e.ObjectNew.(*v1alpha1.Machine); ok && !replaced(m) {
				ended(e.ObjectOld, q)
			}
		},
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, q queue) {
			r.replacements.forget(e.Object.GetUID())
			ended(e.Object, q)
		},
	}
}
