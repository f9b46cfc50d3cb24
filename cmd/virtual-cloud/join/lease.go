package join

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A kubelet renews its Lease four times in the Lease's duration.
const renewalsPerLease = 4

// beats is the Lease as the kubelet last wrote it, so that it need not be read.
type beats struct{ lease *coordinationv1.Lease }

// renew renews the Lease of the instance's Node, or creates it.
func (j *Joiner) renew(ctx context.Context, k *kubelet) error {
	leases := j.client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	name := k.instance.NodeName
	var err error
	if k.beats.lease != nil {
		var renewed *coordinationv1.Lease
		renewed, err = leases.Update(ctx, j.leaseOf(k, k.beats.lease), metav1.UpdateOptions{})
		if err == nil {
			k.beats.lease = renewed

			return nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return fmt.Errorf("lease of node %s: %w", name, err)
		}
	}
	// Another client has changed or deleted it, or it is from an earlier run.
	k.beats.lease = nil
	lease, err := leases.Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		lease, err = leases.Create(ctx, j.leaseOf(k, &coordinationv1.Lease{}), metav1.CreateOptions{})
	case err == nil:
		lease, err = leases.Update(ctx, j.leaseOf(k, lease), metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("lease of node %s: %w", name, err)
	}
	k.beats.lease = lease

	return nil
}

// leaseOf returns a renewed copy of base. The Node owns it, so that both are deleted.
func (j *Joiner) leaseOf(k *kubelet, base *coordinationv1.Lease) *coordinationv1.Lease {
	lease := base.DeepCopy()
	lease.Name, lease.Namespace = k.instance.NodeName, corev1.NamespaceNodeLease
	lease.OwnerReferences = []metav1.OwnerReference{
		{APIVersion: "v1", Kind: "Node", Name: k.instance.NodeName, UID: k.node.uid},
	}
	// The API requires whole seconds above 0.
	lease.Spec.LeaseDurationSeconds = new(max(1, int32(renewalsPerLease*j.period/time.Second)))
	lease.Spec.HolderIdentity = new(k.instance.NodeName)
	lease.Spec.RenewTime = new(metav1.NowMicro())

	return lease
}
