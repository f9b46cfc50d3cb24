package orphans

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// due returns the orphans whose grace period is over, at most MaxPerPass of each provider.
// Those whose delete has not failed come first, then those whose delete failed longest ago,
// so that no instance blocks others. Among equals, those known longest come first.
func (p *pass) due(orphans []found) []found {
	due := slices.DeleteFunc(orphans, func(f found) bool { return p.now.Sub(f.since) < p.Settings.Grace })
	slices.SortFunc(due, func(a, b found) int {
		return cmp.Or(a.failed.Compare(b.failed), a.since.Compare(b.since), cmp.Compare(a.ProviderID, b.ProviderID))
	})
	of := map[string]int{}
	due = slices.DeleteFunc(due, func(f found) bool {
		of[f.Provider]++

		return of[f.Provider] > p.Settings.MaxPerPass
	})
	for provider, n := range of {
		if n > p.Settings.MaxPerPass {
			p.log.Info("more instances without a machine than may be deleted after one look; the rest waits",
				"provider", provider, "due", n, "max", p.Settings.MaxPerPass)
		}
	}

	return due
}

// remove deletes orphans, waits until their deletes end, and remembers which failed.
func (p *pass) remove(ctx context.Context, due []found) {
	var group sync.WaitGroup
	for i := range due {
		group.Go(func() { p.removeOne(ctx, &due[i]) })
	}
	group.Wait()
	for i := range due {
		f := &due[i]
		if !f.gone && !p.Settings.DryRun {
			p.seen[f.key()] = sighting{since: f.since, failed: p.now}
		}
		if f.lost {
			if p.failed == nil {
				p.failed = map[key]*dispatch.Orphan{}
			}
			p.failed[f.key()] = &f.Orphan
		}
	}
}

// removeOne deletes an orphan, and notes in f whether it is gone.
func (p *pass) removeOne(ctx context.Context, f *found) {
	o := &f.Orphan
	log := p.log.WithValues("provider_id", o.ProviderID, "machine", o.MachineName, "uid", o.MachineUID,
		"class", client.ObjectKeyFromObject(o.Class.Object))
	if p.Settings.DryRun {
		log.Info("dry run: instance without a machine would be deleted")

		return
	}
	// A provider without free slots must not block the collection at other providers.
	bounded, cancel := context.WithTimeout(ctx, 2*p.Settings.DeleteTimeout)
	defer cancel()
	err := p.Dispatcher.Remove(bounded, o, p.Settings.DeleteTimeout, func(ctx context.Context) error {
		return p.stillOrphan(ctx, o)
	})
	if ctx.Err() != nil {
		return
	}
	if errors.Is(err, errKept) {
		log.Info("instance without a machine is not deleted", "err", err.Error())

		return
	}
	code := dispatch.CodeOf(err)
	p.Metrics.deletions.WithLabelValues(o.Provider, code.String()).Inc()
	if code != dispatch.OK && code != dispatch.NotFound {
		p.Events.Eventf(o.Class.Object, corev1.EventTypeWarning, EventOrphanNotDeleted,
			"Cannot delete instance %s, which belongs to no machine; retries in %s: %s",
			o.ProviderID, p.Settings.Period, err.Error())
		log.Info("cannot delete an instance without a machine; retries at the next look", "code", code.String(), "err", err.Error())
		f.lost = true

		return
	}
	f.gone = true
	p.endDelete(ctx, o, code == dispatch.OK)
}

// endDelete records that an orphan is gone, and removes what was its own: its token, and
// its Node if mcm deleted the instance.
func (p *pass) endDelete(ctx context.Context, o *dispatch.Orphan, withNode bool) {
	log := p.log.WithValues("provider_id", o.ProviderID, "machine", o.MachineName, "uid", o.MachineUID)
	p.Events.Eventf(o.Class.Object, corev1.EventTypeNormal, EventOrphanDeleted,
		"Deleted instance %s, created for machine %s, which belonged to no machine", o.ProviderID, o.MachineName)
	log.Info("deleted an instance without a machine")
	if withNode {
		if err := p.removeNode(ctx, o.ProviderID); err != nil {
			log.Error(err, "cannot delete the node of a deleted instance; delete it by hand")
		}
	}
	if err := p.removeToken(ctx, o); err != nil {
		log.Error(err, "cannot delete the bootstrap token of a deleted instance; it stays until it expires")
	}
}

// errKept wraps the reasons not to delete an instance after all.
var errKept = errors.New("kept")

// stillOrphan checks a last time, right before the delete: a machine of that name may have
// been created.
func (p *pass) stillOrphan(ctx context.Context, o *dispatch.Orphan) error {
	if err := p.mayDelete(); err != nil {
		return fmt.Errorf("%w: %w", errKept, err)
	}
	if _, inFlight := p.Dispatcher.State(o.MachineUID); inFlight {
		return fmt.Errorf("%w: an operation of machine uid %s is in flight", errKept, o.MachineUID)
	}
	m := &v1alpha1.Machine{}
	err := p.Reader.Get(ctx, client.ObjectKey{Namespace: o.Namespace, Name: o.MachineName}, m)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: read machine %s/%s: %w", errKept, o.Namespace, o.MachineName, err)
	}
	if _, how := newMachineIndex([]v1alpha1.Machine{*m}).belongs(&o.Listed); how != orphan {
		return fmt.Errorf("%w: it now belongs to machine %s/%s", errKept, m.Namespace, m.Name)
	}

	return nil
}

// removeToken removes the bootstrap token of a deleted instance: its Machine was removed by
// force, so no other component does it.
func (p *pass) removeToken(ctx context.Context, o *dispatch.Orphan) error {
	if p.Tokens == nil || o.MachineUID == "" {
		return nil
	}
	m := &v1alpha1.Machine{}
	m.Namespace, m.Name, m.UID = o.Namespace, o.MachineName, o.MachineUID

	return p.Tokens.Delete(ctx, m)
}

// removeNode removes the Node of a deleted instance: otherwise another instance's Node
// could not have its name.
func (p *pass) removeNode(ctx context.Context, providerID string) error {
	if p.Nodes == nil {
		return nil
	}
	nodes := &corev1.NodeList{}
	if err := p.Nodes.List(ctx, nodes); err != nil {
		return fmt.Errorf("list nodes: %w", err)
	}
	for i := range nodes.Items {
		before := &nodes.Items[i]
		if before.Spec.ProviderID != providerID {
			continue
		}
		node := before.DeepCopy()
		if controllerutil.RemoveFinalizer(node, v1alpha1.FinalizerNameNode) {
			err := p.Nodes.Patch(ctx, node, client.MergeFrom(before))
			if client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("release node %s: %w", node.Name, err)
			}
		}
		err := p.Nodes.Delete(ctx, node, client.Preconditions{UID: &before.UID})
		if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) { // a conflict: another Node has the name
			return fmt.Errorf("delete node %s: %w", node.Name, err)
		}
		p.log.Info("deleted the node of a deleted instance", "node", node.Name, "provider_id", providerID)
	}

	return nil
}
