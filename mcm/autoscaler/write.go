package autoscaler

import (
	"context"
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// maxConflicts is how often somebody else's write may come first.
const maxConflicts = 5

// A plan says what a write makes of a group's deployment, a copy that it changes;
// nil changes nothing. It may be asked again for a newer version.
type plan func(g *group, d *v1alpha1.MachineDeployment) (change bool, err error)

// write changes a group's deployment in one update, which is stored only if nobody
// has changed the deployment since. A conflict proves that nothing was stored, and
// is tried again; whatever else goes wrong is not, because it may have been.
func (s *Server) write(ctx context.Context, id string, what plan) error {
	unlock, err := s.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	for range maxConflicts {
		g, err := s.group(ctx, id)
		if err != nil {
			return err
		}
		after := g.deployment.DeepCopy()
		change, err := what(g, after)
		if err != nil || !change {
			return err
		}
		patch := client.MergeFromWithOptions(g.deployment, client.MergeFromWithOptimisticLock{})
		err = s.cfg.Control.Patch(ctx, after, patch)
		if err == nil {
			s.wrote(ctx, after)
			klog.FromContext(ctx).Info("node group scaled", "nodeGroup", id, "client", clientOf(ctx),
				"from", g.deployment.Spec.Replicas, "to", after.Spec.Replicas,
				"marked", after.Annotations[v1alpha1.AnnotationKeyTriggerDeletion])

			return nil
		}
		if !apierrors.IsConflict(err) {
			return statusOf(err, "update MachineDeployment "+id)
		}
		if err := s.reread(ctx, g); err != nil {
			return err
		}
	}

	return status.Errorf(codes.Aborted, "MachineDeployment %s is changed by others all the time; nothing was done", id)
}

// reread replaces a group's deployment by what is stored.
func (s *Server) reread(ctx context.Context, g *group) error {
	stored := &v1alpha1.MachineDeployment{}
	if err := s.cfg.Live.Get(ctx, client.ObjectKeyFromObject(g.deployment), stored); err != nil {
		return statusOf(err, "read MachineDeployment "+g.id)
	}
	s.wrote(ctx, stored)
	if now, err := s.group(ctx, g.id); err != nil || now.deployment.ResourceVersion != stored.ResourceVersion {
		return status.Errorf(codes.FailedPrecondition, "MachineDeployment %s is no node group any more", g.id)
	}

	return nil
}

// A turn is whose write it is at a group.
type turn struct {
	taken chan struct{}
	users int // who have it, or wait for it
}

// lock lets one write at a time at a group.
func (s *Server) lock(ctx context.Context, id string) (unlock func(), err error) {
	s.mu.Lock()
	t := s.locks[id]
	if t == nil {
		t = &turn{taken: make(chan struct{}, 1)}
		s.locks[id] = t
	}
	t.users++
	s.mu.Unlock()
	leave := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		t.users--
		if t.users == 0 {
			delete(s.locks, id) // ids are what clients send
		}
	}
	select {
	case t.taken <- struct{}{}:
		return func() { <-t.taken; leave() }, nil
	case <-ctx.Done():
		leave()

		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

// statusOf says by a code what an API server's error means to the
// cluster-autoscaler.
func statusOf(err error, doing string) error {
	code := codes.Unavailable
	switch {
	case errors.Is(err, context.DeadlineExceeded), apierrors.IsTimeout(err):
		code = codes.DeadlineExceeded
	case errors.Is(err, context.Canceled):
		code = codes.Canceled
	case apierrors.IsNotFound(err):
		code = codes.NotFound
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		code = codes.PermissionDenied
	case apierrors.IsInvalid(err):
		code = codes.FailedPrecondition
	}

	return status.Errorf(code, "%s: %v", doing, err)
}
