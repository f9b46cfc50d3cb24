package machine

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// stuck are the Unknown machines whose health timeout has yet to be reset after a freeze,
// by their uids, and what prevents that; empty before the first try. They are left alone
// until then: a webhook that refuses one delays no other. It is safe for
// concurrent use; its zero value is empty.
type stuck struct {
	mu  sync.RWMutex
	why map[types.UID]string
}

func (s *stuck) of(uid types.UID) (why string, stuck bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	why, stuck = s.why[uid]

	return why, stuck
}

func (s *stuck) set(uid types.UID, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.why == nil {
		s.why = map[types.UID]string{}
	}
	s.why[uid] = why
}

func (s *stuck) remove(uid types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.why, uid)
}

// keep drops all but these.
func (s *stuck) keep(these map[types.UID]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.why, func(uid types.UID, _ string) bool { return !these[uid] })
}

func (s *stuck) empty() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()

	return len(s.why) == 0
}

// thaw lets the reconciler go on, with stuck machines once their timeouts are reset. A
// pass over an old copy of one cannot store anything then. It continues where an earlier
// call stopped, and may be called whenever both API servers can be read.
func (f *Freezer) thaw(ctx context.Context) error {
	if before := f.state.Load(); before != watching {
		if before == frozen {
			if err := f.stickTimed(ctx); err != nil {
				return err
			}
		}
		f.state.Store(watching)
		f.letGo(ctx)
		if before == frozen {
			f.reported = false
			f.log(ctx).Info("machines are not frozen any more")
			f.announce(ctx, corev1.EventTypeNormal, "MachinesThawed", fmt.Sprintf(
				"Machines are looked at again, and health timeouts begin anew; since %s they had been left alone: %s",
				f.began.UTC().Format(time.RFC3339), f.cause))
		}
	}
	if err := f.unstick(ctx); err != nil {
		return err
	}
	if f.noted && f.stuck.empty() {
		f.noted = false
		f.Memory.NoteFrozen(false)
	}

	return nil
}

// stickTimed makes all Unknown machines stuck ones.
func (f *Freezer) stickTimed(ctx context.Context) error {
	machines, err := f.machines(ctx)
	if err != nil {
		return err
	}
	for i := range machines {
		if timed(&machines[i]) {
			f.stuck.set(machines[i].UID, "")
		}
	}

	return nil
}

// timed reports whether a machine's health timeout runs.
func timed(m *v1alpha1.Machine) bool {
	return m.Status.CurrentStatus.Phase == v1alpha1.MachineUnknown && m.DeletionTimestamp.IsZero()
}

// machines reads all machines from the API server.
func (f *Freezer) machines(ctx context.Context) ([]v1alpha1.Machine, error) {
	list := &v1alpha1.MachineList{}
	if err := f.Control.List(ctx, list, client.InNamespace(f.Namespace)); err != nil {
		return nil, fmt.Errorf("list machines: %w", err)
	}

	return list.Items, nil
}

// unstick makes stuck machines Running. The next pass makes them Unknown again if their
// Nodes are still unhealthy. An error says that an API server cannot be read.
func (f *Freezer) unstick(ctx context.Context) error {
	if f.stuck.empty() {
		return nil
	}
	machines, err := f.machines(ctx)
	if err != nil {
		return err
	}
	there := map[types.UID]bool{}
	for i := range machines {
		m := &machines[i]
		why, stuck := f.stuck.of(m.UID)
		if !stuck {
			continue
		}
		there[m.UID] = true
		if err := f.resetTimeout(ctx, m); err != nil {
			// Of an API server that is away again it says nothing about the machine.
			if lost := f.probe(ctx); lost != nil {
				return lost
			}
			f.reportStuck(ctx, m, err, why)
			f.stuck.set(m.UID, fault(err))

			continue
		}
		f.stuck.remove(m.UID)
		f.letGo(ctx, client.ObjectKeyFromObject(m))
	}
	f.stuck.keep(there)

	return nil
}

// resetTimeout makes a machine Running, if it is Unknown and stays.
func (f *Freezer) resetTimeout(ctx context.Context, m *v1alpha1.Machine) error {
	if !timed(m) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, f.Settings.Timeout)
	defer cancel()
	before, now := m.DeepCopy(), metav1.Now()
	m.Status.CurrentStatus.Phase, m.Status.CurrentStatus.LastUpdateTime = v1alpha1.MachineRunning, now
	m.Status.LastOperation = v1alpha1.LastOperation{
		Type: v1alpha1.MachineOperationHealthCheck, State: v1alpha1.MachineStateSuccessful,
		Description: v1alpha1.TextHealthTimeoutReset, LastUpdateTime: now,
	}
	err := f.Control.Status().Patch(ctx, m, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if err == nil {
		f.Events.Event(m, corev1.EventTypeNormal, "HealthTimeoutReset", v1alpha1.TextHealthTimeoutReset)
	}

	return client.IgnoreNotFound(err)
}

// reportStuck says why a machine stays frozen, unless that is known or passes by itself.
func (f *Freezer) reportStuck(ctx context.Context, m *v1alpha1.Machine, err error, known string) {
	if apierrors.IsConflict(err) || fault(err) == known {
		return
	}
	f.log(ctx).Error(err, "one machine stays frozen", "machine", client.ObjectKeyFromObject(m))
	f.Events.Eventf(m, corev1.EventTypeWarning, "HealthTimeoutNotReset",
		"The machine is left alone until its health timeout can be reset after an outage: %s", fault(err))
}

// maxAnnounced bounds the number of objects that get an Event about all machines.
const maxAnnounced = 100

// announce records an Event on MachineDeployments, and on sets and machines without an
// owner: a user who wonders why nothing happens looks there. While the control cluster
// is away no Event can be recorded.
func (f *Freezer) announce(ctx context.Context, kind, reason, text string) {
	ctx, cancel := context.WithTimeout(ctx, f.Settings.hurry())
	defer cancel()
	count := 0
	for _, list := range []client.ObjectList{
		&v1alpha1.MachineDeploymentList{}, &v1alpha1.MachineSetList{}, &v1alpha1.MachineList{},
	} {
		err := f.Control.List(ctx, list, client.InNamespace(f.Namespace))
		if err == nil {
			err = meta.EachListItem(list, func(o runtime.Object) error {
				if owned, ok := o.(metav1.Object); ok && metav1.GetControllerOfNoCopy(owned) == nil && count < maxAnnounced {
					f.Events.Event(o, kind, reason, text)
					count++
				}

				return nil
			})
		}
		if err != nil {
			f.log(ctx).Info("no Event could be recorded", "reason", reason, "err", err.Error())

			return
		}
	}
}
