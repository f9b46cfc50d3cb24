package drain

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// claimsOf returns the names of the PersistentVolumeClaims that a pod mounts.
func claimsOf(pod *corev1.Pod) []string {
	var claims []string
	for i := range pod.Spec.Volumes {
		switch v := &pod.Spec.Volumes[i]; {
		case v.PersistentVolumeClaim != nil:
			claims = append(claims, v.PersistentVolumeClaim.ClaimName)
		case v.Ephemeral != nil:
			claims = append(claims, pod.Name+"-"+v.Name) // KEP-1698
		}
	}

	return claims
}

// volumesOf returns the names of the PersistentVolumes behind a pod's claims.
func (r *run) volumesOf(ctx context.Context, pod *corev1.Pod) ([]string, error) {
	var volumes []string
	for _, name := range claimsOf(pod) {
		claim, err := r.readClaim(ctx, pod.Namespace, name)
		if apierrors.IsNotFound(err) {
			continue // nothing is mounted
		}
		if err != nil {
			return nil, fmt.Errorf("read persistent volume claim %s/%s: %w", pod.Namespace, name, err)
		}
		if claim.Spec.VolumeName != "" {
			volumes = append(volumes, claim.Spec.VolumeName)
		}
	}

	return volumes, nil
}

func (r *run) readClaim(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error) {
	release, err := r.acquireSlot(ctx)
	if err != nil {
		return nil, err
	}
	defer release()

	return r.client.CoreV1().PersistentVolumeClaims(namespace).Get(ctx, name, metav1.GetOptions{})
}

// ownVolumesOf is ownVolumes for pods that are to be evicted. Without the right to read claims or
// attachments none are waited for, which is better than no drain at all.
func (r *run) ownVolumesOf(ctx context.Context, evictable []corev1.Pod) (map[types.UID][]string, error) {
	own, err := r.ownVolumes(ctx, evictable)
	if forbidden(err) {
		r.log.Info("volumes are not waited for", "err", err.Error())

		return nil, nil
	}

	return own, err
}

// forbidden reports whether mcm lacks a right in the target cluster.
func forbidden(err error) bool { return apierrors.IsForbidden(err) }

// ownVolumes returns for each of some pods the volumes that its end sets free: attached to the
// Node, and used by no other pod on it.
func (r *run) ownVolumes(ctx context.Context, some []corev1.Pod) (map[types.UID][]string, error) {
	if !slices.ContainsFunc(some, func(p corev1.Pod) bool { return len(claimsOf(&p)) > 0 }) {
		return nil, nil
	}
	attached, err := r.attached(ctx)
	if err != nil {
		return nil, err
	}
	pods, err := r.pods(ctx)
	if err != nil {
		return nil, err
	}
	of, users := map[types.UID][]string{}, map[string]int{}
	for i := range pods {
		volumes, err := r.volumesOf(ctx, &pods[i])
		if err != nil {
			return nil, err
		}
		of[pods[i].UID] = volumes
		for _, v := range volumes {
			users[v]++
		}
	}
	own := map[types.UID][]string{}
	for i := range some {
		uid := some[i].UID
		own[uid] = slices.DeleteFunc(of[uid], func(v string) bool { return users[v] > 1 || !attached.on(r.req.Node.Name, v) })
	}

	return own, nil
}

// byPriority orders pods from the most important on, as the machine controller manager does:
// what others need is back first.
func byPriority(a, b *victim) int { return cmp.Compare(priorityOf(b), priorityOf(a)) }

func priorityOf(v *victim) int32 {
	if v.pod.Spec.Priority == nil {
		return 0
	}

	return *v.pod.Spec.Priority
}
