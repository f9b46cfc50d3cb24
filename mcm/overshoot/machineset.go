package overshoot

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A SetReconciler freezes MachineSets and ends their freeze. Its fields are set once and
// then only read.
type SetReconciler struct {
	// Client reads from the manager's cache, Live from the API server itself.
	Client   client.Client
	Live     client.Reader
	Events   record.EventRecorder
	Settings Settings
}

// Reconcile counts one set's machines.
func (r *SetReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	set := &v1alpha1.MachineSet{}
	if err := r.Client.Get(ctx, req.NamespacedName, set); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if !set.DeletionTimestamp.IsZero() {
		return reconcile.Result{}, nil // it creates no more machines
	}
	n, limit, err := r.countAndLimits(ctx, r.Client, set,
		client.UnsafeDisableDeepCopy, client.MatchingFields{indexController: string(set.UID)})
	if err == nil && !isFrozen(set) && limit.frozen(n, false) {
		// The caches of machines, sets and deployments lag independently. After a raise of
		// the replicas the new machines must not look like too many.
		n, limit, err = r.countAndLimits(ctx, r.Live, set)
	}
	if err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	_, asked := set.Annotations[v1alpha1.AnnotationKeyUnfreeze]
	// On request the freeze ends. The next count freezes the set again if it still has too
	// many machines.
	want := !asked && limit.frozen(n, isFrozen(set))
	err = r.apply(ctx, set, want, fmt.Sprintf("There are %d machines for %d replicas; the set creates no more until there are at most %d",
		n, set.Spec.Replicas, limit.thaw))
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return reconcile.Result{RequeueAfter: conflictRetry}, nil // another writer came first
	}

	return reconcile.Result{RequeueAfter: r.Settings.Period}, err
}

// countAndLimits returns the number of the set's machines and its limits, as read from one
// reader. Opts are for the list of machines.
func (r *SetReconciler) countAndLimits(
	ctx context.Context, from client.Reader, set *v1alpha1.MachineSet, opts ...client.ListOption,
) (int, limits, error) {
	current := &v1alpha1.MachineSet{}
	if err := from.Get(ctx, client.ObjectKeyFromObject(set), current); err != nil {
		return 0, limits{}, fmt.Errorf("read machine set %s/%s: %w", set.Namespace, set.Name, err)
	}
	deployment, err := deploymentOf(ctx, from, current)
	if err != nil {
		return 0, limits{}, err
	}
	n, err := r.Settings.count(ctx, from, current, opts)

	return n, r.Settings.limitsOf(current, deployment), err
}

// deploymentOf returns the deployment that controls the set; nil if there is none.
func deploymentOf(ctx context.Context, from client.Reader, set *v1alpha1.MachineSet) (*v1alpha1.MachineDeployment, error) {
	ref := metav1.GetControllerOfNoCopy(set)
	if ref == nil || ref.Kind != v1alpha1.KindMachineDeployment {
		return nil, nil
	}
	deployment := &v1alpha1.MachineDeployment{}
	err := from.Get(ctx, client.ObjectKey{Namespace: set.Namespace, Name: ref.Name}, deployment)
	if apierrors.IsNotFound(err) || err == nil && deployment.UID != ref.UID {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read machine deployment %s/%s: %w", set.Namespace, ref.Name, err)
	}

	return deployment, nil
}

// count returns how many machines of the set count, see counted.
func (s Settings) count(ctx context.Context, from client.Reader, set *v1alpha1.MachineSet, opts []client.ListOption) (int, error) {
	list := &v1alpha1.MachineList{}
	opts = append(opts, client.InNamespace(set.Namespace), client.MatchingLabels(set.Spec.Template.Labels))
	if err := from.List(ctx, list, opts...); err != nil {
		return 0, fmt.Errorf("count machines of set %s/%s: %w", set.Namespace, set.Name, err)
	}
	machines := slices.DeleteFunc(list.Items, func(m v1alpha1.Machine) bool { return !metav1.IsControlledBy(&m, set) })

	return counted(machines, s.CountDeleted || isFrozen(set)), nil
}

// counted returns how many machines count. A machine in deletion counts only if another one
// was created since its deletion began, and each new machine makes one of them count.
// Without new machines they only get fewer: a set that shrinks slowly does not overshoot.
// With all set, all machines count: a frozen set waits until they are gone.
func counted(machines []v1alpha1.Machine, all bool) int {
	if all {
		return len(machines)
	}
	var created, deleted []time.Time
	for i := range machines {
		created = append(created, machines[i].CreationTimestamp.Time)
		if at := machines[i].DeletionTimestamp; at != nil {
			deleted = append(deleted, at.Time)
		}
	}
	slices.SortFunc(created, time.Time.Compare)
	slices.SortFunc(deleted, time.Time.Compare)
	replaced := 0
	for _, at := range created {
		if replaced < len(deleted) && !at.Before(deleted[replaced]) {
			replaced++
		}
	}

	return len(machines) - len(deleted) + replaced
}

func isFrozen(o client.Object) bool {
	return o.GetLabels()[v1alpha1.LabelKeyFreeze] == v1alpha1.LabelValueTrue
}

// apply sets or removes the set's label and condition. The label comes first: it stops the
// creation of machines.
func (r *SetReconciler) apply(ctx context.Context, set *v1alpha1.MachineSet, frozen bool, message string) error {
	was := isFrozen(set)
	after := set.DeepCopy()
	mark(after, frozen)
	changed, err := storeMetadata(ctx, r.Client, after, set)
	if err != nil {
		return err
	}
	switch {
	case frozen && !was:
		r.Events.Event(set, corev1.EventTypeWarning, v1alpha1.EventFrozeMachineSet, message)
	case !frozen && was:
		r.Events.Event(set, corev1.EventTypeNormal, v1alpha1.EventUnfrozeMachineSet, "The set creates machines again")
	}
	if changed {
		ctrl.LoggerFrom(ctx).Info("changed the freeze", "frozen", frozen, "was", was)
	}

	return r.setCondition(ctx, after, frozen, message)
}

// setCondition writes or removes the condition Frozen. An existing condition keeps its
// message, so that not every count causes a write.
func (r *SetReconciler) setCondition(ctx context.Context, set *v1alpha1.MachineSet, frozen bool, message string) error {
	before := set.DeepCopy()
	is := func(c v1alpha1.MachineSetCondition) bool { return c.Type == v1alpha1.MachineSetFrozen }
	at := slices.IndexFunc(before.Status.Conditions, is)
	if at < 0 && !frozen || at >= 0 && frozen && before.Status.Conditions[at].Status == corev1.ConditionTrue {
		return nil
	}
	set.Status.Conditions = slices.DeleteFunc(slices.Clone(set.Status.Conditions), is)
	if frozen {
		set.Status.Conditions = append(set.Status.Conditions, v1alpha1.MachineSetCondition{
			Type: v1alpha1.MachineSetFrozen, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now(),
			Reason: v1alpha1.ReasonOverShootingReplicaCount, Message: message,
		})
	}

	return storeStatus(ctx, r.Client, set, before)
}
