package drain

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// An evictionRound evicts the pods that a drain found on the Node in one list.
type evictionRound struct {
	*run
	left     []*victim
	notified string  // the refusal of the last notice
	fatal    []error // of pods that cannot be evicted
}

// A victim is one pod of a round.
type victim struct {
	pod     corev1.Pod
	due     time.Time // of the next try to evict it
	tries   int
	refusal error // of the last try
	ending  bool  // evicted or deleted
	fatal   bool

	volumes  []string  // that its end sets free
	gone     time.Time // when it was seen to be gone; its volumes are waited for
	detached time.Time // when all of them were seen to be detached
	waits    string    // what they wait for
}

func (v *victim) name() string { return v.pod.Namespace + "/" + v.pod.Name }

func newEvictionRound(r *run, pods []corev1.Pod, volumes map[types.UID][]string) *evictionRound {
	e := &evictionRound{run: r}
	for i := range pods {
		e.left = append(e.left, &victim{pod: pods[i], ending: !pods[i].DeletionTimestamp.IsZero(), volumes: volumes[pods[i].UID]})
	}
	slices.SortStableFunc(e.left, byPriority)

	return e
}

// evictAndWait evicts the round's pods and waits until they are gone. Pods that can never be evicted
// do not keep it from evicting the others.
func (e *evictionRound) evictAndWait(ctx context.Context) error {
	for len(e.left) > 0 {
		e.evictDue(ctx)
		if len(e.left) == 0 {
			break
		}
		e.reportProgress()
		if err := pause(ctx, e.settings.Poll); err != nil {
			return e.unfinished(err)
		}
		here, err := e.podUIDs(ctx)
		switch {
		case errors.Is(err, errNodeGone):
			return err
		case err == nil:
			e.left = slices.DeleteFunc(e.left, func(v *victim) bool {
				return !here[v.pod.UID] && (len(v.volumes) == 0 || e.settleVolumes(ctx, v))
			})
		case ctx.Err() != nil:
			return e.unfinished(err)
		default:
			e.log.V(1).Info("cannot list the pods of the node; retries", "after", e.settings.Poll.String(), "err", err.Error())
		}
	}

	return join(e.fatal...)
}

// evictDue tries to evict all pods that are due, in parallel; of those with volumes only one.
func (e *evictionRound) evictDue(ctx context.Context) {
	var all sync.WaitGroup
	now := time.Now()
	turn := e.nextWithVolumes(now)
	for _, v := range e.left {
		if !v.ending && !now.Before(v.due) && (len(v.volumes) == 0 || v == turn) {
			all.Go(func() {
				if err := recoverPanic(e.log, func() error { e.evict(ctx, v); return nil }); err != nil {
					v.refusal, v.fatal = fmt.Errorf("evict pod %s: %w", v.name(), err), true
				}
			})
		}
	}
	all.Wait()
	e.left = slices.DeleteFunc(e.left, func(v *victim) bool {
		if v.fatal {
			e.fatal = append(e.fatal, v.refusal)
		}

		return v.fatal
	})
}

// evict tries once to evict a pod.
func (e *evictionRound) evict(ctx context.Context, v *victim) {
	if v.tries > e.req.MaxEvictRetries {
		e.log.Info("deleting the pod whatever its disruption budgets allow: its evictions were refused", "pod", v.name(), "tries", v.tries)
		v.refusal = e.delete(ctx, &v.pod)
		v.ending = v.refusal == nil
		v.due = time.Now().Add(e.settings.EvictRetry)

		return
	}
	err := e.tryEvict(ctx, v)
	if err != nil && ctx.Err() != nil && v.refusal != nil {
		return // the time is over: the last refusal says more
	}
	switch {
	case err == nil || gone(err):
		e.metrics.evictions.WithLabelValues(evicted).Inc()
		e.log.V(1).Info("evicted", "pod", v.name())
		v.ending, v.refusal = true, nil

		return
	case apierrors.IsTooManyRequests(err):
		e.metrics.evictions.WithLabelValues(refused).Inc()
		misconfigured, lookup := e.misconfigured(ctx, &v.pod)
		if lookup != nil {
			e.log.V(1).Info("cannot check whether a disruption budget is misconfigured", "pod", v.name(), "err", lookup.Error())
		}
		v.fatal = misconfigured != nil
		err = cmp.Or(misconfigured, err)
	default:
		e.metrics.evictions.WithLabelValues(failed).Inc()
		v.fatal = permanent(err)
	}
	v.refusal = fmt.Errorf("evict pod %s: %w", v.name(), err)
	v.tries++
	v.due = time.Now().Add(e.settings.EvictRetry)
}

func (e *evictionRound) tryEvict(ctx context.Context, v *victim) error {
	release, err := e.acquireSlot(ctx)
	if err != nil {
		return err
	}
	defer release()

	// As Evictions().Evict does, but without its retries, which would occupy a slot for
	// minutes.
	return e.client.PolicyV1().RESTClient().Post().AbsPath("/api/v1").Namespace(v.pod.Namespace).
		Resource("pods").Name(v.pod.Name).SubResource("eviction").MaxRetries(0).
		Body(&policyv1.Eviction{
			ObjectMeta:    metav1.ObjectMeta{Namespace: v.pod.Namespace, Name: v.pod.Name},
			DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &v.pod.UID}},
		}).Do(ctx).Error()
}

// permanent reports whether a retry would return the same error, unlike one of a busy or
// restarting API server. A namespace in deletion refuses evictions but deletes its pods
// itself, so its refusal is not permanent.
func permanent(err error) bool {
	switch {
	case apierrors.IsForbidden(err):
		return !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
	case apierrors.IsBadRequest(err), apierrors.IsInvalid(err), apierrors.IsMethodNotSupported(err), apierrors.IsUnauthorized(err):
		return true
	default:
		return false
	}
}

// reportProgress reports what the drain waits for, and notifies of a new refusal.
func (e *evictionRound) reportProgress() {
	var ending, volumes []string
	refusal := ""
	if len(e.fatal) > 0 {
		refusal = e.fatal[0].Error()
	}
	for _, v := range e.left {
		switch {
		case v.refusal != nil && refusal == "":
			refusal = v.refusal.Error()
		case !v.gone.IsZero():
			volumes = append(volumes, v.waits)
		case v.ending:
			ending = append(ending, v.name())
		}
	}
	notify := refusal != "" && refusal != e.notified
	e.notified = refusal
	switch {
	case refusal != "":
		e.report(fmt.Sprintf("%d pods left: %s", len(e.left), refusal), true, notify)
	case len(ending) > 0:
		e.report(fmt.Sprintf("%d pods are terminating: %s", len(ending), firstFew(ending)), false, false)
	case len(volumes) > 0:
		e.report(firstFew(volumes), false, false)
	}
}

// unfinished returns the error of a drain whose time is over.
func (e *evictionRound) unfinished(cause error) error {
	var names, volumes []string
	for _, v := range e.left {
		if v.gone.IsZero() {
			names = append(names, v.name())
		} else {
			volumes = append(volumes, v.waits)
		}
	}
	left := fmt.Sprintf("%d pods left: %s", len(names), firstFew(names))
	if len(names) == 0 {
		left = firstFew(volumes)
	}
	errs := append([]error{fmt.Errorf("%w: %s", cause, left)}, e.fatal...)
	for _, v := range e.left {
		if v.refusal != nil {
			errs = append(errs, v.refusal)

			break // as an example
		}
	}

	return join(errs...)
}
