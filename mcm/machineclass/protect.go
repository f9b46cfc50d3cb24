package machineclass

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
)

// EventDeletionBlocked is the reason of the Event on a class or secret whose deletion waits
// for its users.
const EventDeletionBlocked = "DeletionBlocked"

// A protector protects objects of one kind from deletion while they are in use.
type protector struct {
	client    client.Client
	events    record.EventRecorder
	finalizer string
	// The kind of the objects, and of their users in singular and plural, for the Event.
	kind, user, users string

	mu       sync.Mutex
	reported map[types.UID]bool // objects with an Event about their blocked deletion
}

// protect adds the finalizer to an object that has users, and otherwise removes it.
func (k *protector) protect(ctx context.Context, object client.Object, users []string) error {
	before, ok := object.DeepCopyObject().(client.Object)
	if !ok {
		return fmt.Errorf("%T is no object", object)
	}
	deleting := !object.GetDeletionTimestamp().IsZero()
	var changed bool
	switch {
	case len(users) == 0:
		changed = controllerutil.RemoveFinalizer(object, k.finalizer)
	case deleting:
		// The API server refuses new finalizers on an object in deletion.
		if controllerutil.ContainsFinalizer(object, k.finalizer) {
			k.reportBlocked(object, users)
		}
	default:
		changed = controllerutil.AddFinalizer(object, k.finalizer)
	}
	if deleting && len(users) == 0 {
		k.forget(object.GetUID())
	}
	if !changed {
		return nil
	}
	// A merge patch replaces the whole list of finalizers, so it needs the optimistic lock.
	err := k.client.Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("store finalizers of %s: %w", client.ObjectKeyFromObject(object), err)
	}
	ctrl.LoggerFrom(ctx).V(1).Info("changed finalizers", "finalizers", object.GetFinalizers())

	return nil
}

// reportBlocked records an Event about a blocked deletion, once: each deleted user starts
// another pass.
func (k *protector) reportBlocked(object client.Object, users []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.reported[object.GetUID()] {
		return
	}
	if k.reported == nil {
		k.reported = map[types.UID]bool{}
	}
	k.reported[object.GetUID()] = true
	count := fmt.Sprintf("%d %s still use it", len(users), k.users)
	if len(users) == 1 {
		count = fmt.Sprintf("1 %s still uses it", k.user)
	}
	k.events.Eventf(object, corev1.EventTypeWarning, EventDeletionBlocked,
		"The %s cannot be deleted until no %s refers to it: %s (%s)", k.kind, k.user, count, firstFew(users))
}

func (k *protector) forget(uid types.UID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.reported, uid)
}

// firstFew lists the first names in order, and the number of the others.
func firstFew(names []string) string {
	const few = 5
	slices.Sort(names)
	if len(names) <= few {
		return strings.Join(names, ", ")
	}

	return fmt.Sprintf("%s and %d more", strings.Join(names[:few], ", "), len(names)-few)
}
