package fetch

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// readClass reads a class that is at least as new as the reference, from the cache if
// possible. It returns a deleted class as it was last seen.
func (h *Handler) readClass(ctx context.Context, key client.ObjectKey, want *driverv1.ObjectReference) (*v1alpha1.MachineClass, error) {
	class := &v1alpha1.MachineClass{}
	err := h.Reader.Get(ctx, key, class)
	if apierrors.IsNotFound(err) && h.Removed != nil {
		if removed := h.Removed.Class(key); removed != nil {
			class, err = removed, nil
		}
	}
	if h.Live == nil || !behind(class, err, want) {
		return class, err
	}
	list := &v1alpha1.MachineClassList{}
	if failed := h.Live.List(ctx, list, only(key)...); failed != nil {
		return nil, failed
	}
	if len(list.Items) == 1 {
		return &list.Items[0], nil
	}

	return class, err
}

// readSecret is readClass for secrets.
func (h *Handler) readSecret(ctx context.Context, key client.ObjectKey, want *driverv1.ObjectReference) (*corev1.Secret, error) {
	secret := &corev1.Secret{}
	err := h.Reader.Get(ctx, key, secret)
	if apierrors.IsNotFound(err) && h.Removed != nil {
		if removed := h.Removed.Secret(key); removed != nil {
			secret, err = removed, nil
		}
	}
	if h.Live == nil || !behind(secret, err, want) {
		return secret, err
	}
	list := &corev1.SecretList{}
	if failed := h.Live.List(ctx, list, only(key)...); failed != nil {
		return nil, failed
	}
	if len(list.Items) == 1 {
		return &list.Items[0], nil
	}

	return secret, err
}

// behind reports whether a read object, or a missing one, is older than the reference to
// it. Resource versions are ordered: KEP-5504.
func behind(found client.Object, err error, want *driverv1.ObjectReference) bool {
	if err != nil {
		return apierrors.IsNotFound(err)
	}
	order, err := resourceversion.CompareResourceVersion(found.GetResourceVersion(), want.GetResourceVersion())

	return err == nil && order < 0 // lastgood's resource versions have no order
}

// only selects one object of a list. mcm has the permission to list classes and secrets,
// for its caches, and needs no further one to read them.
func only(key client.ObjectKey) []client.ListOption {
	return []client.ListOption{client.InNamespace(key.Namespace), client.MatchingFields{metav1.ObjectNameField: key.Name}}
}
