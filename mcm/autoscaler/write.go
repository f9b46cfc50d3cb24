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

// maxConflicts bounds the attempts at one change.
const maxConflicts = 5

// A plan changes d, a copy of a group's deployment, and reports whether to store it. It is
// called again after a conflict, with the newer version.
type plan func(g *group, d *v1alpha1.MachineDeployment) (change bool, err error)

// write changes a group's deployment in one update under its resource version. It retries
// after a conflict, which proves that nothing was stored. It does not retry other errors,
// because the update may have been stored.
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
			s.showStored(ctx, after)
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

	return status.Errorf(codes.Aborted, "MachineDeployment %s was changed by another program during each of %d attempts; nothing was done",
		id, maxConflicts)
}

// reread replaces a group's deployment by the stored one.
func (s *Server) reread(ctx context.Context, g *group) error {
	stored := &v1alpha1.MachineDeployment{}
	if err := s.cfg.Live.Get(ctx, client.ObjectKeyFromObject(g.deployment), stored); err != nil {
		return statusOf(err, "read MachineDeployment "+g.id)
	}
	s.showStored(ctx, stored)
	if now, err := s.group(ctx, g.id); err != nil || now.deployment.ResourceVersion != stored.ResourceVersion {
		return status.Errorf(codes.FailedPrecondition, "MachineDeployment %s is no node group any more: its annotations have changed", g.id)
	}

	return nil
}

// A groupLock serializes the writes of a group.
type groupLock struct {
	taken chan struct{}
	users int // number of calls that hold it or wait for it
}

// lock locks a group for one write. It returns an error if ctx ends before.
func (s *Server) lock(ctx context.Context, id string) (unlock func(), err error) {
	s.mu.Lock()
	t := s.locks[id]
	if t == nil {
		t = &groupLock{taken: make(chan struct{}, 1)}
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

// statusOf converts an error of the API server to a gRPC status.
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
