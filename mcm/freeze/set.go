package freeze

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

// A SetReconciler freezes and thaws MachineSets. Its fields are set once and only
// read.
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
		return reconcile.Result{}, nil // it makes no more machines
	}
	n, limit, err := r.look(ctx, r.Client, set, client.UnsafeDisableDeepCopy, client.MatchingFields{indexController: string(set.UID)})
	if err == nil && !isFrozen(set) && limit.frozen(n, false) {
		// The caches of machines, sets and deployments lag each for itself: replicas
		// that were raised just now must not look like machines too many.
		n, limit, err = r.look(ctx, r.Live, set)
	}
	if err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	_, asked := set.Annotations[v1alpha1.AnnotationKeyUnfreeze]
	// Once asked to thaw it does, and is frozen again by the next look if there
	// are still too many.
	want := !asked && limit.frozen(n, isFrozen(set))
	err = r.apply(ctx, set, want, fmt.Sprintf("There are %d machines for %d replicas; no more are made until there are at most %d",
		n, set.Spec.Replicas, limit.thaw))
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return reconcile.Result{RequeueAfter: conflictRetry}, nil // somebody was faster
	}

	return reconcile.Result{RequeueAfter: r.Settings.Period}, err
}

// look counts the set's machines and works out their limits, by what one reader
// says. Opts are for the list of machines.
func (r *SetReconciler) look(
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
	n, err := count(ctx, from, current, opts)

	return n, r.Settings.of(current, deployment), err
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

// count returns how many machines of the set there are, as far as they count.
func count(ctx context.Context, from client.Reader, set *v1alpha1.MachineSet, opts []client.ListOption) (int, error) {
	list := &v1alpha1.MachineList{}
	opts = append(opts, client.InNamespace(set.Namespace), client.MatchingLabels(set.Spec.Template.Labels))
	if err := from.List(ctx, list, opts...); err != nil {
		return 0, fmt.Errorf("count machines of set %s/%s: %w", set.Namespace, set.Name, err)
	}
	machines := slices.DeleteFunc(list.Items, func(m v1alpha1.Machine) bool { return !metav1.IsControlledBy(&m, set) })

	return counted(machines, isFrozen(set)), nil
}

// counted returns how many machines count. Those on their way out have instances as
// well, but as long as no others are made they only get fewer: a set that shrinks
// slowly does not overshoot. So of them there count those that another machine
// stands in for, made since they began to go; each for one. A frozen set waits until
// they are gone: all count.
func counted(machines []v1alpha1.Machine, frozen bool) int {
	if frozen {
		return len(machines)
	}
	var made, left []time.Time
	for i := range machines {
		made = append(made, machines[i].CreationTimestamp.Time)
		if at := machines[i].DeletionTimestamp; at != nil {
			left = append(left, at.Time)
		}
	}
	slices.SortFunc(made, time.Time.Compare)
	slices.SortFunc(left, time.Time.Compare)
	replaced := 0
	for _, at := range made {
		if replaced < len(left) && !at.Before(left[replaced]) {
			replaced++
		}
	}

	return len(machines) - len(left) + replaced
}

func isFrozen(o client.Object) bool {
	return o.GetLabels()[v1alpha1.LabelKeyFreeze] == v1alpha1.LabelValueTrue
}

// apply makes label and condition say whether the set is frozen. The label comes
// first: it is what stops the creation of machines.
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
		r.Events.Event(set, corev1.EventTypeNormal, v1alpha1.EventUnfrozeMachineSet, "Machines are made again")
	}
	if changed {
		ctrl.LoggerFrom(ctx).Info("freeze changed", "frozen", frozen, "was", was)
	}

	return r.setCondition(ctx, after, frozen, message)
}

// setCondition writes or removes the condition Frozen. One that is there keeps
// its message: a new count is no news.
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
