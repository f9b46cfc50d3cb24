package drain

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
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
		volume, err := r.volumeOf(ctx, pod.Namespace, name)
		if err != nil {
			return nil, fmt.Errorf("read persistent volume claim %s/%s: %w", pod.Namespace, name, err)
		}
		if volume != "" {
			volumes = append(volumes, volume)
		}
	}

	return volumes, nil
}

// volumeOf returns the volume that a claim is bound to; empty for none. The roles of the machine
// controller manager let claims be listed, and not be read by name.
func (r *run) volumeOf(ctx context.Context, namespace, claim string) (string, error) {
	release, err := r.acquireSlot(ctx)
	if err != nil {
		return "", err
	}
	defer release()
	list, err := r.client.CoreV1().PersistentVolumeClaims(namespace).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, claim).String(),
	})
	if err != nil || len(list.Items) == 0 {
		return "", err
	}

	return list.Items[0].Spec.VolumeName, nil
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
