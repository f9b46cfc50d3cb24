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

// EventDeletionBlocked is the reason of the Event on a class or secret that
// cannot go yet.
const EventDeletionBlocked = "DeletionBlocked"

// A keeper keeps objects of one kind while they are in use.
type keeper struct {
	client    client.Client
	events    record.EventRecorder
	finalizer string
	// kind and its user, one and many, in the words of the Event.
	kind, user, users string

	mu   sync.Mutex
	told map[types.UID]bool // whose blocked deletion an Event has told of
}

// keep gives the object its finalizer if it has users, and takes it away
// otherwise.
func (k *keeper) keep(ctx context.Context, object client.Object, users []string) error {
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
		// The API server takes no new finalizer from now on.
		if controllerutil.ContainsFinalizer(object, k.finalizer) {
			k.tell(object, users)
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
	// The lock is for the list of finalizers, which a merge patch replaces.
	err := k.client.Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("store finalizers of %s: %w", client.ObjectKeyFromObject(object), err)
	}
	ctrl.LoggerFrom(ctx).V(1).Info("finalizers changed", "finalizers", object.GetFinalizers())

	return nil
}

// tell records once what a deletion waits for: each user that goes starts another
// look, and would be another Event.
func (k *keeper) tell(object client.Object, users []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.told[object.GetUID()] {
		return
	}
	if k.told == nil {
		k.told = map[types.UID]bool{}
	}
	k.told[object.GetUID()] = true
	count := fmt.Sprintf("%d %s still use it", len(users), k.users)
	if len(users) == 1 {
		count = fmt.Sprintf("1 %s still uses it", k.user)
	}
	k.events.Eventf(object, corev1.EventTypeWarning, EventDeletionBlocked,
		"The %s stays until no %s refers to it: %s (%s)", k.kind, k.user, count, some(users))
}

func (k *keeper) forget(uid types.UID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.told, uid)
}

// some names the first few of many.
func some(names []string) string {
	const few = 5
	slices.Sort(names)
	if len(names) <= few {
		return strings.Join(names, ", ")
	}

	return fmt.Sprintf("%s and %d more", strings.Join(names[:few], ", "), len(names)-few)
}
