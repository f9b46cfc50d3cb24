package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
)

// sidecarLeaseName is the Lease of the machine controller manager's other program. That one
// runs the machine controller and one provider's driver; the Lease leaseName is of the first one.
// mcm does the work of both, so it works only while it holds both Leases.
const sidecarLeaseName = "machine-controller"

// A sidecarLease is taken and renewed along with mcm's own Lease. Only the election uses
// it, one call at a time; the check may be called concurrently.
type sidecarLease struct {
	lock     *resourcelock.LeaseLock
	duration time.Duration

	mine   *resourcelock.LeaderElectionRecord // as this process last wrote it; nil: read it first
	wrote  time.Time
	raw    []byte    // the Lease as another held it
	since  time.Time // when it was first seen so: clocks of others do not count
	holder atomic.Pointer[string]
}

var (
	// errSidecar is wrapped when the other program works.
	errSidecar = errors.New("stop that program, or let it release the Lease: two machine controllers must not work on the same Machines")
	// errOtherMCM is wrapped when another mcm holds the Lease.
	errOtherMCM = errors.New("another mcm holds the Lease")
)

// isMCM reports whether the holder of a Lease is an mcm: the machine controller manager's
// programs are called by the name of their host alone, both of one Pod by the same.
func isMCM(holder string) bool { return strings.Contains(holder, "/") && strings.Contains(holder, "_") }

// hold takes the Lease, or renews it. It returns an error with errSidecar while another program
// holds it. Former is who led before: if that was an mcm, it has lost this Lease along with its
// lead. A renewal that fails counts only when the Lease is about to expire.
func (s *sidecarLease) hold(ctx context.Context, former string) error {
	err := s.renew(ctx)
	if s.mine == nil {
		err = s.take(ctx, former)
	}
	if !errors.Is(err, errSidecar) {
		s.holder.Store(nil)
	}
	if err != nil && s.mine != nil && time.Since(s.wrote) < s.duration*2/3 {
		klog.Background().V(1).Info("a Lease was not renewed; retries", "err", err.Error())

		return nil
	}

	return err
}

// renew writes the Lease that this process holds, without reading it. A conflict means that
// another has written it: then it is not held any more.
func (s *sidecarLease) renew(ctx context.Context) error {
	if s.mine == nil {
		return nil
	}
	now, record := time.Now(), *s.mine
	record.RenewTime = metav1.NewTime(now)
	err := s.lock.Update(ctx, record)
	switch {
	case err == nil:
		s.mine, s.wrote = &record, now
	case apierrors.IsConflict(err), apierrors.IsNotFound(err):
		s.mine = nil
	default:
		err = fmt.Errorf("renew the Lease %s: %w", s.lock.Describe(), err)
	}

	return err
}

// take reads the Lease and writes it, unless another holds it.
func (s *sidecarLease) take(ctx context.Context, former string) error {
	now := time.Now()
	mine := resourcelock.LeaderElectionRecord{
		HolderIdentity: s.lock.Identity(), LeaseDurationSeconds: max(int(s.duration/time.Second), 1),
		AcquireTime: metav1.NewTime(now), RenewTime: metav1.NewTime(now),
	}
	old, raw, err := s.lock.Get(ctx)
	switch {
	case apierrors.IsNotFound(err):
		err = s.lock.Create(ctx, mine)
	case err != nil:
	case s.free(old, raw, former):
		mine.LeaderTransitions = old.LeaderTransitions + 1
		err = s.lock.Update(ctx, mine)
	case isMCM(old.HolderIdentity):
		return fmt.Errorf("%w %s: %s", errOtherMCM, s.lock.Describe(), old.HolderIdentity)
	default:
		s.holder.Store(&old.HolderIdentity)

		return s.heldBy(old.HolderIdentity)
	}
	if err != nil {
		return fmt.Errorf("hold the Lease %s: %w", s.lock.Describe(), err)
	}
	s.mine, s.wrote = &mine, now

	return nil
}

// free reports whether no other may be at work by the Lease: it has no holder, or that has not
// renewed it within the duration that it gave itself, or was an mcm and has lost its lead.
func (s *sidecarLease) free(old *resourcelock.LeaderElectionRecord, raw []byte, former string) bool {
	if old.HolderIdentity == "" || old.HolderIdentity == s.lock.Identity() || old.HolderIdentity == former && isMCM(former) {
		return true
	}
	if !bytes.Equal(raw, s.raw) {
		s.raw, s.since = raw, time.Now()
	}

	return time.Since(s.since) >= max(time.Duration(old.LeaseDurationSeconds)*time.Second, s.duration)
}

// release lets the other program take the Lease at once.
func (s *sidecarLease) release(ctx context.Context) error {
	if s.mine == nil {
		return nil
	}
	record := *s.mine
	record.HolderIdentity, record.LeaseDurationSeconds, record.RenewTime, s.mine = "", 1, metav1.Now(), nil
	if err := s.lock.Update(ctx, record); err != nil {
		return fmt.Errorf("release the Lease %s: %w", s.lock.Describe(), err)
	}

	return nil
}

// await holds the Lease for a manager without an election, which has one chance: it waits until
// a holder that does not renew the Lease counts as ended. One that does is an error.
func (s *sidecarLease) await(ctx context.Context, former string) error {
	err := s.hold(ctx, former)
	if err != nil {
		klog.Background().Info("mcm may have to wait for a Lease", "err", err.Error())
	}
	for errors.Is(err, errSidecar) || errors.Is(err, errOtherMCM) {
		seen := s.since
		pause := time.NewTimer(s.duration / 4)
		select {
		case <-ctx.Done():
			pause.Stop()

			return ctx.Err()
		case <-pause.C:
		}
		if err = s.hold(ctx, former); s.since.After(seen) {
			return err
		}
	}

	return err
}

// leads notes who holds mcm's own Lease: while another mcm leads, this one waits for that alone.
func (s *sidecarLease) leads(holder string) {
	if isMCM(holder) {
		s.holder.Store(nil)
	}
}

// check says why this mcm does not work.
func (s *sidecarLease) check(*http.Request) error {
	if holder := s.holder.Load(); holder != nil {
		return s.heldBy(*holder)
	}

	return nil
}

func (s *sidecarLease) heldBy(holder string) error {
	return fmt.Errorf("%s holds the Lease %s, as the machine controller of the machine controller manager does: %w",
		holder, s.lock.Describe(), errSidecar)
}
