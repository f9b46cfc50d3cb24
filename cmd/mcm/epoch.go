package main

import (
	"context"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
)

// leaseName is the Lease of the leader election. It has the name that the machine
// controller manager uses, so that both never work at once.
const leaseName = "machine-controller-manager"

// minLeaseTimeout is the least timeout of an election's request.
const minLeaseTimeout = time.Second

// labelFrozen on the Lease is "true" while the leader leaves machines alone because it
// cannot read an API server, or has not recovered from that yet.
const labelFrozen = "machinebus.io/frozen"

// A leaderLock is the lock of the leader election. It counts epochs: drivers refuse
// requests of a manager with an earlier epoch. The epoch is one more than the Lease's
// transitions as this process wrote them when it won, before anything that runs only
// on the leader has started. It never falls while the process leads, even if the Lease
// is changed. Raise raises it above an epoch that drivers have seen.
type leaderLock struct {
	resourcelock.Interface

	lease   *resourcelock.LeaseLock
	sidecar *sidecarLease // held along with it
	elect   bool          // false: this process seizes the Lease, and nothing renews it
	epoch   atomic.Uint64
	above   atomic.Int64  // the next write must raise the epoch above this
	higher  chan struct{} // signals that the epoch has changed

	former    string       // the last other holder
	before    metav1.Time  // when the previous leader last renewed; only the election uses it
	unwatched atomic.Int64 // from then until this process led, in nanoseconds

	frozen atomic.Pointer[string] // value of labelFrozen for the next renewal; nil keeps it
}

// newLeaderLock returns the lock. Without an election it begins an epoch.
func newLeaderLock(ctx context.Context, cfg *rest.Config, o *options) (*leaderLock, error) {
	cfg = rest.AddUserAgent(cfg, "leader-election")
	cfg.Timeout = max(o.lease.renewDeadline/2, minLeaseTimeout)
	clientset, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("connect to the control cluster for leader election: %w", err)
	}
	lease := &resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: o.namespace, Name: leaseName},
		Client:     clientset.CoordinationV1(),
		LockConfig: resourcelock.ResourceLockConfig{Identity: identity() + "_" + string(uuid.NewUUID())},
	}

	other := *lease
	other.LeaseMeta.Name = sidecarLeaseName
	lock := &leaderLock{
		Interface: lease, lease: lease, elect: o.lease.elect, higher: make(chan struct{}, 1),
		sidecar: &sidecarLease{lock: &other, duration: o.lease.leaseDuration},
	}
	if !o.lease.elect {
		if _, _, err := lock.Get(ctx); err != nil && !apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("read Lease %s: %w", lock.Describe(), err)
		}
		if err := lock.sidecar.await(ctx, lock.former); err != nil {
			return nil, err
		}
		if err := lock.seize(ctx); err != nil {
			return nil, err
		}
	}

	return lock, nil
}

// Get implements [resourcelock.Interface], as do Create and Update. It records when the
// previous leader last renewed the Lease.
func (l *leaderLock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	r, raw, err := l.Interface.Get(ctx)
	if err == nil && r.HolderIdentity != l.Identity() {
		l.former, l.before = r.HolderIdentity, r.RenewTime
	}

	return r, raw, err
}

// Create records the epoch once it is written, as does Update.
func (l *leaderLock) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	if err := l.holdSidecar(ctx, r); err != nil {
		return err
	}
	r = l.counted(r)
	err := l.Interface.Create(ctx, r)
	l.written(r, err)

	return err
}

func (l *leaderLock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	if err := l.holdSidecar(ctx, r); err != nil {
		return err
	}
	if frozen := l.frozen.Load(); frozen != nil && l.elect {
		l.lease.Labels = map[string]string{labelFrozen: *frozen} // Update keeps other labels
	}
	r = l.counted(r)
	err := l.Interface.Update(ctx, r)
	l.written(r, err)

	return err
}

// holdSidecar holds the other Lease before mcm's own is acquired or renewed, and releases it with that.
func (l *leaderLock) holdSidecar(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	switch {
	case !l.elect: // held since the start
		return nil
	case r.HolderIdentity == l.Identity():
		return l.sidecar.hold(ctx, l.former)
	default:
		if err := l.sidecar.release(ctx); err != nil { // it expires
			klog.Background().Info("a Lease was not released", "err", err.Error())
		}

		return nil
	}
}

// counted returns the record with transitions that never fall, and that rise if the
// epoch is to be raised.
func (l *leaderLock) counted(r resourcelock.LeaderElectionRecord) resourcelock.LeaderElectionRecord {
	r.LeaderTransitions = max(r.LeaderTransitions, int(l.epoch.Load())-1, int(l.above.Load()))

	return r
}

func (l *leaderLock) written(r resourcelock.LeaderElectionRecord, err error) {
	if err != nil || r.HolderIdentity != l.Identity() {
		return
	}
	if epoch := uint64(r.LeaderTransitions) + 1; l.epoch.Swap(epoch) != epoch {
		select {
		case l.higher <- struct{}{}:
		default:
		}
	}
	if !l.before.IsZero() {
		l.unwatched.Store(int64(r.RenewTime.Sub(l.before.Time)))
		l.before = metav1.Time{}
	}
}

// Unwatched returns how long no process led before this one did, by the clocks of both
// leaders; 0 if unknown. As a leader that cannot reach the API server exits, the API
// server was away at least this long.
func (l *leaderLock) Unwatched() time.Duration { return time.Duration(l.unwatched.Load()) }

// Frozen and SetFrozen implement [machine.OutageMemory]. Without an election nothing
// renews the Lease, and nothing is noted.
func (l *leaderLock) Frozen(ctx context.Context) (bool, error) {
	lease, err := l.lease.Client.Leases(l.lease.LeaseMeta.Namespace).Get(ctx, l.lease.LeaseMeta.Name, metav1.GetOptions{})
	if err != nil {
		return false, fmt.Errorf("read Lease %s: %w", l.Describe(), err)
	}

	return lease.Labels[labelFrozen] == strconv.FormatBool(true), nil
}

// SetFrozen has the next renewal of the Lease say whether machines are frozen.
func (l *leaderLock) SetFrozen(frozen bool) { l.frozen.Store(new(strconv.FormatBool(frozen))) }

// Epoch returns the epoch of the current leadership; 0 before the first.
func (l *leaderLock) Epoch() uint64 { return l.epoch.Load() }

// maxRaise leaves room for elections in the Lease's transitions, which have 31 bits.
const maxRaise = 1 << 30

// Raise implements [dispatch.Leadership]. With an election the next renewal of the
// Lease writes the new epoch, which only the leader can do. It must not be called
// concurrently.
func (l *leaderLock) Raise(ctx context.Context, above uint64) error {
	if above >= maxRaise {
		return fmt.Errorf("cannot store an epoch above %d in Lease %s: restart the drivers that have seen it", above, l.Describe())
	}
	l.above.Store(int64(above))
	if !l.elect {
		return l.seize(ctx)
	}
	for l.epoch.Load() <= above {
		select {
		case <-ctx.Done():
			return fmt.Errorf("write a higher epoch to Lease %s: %w", l.Describe(), ctx.Err())
		case <-l.higher:
		}
	}

	return nil
}

// seize begins an epoch without an election, for a manager that is the only one. It
// continues the Lease's count, so that a later election works.
func (l *leaderLock) seize(ctx context.Context) error {
	const tries = 5
	var err error
	for range tries {
		now := metav1.Now()
		mine := resourcelock.LeaderElectionRecord{HolderIdentity: l.Identity(), LeaseDurationSeconds: 1, AcquireTime: now, RenewTime: now}
		var old *resourcelock.LeaderElectionRecord
		old, _, err = l.Get(ctx)
		switch {
		case apierrors.IsNotFound(err):
			err = l.Create(ctx, mine)
		case err == nil:
			mine.LeaderTransitions = old.LeaderTransitions + 1
			err = l.Update(ctx, mine)
		}
		if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("store the epoch in Lease %s: %w", l.Describe(), err)
	}
	l.unwatched.Store(0) // unknown: without an election nothing renews the Lease

	return nil
}
