package machinedeployment

import (
	"context"
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// EventInvalidSpec is the reason of the Event on a deployment that nothing is
// done for until its spec is corrected.
const EventInvalidSpec = "InvalidSpec"

// validate ends the pass for a deployment that cannot be understood, and says why.
func (p *pass) validate(context.Context) (bool, error) {
	if err := invalid(&p.deployment.Spec); err != nil {
		p.warnf(EventInvalidSpec, "Nothing is done until the spec is corrected: %v", err)

		return false, nil
	}
	if selector := p.deployment.Spec.Selector; len(selector.MatchLabels)+len(selector.MatchExpressions) == 0 {
		p.warnf(v1alpha1.EventSelectingAll, "This deployment is selecting all machines. A non-empty selector is required.")

		return false, nil
	}

	return true, nil
}

// invalid names all faults of a spec at once.
func invalid(spec *v1alpha1.MachineDeploymentSpec) error {
	var errs []error
	fault := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if spec.Replicas < 0 {
		fault("spec.replicas must not be negative, not %d", spec.Replicas)
	}
	if spec.Template.Spec.Class.Kind == "" || spec.Template.Spec.Class.Name == "" {
		fault("spec.template.spec.class needs a kind and a name")
	}
	if err := invalidSelector(spec); err != nil {
		errs = append(errs, err)
	}
	switch strategy := spec.Strategy; strategy.Type {
	case v1alpha1.RecreateMachineDeploymentStrategyType:
	case v1alpha1.RollingUpdateMachineDeploymentStrategyType:
		if strategy.RollingUpdate == nil {
			fault("spec.strategy.rollingUpdate is missing")
		} else {
			errs = append(errs, invalidLimits("spec.strategy.rollingUpdate", strategy.RollingUpdate.UpdateConfiguration))
		}
	case v1alpha1.InPlaceUpdateMachineDeploymentStrategyType:
		if strategy.InPlaceUpdate == nil {
			fault("spec.strategy.inPlaceUpdate is missing")

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

func invalidSelector(spec *v1alpha1.MachineDeploymentSpec) error {
	if spec.Selector == nil {
		return errors.New("spec.selector is missing")
	}
	selector, err := metav1.LabelSelectorAsSelector(spec.Selector)
	if err != nil {
		return fmt.Errorf("spec.selector: %w", err)
	}
	if !selector.Matches(labels.Set(spec.Template.Labels)) {
		return errors.New("spec.selector does not select the labels of spec.template")
	}

	return nil
}

func invalidLimits(path string, limits v1alpha1.UpdateConfiguration) error {
	var errs []error
	for name, value := range map[string]*intstr.IntOrString{"maxSurge": limits.MaxSurge, "maxUnavailable": limits.MaxUnavailable} {
		if value == nil {
			errs = append(errs, fmt.Errorf("%s.%s is missing", path, name))

			continue
		}
		n, err := intstr.GetScaledValueFromIntOrPercent(value, 100, true)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s.%s %q: %w", path, name, value.String(), err))
		} else if n < 0 {
			errs = append(errs, fmt.Errorf("%s.%s must not be negative, not %s", path, name, value.String()))
		}
	}

	return errors.Join(errs...)
}

// selects tells whether a selector that was validated selects labels.
func selects(selector *metav1.LabelSelector, set map[string]string) bool {
	if selector == nil {
		return false
	}
	s, err := metav1.LabelSelectorAsSelector(selector)

	return err == nil && !s.Empty() && s.Matches(labels.Set(set))
}

// addFinalizer keeps the deployment until its sets are gone.
func (p *pass) addFinalizer(ctx context.Context) (bool, error) {
	if !controllerutil.AddFinalizer(p.deployment, v1alpha1.FinalizerName) {
		return true, nil
	}

	return true, p.patch(ctx)
}
