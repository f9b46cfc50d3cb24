package drain

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	kubectldrain "k8s.io/kubectl/pkg/drain"
)

// chunk is how many objects a list request returns at most.
const chunk = 500

// A run is one drain at work, in one goroutine.
type run struct {
	*Drainer
	req Request
	log logr.Logger
	say func(reason string, held, news bool)
}

// errNodeGone ends a drain: with the Node its pods are gone.
var errNodeGone = errors.New("the node is gone")

// drain empties the Node.
func (r *run) drain(parent context.Context) error {
	ctx, cancel := context.WithTimeout(parent, r.req.Timeout)
	defer cancel()
	err := r.steps(ctx)
	if errors.Is(err, errNodeGone) {
		r.log.V(1).Info("the node is gone, and with it its pods")

		return nil
	}
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("drain of node %s did not end within %s: %w", r.req.Node.Name, r.req.Timeout, err)
	}

	return err
}

func (r *run) steps(ctx context.Context) error {
	err := r.prepareNode(ctx)
	switch {
	case gone(err), errors.Is(err, errNodeGone):
		return errNodeGone
	case err != nil && !r.req.Force:
		return err
	case err != nil:
		r.log.Info("goes on all the same", "err", err.Error())
	}
	if !r.req.Force {
		return r.evictAll(ctx)
	}

	if r.req.Stays {
		return r.deletePods(ctx)
	}

	// What cannot be ended must not keep the volumes.
	return join(r.deletePods(ctx), r.detach(ctx))
}

// evictAll evicts until there is nothing left to evict: a pod may have come to
// the Node just before it was cordoned.
func (r *run) evictAll(ctx context.Context) error {
	for {
		pods, err := r.evictable(ctx)
		if err != nil || len(pods) == 0 {
			return err
		}
		if err := newWave(r, pods).drain(ctx); err != nil {
			return err
		}
	}
}

// deletePods ends the Node's pods at once and without waiting for them.
func (r *run) deletePods(ctx context.Context) error {
	pods, err := r.evictable(ctx)
	errs := []error{err} // of one pod, say, whose DaemonSet could not be read: the others go
	for i := range pods {
		errs = append(errs, r.delete(ctx, &pods[i]))
	}

	return join(errs...)
}

// detach deletes the Node's VolumeAttachments until there are none left that
// nobody deletes.
func (r *run) detach(ctx context.Context) error {
	for {
		giveBack, err := r.take(ctx)
		if err != nil {
			return err
		}
		n, err := DeleteVolumeAttachments(ctx, r.client, r.req.Node.Name)
		giveBack()
		if err != nil || n == 0 {
			return err
		}
		r.log.Info("deleted volume attachments", "count", n)
		if err := pause(ctx, r.settings.Poll); err != nil {
			return err
		}
	}
}

// delete deletes a pod with no time to end.
func (r *run) delete(ctx context.Context, pod *corev1.Pod) error {
	giveBack, err := r.take(ctx)
	if err != nil {
		return err
	}
	defer giveBack()
	err = r.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: new(int64), Preconditions: &metav1.Preconditions{UID: &pod.UID},
	})
	if err != nil && !gone(err) {
		r.metrics.evictions.WithLabelValues(failed).Inc()

		return fmt.Errorf("delete pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	r.metrics.evictions.WithLabelValues(deleted).Inc()

	return nil
}

// gone tells that a pod or the Node does not exist any more; one of the same name, on another
// Node perhaps, is a conflict.
func gone(err error) bool { return apierrors.IsNotFound(err) || apierrors.IsConflict(err) }

// helper is kubectl's, told to take all pods but mirror pods and those of
// DaemonSets. It finds the pods; the requests that end them are our own, for
// kubectl's say a name and no uid.
func (r *run) helper(ctx context.Context) *kubectldrain.Helper {
	return &kubectldrain.Helper{
		Ctx: ctx, Client: r.client, ChunkSize: chunk, Out: io.Discard, ErrOut: io.Discard,
		Force: true, IgnoreAllDaemonSets: true, DeleteEmptyDirData: true,
	}
}

// evictable returns the Node's pods that a drain removes. With an error, these are the
// ones that it could tell.
func (r *run) evictable(ctx context.Context) ([]corev1.Pod, error) {
	giveBack, err := r.take(ctx)
	if err != nil {
		return nil, err
	}
	defer giveBack()
	list, errs := r.helper(ctx).GetPodsForDeletion(r.req.Node.Name)
	var pods []corev1.Pod
	if list != nil {
		pods = list.Pods()
	}
	if err := join(errs...); err != nil {
		return pods, fmt.Errorf("list pods of node %s: %w", r.req.Node.Name, err)
	}

	return pods, nil
}

// present returns the uids of all of the Node's pods, or errNodeGone.
func (r *run) present(ctx context.Context) (map[types.UID]bool, error) {
	giveBack, err := r.take(ctx)
	if err != nil {
		return nil, err
	}
	defer giveBack()
	if _, err := r.readNode(ctx); err != nil {
		return nil, err
	}
	uids := map[types.UID]bool{}
	options := metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("spec.nodeName", r.req.Node.Name).String(), Limit: chunk,
	}
	for {
		list, err := r.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, options)
		if err != nil {
			return nil, fmt.Errorf("list pods of node %s: %w", r.req.Node.Name, err)
		}
		for i := range list.Items {
			uids[list.Items[i].UID] = true
		}
		if options.Continue = list.Continue; options.Continue == "" {
			return uids, nil
		}
	}
}

// pause waits, unless ctx ends first.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// join is errors.Join in one line, which fits into a status.
func join(errs ...error) error {
	var all error
	for _, err := range errs {
		switch {
		case err == nil:
		case all == nil:
			all = err
		default:
			all = fmt.Errorf("%w; %w", all, err)
		}
	}

	return all
}

// some names the first few of many.
func some(names []string) string {
	const few = 5
	if len(names) <= few {
		return strings.Join(names, ", ")
	}

	return fmt.Sprintf("%s and %d more", strings.Join(names[:few], ", "), len(names)-few)
}
