package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// sidecarLeaseName is the Lease of the machine controller manager's other program. That one
// runs the machine controller and one provider's driver, beside the program whose Lease is
// leaseName. mcm does the work of both, so it works only while it holds both Leases.
const sidecarLeaseName = "machine-controller"

// A sidecarLease is taken and renewed along with mcm's own Lease. Only the election uses
// it, one call at a time; the check may be called concurrently.
type sidecarLease struct {
	lock     *resourcelock.LeaseLock
	duration time.Duration

	raw    []byte    // the Lease as another held it
	since  time.Time // when it was first seen so: clocks of others do not count
	holder atomic.Pointer[string]
}

// errSidecar is wrapped when the other program works.
var errSidecar = errors.New("stop that program, or let it release the Lease: two machine controllers must not work on the same Machines")

// hold takes the Lease, or renews it. It returns an error with errSidecar while another holds it. Former
// is the mcm that led before: it has lost its lead, and with it this Lease.
func (s *sidecarLease) hold(ctx context.Context, former string) error {
	err := s.tryHold(ctx, former)
	if !errors.Is(err, errSidecar) {
		s.holder.Store(nil)
	}

	return err
}

func (s *sidecarLease) tryHold(ctx context.Context, former string) error {
	now := metav1.Now()
	mine := resourcelock.LeaderElectionRecord{
		HolderIdentity: s.lock.Identity(), LeaseDurationSeconds: max(int(s.duration/time.Second), 1), AcquireTime: now, RenewTime: now,
	}
	old, raw, err := s.lock.Get(ctx)
	switch {
	case apierrors.IsNotFound(err):
		err = s.lock.Create(ctx, mine)
	case err != nil:
	case old.HolderIdentity == mine.HolderIdentity:
		mine.AcquireTime, mine.LeaderTransitions = old.AcquireTime, old.LeaderTransitions
		err = s.lock.Update(ctx, mine)
	case old.HolderIdentity != "" && old.HolderIdentity != former && s.alive(old, raw):
		s.holder.Store(&old.HolderIdentity)

		return fmt.Errorf("%s holds the Lease %s, as the machine controller of the machine controller manager does: %w",
			old.HolderIdentity, s.lock.Describe(), errSidecar)
	default:
		mine.LeaderTransitions = old.LeaderTransitions + 1
		err = s.lock.Update(ctx, mine)
	}
	if err != nil {
		return fmt.Errorf("hold the Lease %s: %w", s.lock.Describe(), err)
	}

	return nil
}

// alive reports whether the holder may be at work: it has renewed the Lease within the
// duration that it gave itself.
func (s *sidecarLease) alive(old *resourcelock.LeaderElectionRecord, raw []byte) bool {
	if !bytes.Equal(raw, s.raw) {
		s.raw, s.since = raw, time.Now()
	}

	return time.Since(s.since) < max(time.Duration(old.LeaseDurationSeconds)*time.Second, s.duration)
}

// release lets the other program take the Lease at once.
func (s *sidecarLease) release(ctx context.Context) error {
	old, _, err := s.lock.Get(ctx)
	if err == nil && old.HolderIdentity == s.lock.Identity() {
		err = s.lock.Update(ctx, resourcelock.LeaderElectionRecord{LeaseDurationSeconds: 1, LeaderTransitions: old.LeaderTransitions, AcquireTime: old.AcquireTime, RenewTime: metav1.Now()})
	}
	if err != nil {
		return fmt.Errorf("release the Lease %s: %w", s.lock.Describe(), err)
	}

	return nil
}

// await holds the Lease for a manager without an election, which has one chance: it waits until
// a holder that has ended counts as ended.
func (s *sidecarLease) await(ctx context.Context, former string) error {
	err := s.hold(ctx, former)
	for errors.Is(err, errSidecar) {
		seen := s.since
		pause := time.NewTimer(s.duration / 4)
		select {
		case <-ctx.Done():
			pause.Stop()

			return ctx.Err()
		case <-pause.C:
		}
		if err = s.hold(ctx, former); s.since.After(seen) {
			return err // it is alive
		}
	}

	return err
}

// check says why this mcm does not work.
func (s *sidecarLease) check(*http.Request) error {
	if holder := s.holder.Load(); holder != nil {
		return fmt.Errorf("%s holds the Lease %s, as the machine controller of the machine controller manager does: %w",
			*holder, s.lock.Describe(), errSidecar)
	}

	return nil
}
