package drain

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// misconfigured returns an error that names the pod's disruption budget if it allows no
// eviction although all of its pods are healthy, so that waiting does not help. Lookup is
// not nil if the budgets cannot be read.
func (r *run) misconfigured(ctx context.Context, pod *corev1.Pod) (misconfigured, lookup error) {
	release, err := r.acquireSlot(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	list, err := r.client.PolicyV1().PodDisruptionBudgets(pod.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list disruption budgets of namespace %s: %w", pod.Namespace, err)
	}
	for i := range list.Items {
		budget := &list.Items[i]
		selector, err := metav1.LabelSelectorAsSelector(budget.Spec.Selector)
		if err != nil || !selector.Matches(labels.Set(pod.Labels)) {
			continue
		}
		if allowsNothing(budget) {
			return fmt.Errorf(v1alpha1.TextFormatMisconfiguredPDB, budget.Namespace, budget.Name), nil
		}
	}

	return nil, nil
}

// allowsNothing reports whether a budget has seen all of its pods healthy and still allows
// no eviction.
func allowsNothing(budget *policyv1.PodDisruptionBudget) bool {
	status := &budget.Status

	return status.ObservedGeneration == budget.Generation && status.ExpectedPods > 0 &&
		status.CurrentHealthy >= status.ExpectedPods && len(status.DisruptedPods) == 0 && status.DisruptionsAllowed == 0
}
