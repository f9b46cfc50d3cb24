package drain

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// nextWithVolumes returns the pod with volumes whose turn it is, nil for none. They go one
// after the other: each has its volumes attached elsewhere before the next one ends, so that
// few are without theirs at a time. A pod whose eviction was refused lets others go first.
func (e *evictionRound) nextWithVolumes(now time.Time) *victim {
	var next *victim
	for _, v := range e.left {
		switch {
		case len(v.volumes) == 0:
		case v.ending && !e.stuck(v, now):
			return nil
		case v.ending:
		case next == nil && !now.Before(v.due):
			next = v
		}
	}

	return next
}

// stuck reports whether a pod in deletion is there for longer than it may be: it must not
// keep all others waiting until the drain's time is over, when they would end without grace.
func (e *evictionRound) stuck(v *victim, now time.Time) bool {
	const byDefault = 30 * time.Second // of Kubernetes
	grace := byDefault
	if seconds := v.pod.Spec.TerminationGracePeriodSeconds; seconds != nil {
		grace = time.Duration(*seconds) * time.Second
	}

	return v.ending && v.gone.IsZero() && now.Sub(v.ended) > grace+e.settings.DetachTimeout
}

// settleVolumes reports whether a pod that is gone has its volumes free, and moved if another
// pod waits for them. A volume that is not detached in time makes the drain fail.
func (e *evictionRound) settleVolumes(ctx context.Context, v *victim) bool {
	now := time.Now()
	if v.gone.IsZero() {
		v.gone = now
	}
	attached, err := e.attached(ctx)
	if err != nil {
		e.log.V(1).Info("cannot see whether volumes are detached; retries", "after", e.settings.Poll.String(), "err", err.Error())

		return false
	}
	node := e.req.Node.Name
	held := slices.DeleteFunc(slices.Clone(v.volumes), func(volume string) bool { return !attached.on(node, volume) })
	switch {
	case len(held) > 0:
		v.waits = fmt.Sprintf("volume %s of pod %s is still attached to the node", strings.Join(held, ", "), v.name())
		if now.Sub(v.gone) > e.settings.DetachTimeout {
			e.fatal = append(e.fatal, fmt.Errorf("%s %s after the pod ended: see its VolumeAttachment, and the logs of its CSI driver",
				v.waits, e.settings.DetachTimeout))

			return true
		}

		return false
	case v.detached.IsZero():
		v.detached = now
	}
	if e.req.Stays || slices.IndexFunc(v.volumes, func(volume string) bool { return !attached.elsewhere(node, volume) }) < 0 {
		return true
	}
	v.waits = fmt.Sprintf("volume %s of pod %s is detached, and not attached to another node yet", strings.Join(v.volumes, ", "), v.name())
	wanted, err := e.wanted(ctx, v)
	if err != nil {
		e.log.V(1).Info("cannot see whether another pod waits for the volumes", "pod", v.name(), "err", err.Error())
	}
	limit := e.settings.ReattachTimeout
	if err == nil && !wanted {
		limit = min(limit, successorPolls*e.settings.Poll)
	}
	if now.Sub(v.detached) <= limit {
		return false
	}
	e.log.Info("the volumes were not attached elsewhere; the drain goes on", "pod", v.name(), "after", limit.String())

	return true
}

// successorPolls is how many polls the controller of a pod may take to make the next one: 10 s.
const successorPolls = 5

// awaitDetached waits until no volume is attached to the Node but those of pods that stay, such
// as a DaemonSet's. It also sees those of pods that a former manager has evicted.
func (r *run) awaitDetached(ctx context.Context) error {
	deadline := time.Now().Add(r.settings.DetachTimeout)
	for {
		held, err := r.heldVolumes(ctx)
		switch {
		case forbidden(err):
			r.log.Info("volumes are not waited for", "err", err.Error())

			return nil
		case err == nil && len(held) == 0:
			return nil
		case err == nil && time.Now().After(deadline):
			return fmt.Errorf("volumes are still attached to node %s %s after its pods ended: %s: see their VolumeAttachments, and the logs of their CSI drivers",
				r.req.Node.Name, r.settings.DetachTimeout, firstFew(held))
		case err == nil:
			r.report(fmt.Sprintf("%d volumes are still attached to the node: %s", len(held), firstFew(held)), false, false)
		case ctx.Err() != nil:
			return err
		default:
			r.log.V(1).Info("cannot see whether volumes are detached; retries", "after", r.settings.Poll.String(), "err", err.Error())
		}
		if err := pause(ctx, r.settings.Poll); err != nil {
			return join(fmt.Errorf("%w: volumes are still attached to the node: %s", err, firstFew(held)))
		}
	}
}

// heldVolumes returns the volumes attached to the Node that no pod on it uses.
func (r *run) heldVolumes(ctx context.Context) ([]string, error) {
	attached, err := r.attached(ctx)
	if err != nil {
		return nil, err
	}
	held := attached.to(r.req.Node.Name)
	if len(held) == 0 {
		return nil, nil
	}
	pods, err := r.pods(ctx)
	if err != nil {
		return nil, err
	}
	for i := range pods {
		used, err := r.volumesOf(ctx, &pods[i])
		if err != nil {
			return nil, err
		}
		held = slices.DeleteFunc(held, func(v string) bool { return slices.Contains(used, v) })
	}

	return held, nil
}
