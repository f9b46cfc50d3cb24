package machinedeployment

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// validate ends the pass for a deployment that cannot be understood, and says why.
func (p *pass) validate(ctx context.Context) (steps.Next, error) {
	if err := invalid(&p.deployment.Spec); err != nil {
		return steps.Wait, p.reportInvalid(ctx, v1alpha1.ReasonInvalidSpec, fmt.Sprintf("Nothing is done until the spec is corrected: %v", err))
	}
	if selector := p.deployment.Spec.Selector; len(selector.MatchLabels)+len(selector.MatchExpressions) == 0 {
		return steps.Wait, p.reportInvalid(ctx, v1alpha1.EventSelectingAll,
			"This deployment is selecting all machines. A non-empty selector is required.")
	}

	return steps.Proceed, nil
}

// reportInvalid says what is wrong with the deployment, in an Event and for as long as
// it lasts in the condition Progressing. The rest of its status is what it was.
func (p *pass) reportInvalid(ctx context.Context, event, message string) error {
	p.warnf(event, "%s", message)
	p.deployment.Status.ObservedGeneration = p.deployment.Generation
	current := conditionOf(&p.deployment.Status, v1alpha1.MachineDeploymentProgressing)
	if current == nil || current.Reason != v1alpha1.ReasonInvalidSpec || current.Message != message {
		p.setProgressing(corev1.ConditionFalse, v1alpha1.ReasonInvalidSpec, message)
	}

	return p.storeStatus(ctx)
}

// invalid names all faults of a spec at once.
func invalid(spec *v1alpha1.MachineDeploymentSpec) error {
	var errs []error
	fault := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if spec.Replicas < 0 {
		fault("spec.replicas must not be negative, not %d", spec.Replicas)
	}
	if isNegative(spec.RevisionHistoryLimit) {
		fault("spec.revisionHistoryLimit must not be negative, not %d: leave it out to keep all", *spec.RevisionHistoryLimit)
	}
	if isNegative(spec.ProgressDeadlineSeconds) {
		fault("spec.progressDeadlineSeconds must not be negative, not %d: leave it out for no limit", *spec.ProgressDeadlineSeconds)
	}
	if spec.Template.Spec.Class.Kind == "" || spec.Template.Spec.Class.Name == "" {
		fault("spec.template.spec.class needs a kind and a name: set kind to MachineClass and name to the name of one")
	}
	if err := invalidSelector(spec); err != nil {
		errs = append(errs, err)
	}
	switch strategy := spec.Strategy; strategy.Type {
	case v1alpha1.RecreateMachineDeploymentStrategyType:
	case v1alpha1.RollingUpdateMachineDeploymentStrategyType:
		if strategy.RollingUpdate == nil {
			fault("spec.strategy.rollingUpdate is missing: set maxSurge and maxUnavailable in it")
		} else {
			errs = append(errs, invalidLimits("spec.strategy.rollingUpdate", strategy.RollingUpdate.UpdateConfiguration))
		}
	case v1alpha1.InPlaceUpdateMachineDeploymentStrategyType:
		if strategy.InPlaceUpdate == nil {
			fault("spec.strategy.inPlaceUpdate is missing: set maxSurge, maxUnavailable and orchestrationType in it")

			break
		}
		errs = append(errs, invalidLimits("spec.strategy.inPlaceUpdate", strategy.InPlaceUpdate.UpdateConfiguration))
		if o := strategy.InPlaceUpdate.OrchestrationType; o != v1alpha1.OrchestrationTypeAuto && o != v1alpha1.OrchestrationTypeManual {
			fault("spec.strategy.inPlaceUpdate.orchestrationType must be Auto or Manual, not %q", o)
		}
	default:
		fault("spec.strategy.type must be RollingUpdate, Recreate or InPlaceUpdate, not %q", strategy.Type)
	}

	return errors.Join(errs...)
}

func isNegative(n *int32) bool { return n != nil && *n < 0 }

func invalidSelector(spec *v1alpha1.MachineDeploymentSpec) error {
	if spec.Selector == nil {
		return errors.New("spec.selector is missing: set matchLabels to labels of spec.template")
	}
	selector, err := metav1.LabelSelectorAsSelector(spec.Selector)
	if err != nil {
		return fmt.Errorf("spec.selector: %w", err)
	}
	if !selector.Matches(labels.Set(spec.Template.Labels)) {
		return errors.New("spec.selector does not select the labels of spec.template: give the template these labels, or correct the selector")
	}

	return nil
}

// amount is the remedy for a limit that is none.
const amount = "set a number such as 1, or a percentage such as 25%"

func invalidLimits(path string, limits v1alpha1.UpdateConfiguration) error {
	var errs []error
	for _, limit := range []struct { // in an order, or the condition would change without a cause
		name  string
		value *intstr.IntOrString
	}{{"maxSurge", limits.MaxSurge}, {"maxUnavailable", limits.MaxUnavailable}} {
		name, value := limit.name, limit.value
		if value == nil {
			errs = append(errs, fmt.Errorf("%s.%s is missing: %s", path, name, amount))

			continue
		}
		n, err := intstr.GetScaledValueFromIntOrPercent(value, 100, true)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s.%s %q: %w: %s", path, name, value.String(), err, amount))
		} else if n < 0 {
			errs = append(errs, fmt.Errorf("%s.%s must not be negative, not %s", path, name, value.String()))
		}
	}

	return errors.Join(errs...)
}

// selects reports whether a selector that was validated selects labels.
func selects(selector *metav1.LabelSelector, set map[string]string) bool {
	if selector == nil {
		return false
	}
	s, err := metav1.LabelSelectorAsSelector(selector)

	return err == nil && !s.Empty() && s.Matches(labels.Set(set))
}

// addFinalizer keeps the deployment until its sets are gone.
func (p *pass) addFinalizer(ctx context.Context) (steps.Next, error) {
	if !controllerutil.AddFinalizer(p.deployment, v1alpha1.FinalizerName) {
		return steps.Proceed, nil
	}

	return steps.Proceed, p.patch(ctx)
}
