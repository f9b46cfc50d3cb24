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
	// report stores what the drain waits for, and notifies if wanted.
	report func(reason string, blocked, notify bool)
}

// errNodeGone ends a drain with success: without a Node there are no pods.
var errNodeGone = errors.New("the node is gone")

// drain empties the Node.
func (r *run) drain(parent context.Context) error {
	ctx, cancel := context.WithTimeout(parent, r.req.Timeout)
	defer cancel()
	err := r.steps(ctx)
	if errors.Is(err, errNodeGone) {
		r.log.V(1).Info("the node is gone; the drain has succeeded")

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
		r.log.Info("cannot mark or cordon the node; the forced drain continues", "err", err.Error())
	}
	if !r.req.Force {
		return r.evictAll(ctx)
	}

	if r.req.Stays {
		return r.deletePods(ctx)
	}

	// Detach volumes even if a pod could not be deleted.
	return join(r.deletePods(ctx), r.detach(ctx))
}

// evictAll evicts pods until none is left: a pod may have been bound to the Node just before
// it was cordoned.
func (r *run) evictAll(ctx context.Context) error {
	for {
		pods, err := r.evictable(ctx)
		if err != nil {
			return err
		}
		if len(pods) == 0 {
			if r.req.Stays {
				return nil
			}

			return r.awaitDetached(ctx)
		}
		volumes, err := r.ownVolumesOf(ctx, pods)
		if err != nil {
			return err
		}
		if err := newEvictionRound(r, pods, volumes).evictAndWait(ctx); err != nil {
			return err
		}
	}
}

// deletePods deletes the Node's pods with no grace period, and does not wait for them.
func (r *run) deletePods(ctx context.Context) error {
	pods, err := r.evictable(ctx)
	errs := []error{err} // such as of one pod whose DaemonSet cannot be read; the others are returned
	for i := range pods {
		errs = append(errs, r.delete(ctx, &pods[i]))
	}

	return join(errs...)
}

// detach deletes the Node's VolumeAttachments until all are deleted or in deletion.
func (r *run) detach(ctx context.Context) error {
	for {
		release, err := r.acquireSlot(ctx)
		if err != nil {
			return err
		}
		n, err := DeleteVolumeAttachments(ctx, r.client, r.req.Node.Name)
		release()
		if err != nil || n == 0 {
			return err
		}
		r.log.Info("deleted volume attachments", "count", n)
		if err := pause(ctx, r.settings.Poll); err != nil {
			return err
		}
	}
}

// delete deletes a pod with no grace period.
func (r *run) delete(ctx context.Context, pod *corev1.Pod) error {
	release, err := r.acquireSlot(ctx)
	if err != nil {
		return err
	}
	defer release()
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

// gone reports whether an error means that a pod or the Node does not exist any more. A
// conflict means that another object has its name.
func gone(err error) bool { return apierrors.IsNotFound(err) || apierrors.IsConflict(err) }

// helper returns kubectl's helper, configured to take all pods but mirror pods and those of
// DaemonSets. It only lists pods: kubectl's evictions and deletions have no uid precondition.
func (r *run) helper(ctx context.Context) *kubectldrain.Helper {
	return &kubectldrain.Helper{
		Ctx: ctx, Client: r.client, ChunkSize: chunk, Out: io.Discard, ErrOut: io.Discard,
		Force: true, IgnoreAllDaemonSets: true, DeleteEmptyDirData: true,
	}
}

// evictable returns the Node's pods that a drain removes. With an error it returns those that
// could be classified.
func (r *run) evictable(ctx context.Context) ([]corev1.Pod, error) {
	release, err := r.acquireSlot(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
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

// podUIDs returns the uids of all of the Node's pods, or errNodeGone.
func (r *run) podUIDs(ctx context.Context) (map[types.UID]bool, error) {
	pods, err := r.pods(ctx)
	if err != nil {
		return nil, err
	}
	uids := map[types.UID]bool{}
	for i := range pods {
		uids[pods[i].UID] = true
	}

	return uids, nil
}

// pods returns all of the Node's pods, or errNodeGone.
func (r *run) pods(ctx context.Context) ([]corev1.Pod, error) {
	release, err := r.acquireSlot(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	if _, err := r.readNode(ctx); err != nil {
		return nil, err
	}
	pods, err := r.listPods(ctx, metav1.NamespaceAll, fields.OneTermEqualSelector("spec.nodeName", r.req.Node.Name))
	if err != nil {
		return nil, fmt.Errorf("list pods of node %s: %w", r.req.Node.Name, err)
	}

	return pods, nil
}

// podsIn returns the pods of a namespace, on any Node.
func (r *run) podsIn(ctx context.Context, namespace string) ([]corev1.Pod, error) {
	release, err := r.acquireSlot(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	pods, err := r.listPods(ctx, namespace, fields.Everything())
	if err != nil {
		return nil, fmt.Errorf("list pods of namespace %s: %w", namespace, err)
	}

	return pods, nil
}

func (r *run) listPods(ctx context.Context, namespace string, selector fields.Selector) ([]corev1.Pod, error) {
	var pods []corev1.Pod
	options := metav1.ListOptions{FieldSelector: selector.String(), Limit: chunk}
	for {
		list, err := r.client.CoreV1().Pods(namespace).List(ctx, options)
		if err != nil {
			return nil, err
		}
		pods = append(pods, list.Items...)
		if options.Continue = list.Continue; options.Continue == "" {
			return pods, nil
		}
	}
}

// pause waits until d is over or ctx ends.
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

// join is errors.Join with a text of one line, for a status.
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

// firstFew lists the first names, and the number of the others.
func firstFew(names []string) string {
	const few = 5
	if len(names) <= few {
		return strings.Join(names, ", ")
	}

	return fmt.Sprintf("%s and %d more", strings.Join(names[:few], ", "), len(names)-few)
}
