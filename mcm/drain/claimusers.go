package drain

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// A claimUser is a pod that mounts a PersistentVolumeClaim.
type claimUser struct {
	uid  types.UID
	node string // empty: not scheduled yet
}

// claimUsers are the pods of one namespace that mount each claim, without those in deletion.
type claimUsers map[string][]claimUser

func (u claimUsers) add(pod *corev1.Pod) {
	if !pod.DeletionTimestamp.IsZero() {
		return
	}
	for _, claim := range claimsOf(pod) {
		u[claim] = append(u[claim], claimUser{pod.UID, pod.Spec.NodeName})
	}
}

// claimUsers returns those of a namespace.
func (r *run) claimUsers(ctx context.Context, namespace string) (claimUsers, error) {
	r.mu.Lock()
	of, ok := r.users[namespace]
	if !ok {
		of = newShared[claimUsers]()
		r.users[namespace] = of
	}
	r.mu.Unlock()

	return of.get(ctx, successorPolls*r.settings.Poll/2, func(ctx context.Context) (claimUsers, error) {
		pods, err := r.podsIn(ctx, namespace)
		if err != nil {
			return nil, err
		}
		users := claimUsers{}
		for i := range pods {
			users.add(&pods[i])
		}

		return users, nil
	})
}

// wanted reports whether another pod mounts one of a gone pod's claims, and not on the drained Node.
func (e *evictionRound) wanted(ctx context.Context, v *victim) (bool, error) {
	users, err := e.claimUsers(ctx, v.pod.Namespace)
	if err != nil {
		return false, err
	}

	return slices.ContainsFunc(claimsOf(&v.pod), func(claim string) bool {
		return slices.ContainsFunc(users[claim], func(u claimUser) bool { return u.uid != v.pod.UID && u.node != e.req.Node.Name })
	}), nil
}
