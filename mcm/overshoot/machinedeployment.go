package overshoot

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A DeploymentReconciler marks a MachineDeployment as frozen while one of its MachineSets
// is. Its fields are set once and then only read.
type DeploymentReconciler struct {
	// Client reads from the manager's cache.
	Client   client.Client
	Settings Settings
}

// Reconcile looks at one deployment.
func (r *DeploymentReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	deployment := &v1alpha1.MachineDeployment{}
	if err := r.Client.Get(ctx, req.NamespacedName, deployment); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if !deployment.DeletionTimestamp.IsZero() {
		return reconcile.Result{}, nil
	}
	frozen, err := r.frozenSets(ctx, deployment)
	if err != nil {
		return reconcile.Result{}, err
	}
	if _, asked := deployment.Annotations[v1alpha1.AnnotationKeyUnfreeze]; asked {
		err = r.requestUnfreeze(ctx, frozen)
		frozen = nil
	}
	if err == nil {
		err = r.apply(ctx, deployment, frozen)
	}
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return reconcile.Result{RequeueAfter: conflictRetry}, nil // another writer came first
	}

	return reconcile.Result{RequeueAfter: r.Settings.Period}, err
}

// frozenSets returns the deployment's frozen sets, without those with a request to end
// their freeze.
func (r *DeploymentReconciler) frozenSets(ctx context.Context, deployment *v1alpha1.MachineDeployment) ([]*v1alpha1.MachineSet, error) {
	list := &v1alpha1.MachineSetList{}
	err := r.Client.List(ctx, list, client.InNamespace(deployment.Namespace),
		client.MatchingFields{indexController: string(deployment.UID)},
		client.MatchingLabels{v1alpha1.LabelKeyFreeze: v1alpha1.LabelValueTrue})
	if err != nil {
		return nil, fmt.Errorf("list frozen sets of machine deployment %s/%s: %w", deployment.Namespace, deployment.Name, err)
	}
	frozen := make([]*v1alpha1.MachineSet, 0, len(list.Items))
	for i := range list.Items {
		if _, asked := list.Items[i].Annotations[v1alpha1.AnnotationKeyUnfreeze]; list.Items[i].DeletionTimestamp.IsZero() && !asked {
			frozen = append(frozen, &list.Items[i])
		}
	}

	return frozen, nil
}

// requestUnfreeze passes the request to end the freeze of a deployment on to its sets.
func (r *DeploymentReconciler) requestUnfreeze(ctx context.Context, sets []*v1alpha1.MachineSet) error {
	for _, set := range sets {
		after := set.DeepCopy()
		metav1.SetMetaDataAnnotation(&after.ObjectMeta, v1alpha1.AnnotationKeyUnfreeze, "")
		if _, err := storeMetadata(ctx, r.Client, after, set); err != nil {
			return err
		}
	}

	return nil
}

// apply sets or removes the deployment's label and condition.
func (r *DeploymentReconciler) apply(ctx context.Context, deployment *v1alpha1.MachineDeployment, sets []*v1alpha1.MachineSet) error {
	frozen := len(sets) > 0
	reason := v1alpha1.ReasonOverShootingReplicaCount
	if isFrozen(deployment) {
		reason = v1alpha1.ReasonMachineDeploymentStateSync // only the condition was lost
	}
	after := deployment.DeepCopy()
	mark(after, frozen)
	changed, err := storeMetadata(ctx, r.Client, after, deployment)
	if err != nil {
		return err
	}
	if changed {
		ctrl.LoggerFrom(ctx).Info("changed the freeze", "frozen", frozen, "sets", len(sets))
	}
	message := ""
	if frozen {
		message = fmt.Sprintf("Machine set %s has too many machines and creates no more", sets[0].Name)
	}

	return r.setCondition(ctx, after, frozen, reason, message)
}

func (r *DeploymentReconciler) setCondition(
	ctx context.Context, deployment *v1alpha1.MachineDeployment, frozen bool, reason, message string,
) error {
	before := deployment.DeepCopy()
	is := func(c v1alpha1.MachineDeploymentCondition) bool { return c.Type == v1alpha1.MachineDeploymentFrozen }
	at := slices.IndexFunc(before.Status.Conditions, is)
	if at < 0 && !frozen || at >= 0 && frozen && before.Status.Conditions[at].Status == corev1.ConditionTrue {
		return nil
	}
	deployment.Status.Conditions = slices.DeleteFunc(slices.Clone(deployment.Status.Conditions), is)
	if frozen {
		now := metav1.Now()
		deployment.Status.Conditions = append(deployment.Status.Conditions, v1alpha1.MachineDeploymentCondition{
			Type: v1alpha1.MachineDeploymentFrozen, Status: corev1.ConditionTrue,
			LastUpdateTime: now, LastTransitionTime: now, Reason: reason, Message: message,
		})
	}

	return storeStatus(ctx, r.Client, deployment, before)
}
