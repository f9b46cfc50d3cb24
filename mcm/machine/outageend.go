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

// pendingResets are the uids of Unknown machines whose health timeout has yet to be reset
// after a freeze, each with the last error, "" before the first try. The reconciler leaves
// these machines alone until then, so a webhook that refuses one delays no other. It is
// safe for concurrent use; its zero value is empty.
type pendingResets struct {
	mu  sync.RWMutex
	why map[types.UID]string
}

func (s *pendingResets) of(uid types.UID) (why string, pending bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	why, pending = s.why[uid]

	return why, pending
}

func (s *pendingResets) set(uid types.UID, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.why == nil {
		s.why = map[types.UID]string{}
	}
	s.why[uid] = why
}

func (s *pendingResets) remove(uid types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.why, uid)
}

// retain drops all but these.
func (s *pendingResets) retain(these map[types.UID]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.why, func(uid types.UID, _ string) bool { return !these[uid] })
}

func (s *pendingResets) empty() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()

	return len(s.why) == 0
}

// endFreeze lets the reconciler continue, with Unknown machines once their health timeouts
// are reset: a pass over a machine's old copy cannot store anything then. It continues
// where an earlier call failed, and may be called whenever both API servers can be read.
func (g *OutageGuard) endFreeze(ctx context.Context) error {
	if before := g.state.Load(); before != watching {
		if before == frozen {
			if err := g.collectResets(ctx); err != nil {
				return err
			}
		}
		g.state.Store(watching)
		g.startPasses(ctx)
		if before == frozen {
			g.reported = false
			g.log(ctx).Info("machines are not frozen any more")
			g.announce(ctx, corev1.EventTypeNormal, "MachinesThawed", fmt.Sprintf(
				"Machines are no longer frozen, and their health timeouts start again; they had been frozen since %s: %s",
				g.began.UTC().Format(time.RFC3339), g.cause))
		}
	}
	if err := g.resetTimeouts(ctx); err != nil {
		return err
	}
	if g.stored && g.resets.empty() {
		g.stored = false
		g.Memory.SetFrozen(false)
	}

	return nil
}

// collectResets adds all Unknown machines to the pending resets.
func (g *OutageGuard) collectResets(ctx context.Context) error {
	machines, err := g.machines(ctx)
	if err != nil {
		return err
	}
	for i := range machines {
		if healthTimeoutRuns(&machines[i]) {
			g.resets.set(machines[i].UID, "")
		}
	}

	return nil
}

// healthTimeoutRuns reports whether a machine's health timeout runs.
func healthTimeoutRuns(m *v1alpha1.Machine) bool {
	return m.Status.CurrentStatus.Phase == v1alpha1.MachineUnknown && m.DeletionTimestamp.IsZero()
}

// machines reads all machines from the API server.
func (g *OutageGuard) machines(ctx context.Context) ([]v1alpha1.Machine, error) {
	list := &v1alpha1.MachineList{}
	if err := g.Control.List(ctx, list, client.InNamespace(g.Namespace)); err != nil {
		return nil, fmt.Errorf("list machines: %w", err)
	}

	return list.Items, nil
}

// resetTimeouts makes machines with a pending reset Running. The next pass makes them
// Unknown again if their Nodes are still unhealthy. It returns an error if an API server
// cannot be read.
func (g *OutageGuard) resetTimeouts(ctx context.Context) error {
	if g.resets.empty() {
		return nil
	}
	machines, err := g.machines(ctx)
	if err != nil {
		return err
	}
	there := map[types.UID]bool{}
	for i := range machines {
		m := &machines[i]
		why, pending := g.resets.of(m.UID)
		if !pending {
			continue
		}
		there[m.UID] = true
		if err := g.resetTimeout(ctx, m); err != nil {
			// If an API server is away again, the error is not about the machine.
			if lost := g.probe(ctx); lost != nil {
				return lost
			}
			g.reportNotReset(ctx, m, err, why)
			g.resets.set(m.UID, fault(err))

			continue
		}
		g.resets.remove(m.UID)
		g.startPasses(ctx, client.ObjectKeyFromObject(m))
	}
	g.resets.retain(there)

	return nil
}

// resetTimeout makes a machine Running if it is Unknown and not being deleted.
func (g *OutageGuard) resetTimeout(ctx context.Context, m *v1alpha1.Machine) error {
	if !healthTimeoutRuns(m) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, g.Settings.Timeout)
	defer cancel()
	before, now := m.DeepCopy(), metav1.Now()
	m.Status.CurrentStatus.Phase, m.Status.CurrentStatus.LastUpdateTime = v1alpha1.MachineRunning, now
	m.Status.LastOperation = v1alpha1.LastOperation{
		Type: v1alpha1.MachineOperationHealthCheck, State: v1alpha1.MachineStateSuccessful,
		Description: v1alpha1.TextHealthTimeoutReset, LastUpdateTime: now,
	}
	err := g.Control.Status().Patch(ctx, m, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if err == nil {
		g.Events.Event(m, corev1.EventTypeNormal, "HealthTimeoutReset", v1alpha1.TextHealthTimeoutReset)
	}

	return client.IgnoreNotFound(err)
}

// reportNotReset reports why a machine stays frozen, unless that was reported or is a
// conflict.
func (g *OutageGuard) reportNotReset(ctx context.Context, m *v1alpha1.Machine, err error, known string) {
	if apierrors.IsConflict(err) || fault(err) == known {
		return
	}
	g.log(ctx).Error(err, "one machine stays frozen", "machine", client.ObjectKeyFromObject(m))
	g.Events.Eventf(m, corev1.EventTypeWarning, "HealthTimeoutNotReset",
		"The machine stays frozen because its health timeout cannot be reset after an outage of an API server; retries: %s", fault(err))
}

// maxAnnounced bounds the number of objects that get an Event about all machines.
const maxAnnounced = 100

// announce records an Event on MachineDeployments, and on sets and machines without an
// owner. While the control cluster is away, no Event can be recorded.
func (g *OutageGuard) announce(ctx context.Context, kind, reason, text string) {
	ctx, cancel := context.WithTimeout(ctx, g.Settings.outagePeriod())
	defer cancel()
	count := 0
	for _, list := range []client.ObjectList{
		&v1alpha1.MachineDeploymentList{}, &v1alpha1.MachineSetList{}, &v1alpha1.MachineList{},
	} {
		err := g.Control.List(ctx, list, client.InNamespace(g.Namespace))
		if err == nil {
			err = meta.EachListItem(list, func(o runtime.Object) error {
				if owned, ok := o.(metav1.Object); ok && metav1.GetControllerOfNoCopy(owned) == nil && count < maxAnnounced {
					g.Events.Event(o, kind, reason, text)
					count++
				}

				return nil
			})
		}
		if err != nil {
			g.log(ctx).Info("cannot list the objects for an Event about all machines", "reason", reason, "err", err.Error())

			return
		}
	}
}
