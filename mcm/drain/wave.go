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
)

// A wave is the pods that a drain found on the Node at one moment.
type wave struct {
	*run
	left  []*victim
	told  string  // the refusal that was notified last
	fatal []error // of pods that are given up
}

// A victim is one pod of a wave.
type victim struct {
	pod     corev1.Pod
	due     time.Time // of the next try to evict it
	tries   int
	refusal error // how the last try failed
	going   bool  // its end was accepted; it only has to come
	fatal   bool
}

func (v *victim) name() string { return v.pod.Namespace + "/" + v.pod.Name }

func newWave(r *run, pods []corev1.Pod) *wave {
	w := &wave{run: r}
	for i := range pods {
		w.left = append(w.left, &victim{pod: pods[i], going: !pods[i].DeletionTimestamp.IsZero()})
	}

	return w
}

// drain evicts the wave's pods and waits until they are gone. Pods that can
// never be evicted do not keep it from evicting the others.
func (w *wave) drain(ctx context.Context) error {
	for len(w.left) > 0 {
		w.evictDue(ctx)
		if len(w.left) == 0 {
			break
		}
		w.tell()
		if err := pause(ctx, w.settings.Poll); err != nil {
			return w.unfinished(err)
		}
		here, err := w.present(ctx)
		switch {
		case errors.Is(err, errNodeGone):
			return err
		case err == nil:
			w.left = slices.DeleteFunc(w.left, func(v *victim) bool { return !here[v.pod.UID] })
		case ctx.Err() != nil:
			return w.unfinished(err)
		default:
			w.log.V(1).Info("cannot look after the pods, trying again", "err", err.Error())
		}
	}

	return join(w.fatal...)
}

// evictDue tries to evict all pods whose time has come, at once.
func (w *wave) evictDue(ctx context.Context) {
	var all sync.WaitGroup
	for _, v := range w.left {
		if !v.going && !time.Now().Before(v.due) {
			all.Go(func() {
				if err := safely(w.log, func() error { w.evict(ctx, v); return nil }); err != nil {
					v.refusal, v.fatal = fmt.Errorf("evict pod %s: %w", v.name(), err), true
				}
			})
		}
	}
	all.Wait()
	w.left = slices.DeleteFunc(w.left, func(v *victim) bool {
		if v.fatal {
			w.fatal = append(w.fatal, v.refusal)
		}

		return v.fatal
	})
}

// evict tries once to evict a pod.
func (w *wave) evict(ctx context.Context, v *victim) {
	if v.tries > w.req.MaxEvictRetries {
		w.log.Info("pod is deleted without asking its disruption budgets", "pod", v.name(), "tries", v.tries)
		v.refusal = w.delete(ctx, &v.pod)
		v.going = v.refusal == nil
		v.due = time.Now().Add(w.settings.EvictRetry)

		return
	}
	err := w.tryEvict(ctx, v)
	if err != nil && ctx.Err() != nil && v.refusal != nil {
		return // the time is over: what kept the pod until now says more
	}
	switch {
	case err == nil || gone(err):
		w.metrics.evictions.WithLabelValues(evicted).Inc()
		w.log.V(1).Info("evicted", "pod", v.name())
		v.going, v.refusal = true, nil

		return
	case apierrors.IsTooManyRequests(err):
		w.metrics.evictions.WithLabelValues(refused).Inc()
		misconfigured, lookup := w.misconfigured(ctx, &v.pod)
		if lookup != nil {
			w.log.V(1).Info("cannot tell whether a disruption budget is misconfigured", "pod", v.name(), "err", lookup.Error())
		}
		v.fatal = misconfigured != nil
		err = cmp.Or(misconfigured, err)
	default:
		w.metrics.evictions.WithLabelValues(failed).Inc()
		v.fatal = hopeless(err)
	}
	v.refusal = fmt.Errorf("evict pod %s: %w", v.name(), err)
	v.tries++
	v.due = time.Now().Add(w.settings.EvictRetry)
}

func (w *wave) tryEvict(ctx context.Context, v *victim) error {
	giveBack, err := w.take(ctx)
	if err != nil {
		return err
	}
	defer giveBack()

	// As Evictions().Evict does, but without its retries: they would go on for
	// minutes with the right to send a request in hand.
	return w.client.PolicyV1().RESTClient().Post().AbsPath("/api/v1").Namespace(v.pod.Namespace).
		Resource("pods").Name(v.pod.Name).SubResource("eviction").MaxRetries(0).
		Body(&policyv1.Eviction{
			ObjectMeta:    metav1.ObjectMeta{Namespace: v.pod.Namespace, Name: v.pod.Name},
			DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &v.pod.UID}},
		}).Do(ctx).Error()
}

// hopeless tells an error that trying again cannot mend from one of a busy or
// restarting API server. A namespace that is being deleted refuses evictions, and
// deletes its pods itself.
func hopeless(err error) bool {
	switch {
	case apierrors.IsForbidden(err):
		return !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
	case apierrors.IsBadRequest(err), apierrors.IsInvalid(err), apierrors.IsMethodNotSupported(err), apierrors.IsUnauthorized(err):
		return true
	default:
		return false
	}
}

// tell says what is waited for; a refusal that is new is worth a notice.
func (w *wave) tell() {
	var ending []string
	refusal := ""
	if len(w.fatal) > 0 {
		refusal = w.fatal[0].Error()
	}
	for _, v := range w.left {
		switch {
		case v.refusal != nil && refusal == "":
			refusal = v.refusal.Error()
		case v.refusal == nil:
			ending = append(ending, v.name())
		}
	}
	news := refusal != "" && refusal != w.told
	w.told = refusal
	switch {
	case refusal != "":
		w.say(fmt.Sprintf("%d pods left: %s", len(w.left), refusal), true, news)
	case len(ending) > 0:
		w.say(fmt.Sprintf("%d pods are ending: %s", len(ending), some(ending)), false, false)
	}
}

// unfinished is the error of a drain whose time is over.
func (w *wave) unfinished(cause error) error {
	names := make([]string, 0, len(w.left))
	for _, v := range w.left {
		names = append(names, v.name())
	}
	errs := append([]error{fmt.Errorf("%w: %d pods left: %s", cause, len(names), some(names))}, w.fatal...)
	for _, v := range w.left {
		if v.refusal != nil {
			errs = append(errs, v.refusal)

			break // one stands for all
		}
	}

	return join(errs...)
}
