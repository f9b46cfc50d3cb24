package machineset

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// EventInvalid is the reason of the Event on a set that nothing can be done for
// until it is corrected.
const EventInvalid = "InvalidMachineSet"

// validate stops at a set that contradicts itself. It says so in an Event, and for as
// long as that lasts in a condition. What it has is counted all the same. The
// correction is an event.
func (p *pass) validate(ctx context.Context) (steps.Next, error) {
	selector, err := selectorOf(p.set)
	if err == nil {
		p.selector = selector

		return steps.Proceed, nil
	}
	message := "Nothing is done for this set: " + err.Error()
	p.Events.Eventf(p.set, corev1.EventTypeWarning, EventInvalid, "%s", message)
	p.log.Info("set is invalid", "err", err.Error())
	p.failure = &v1alpha1.MachineSetCondition{
		Type: v1alpha1.MachineSetReplicaFailure, Status: corev1.ConditionTrue, Reason: v1alpha1.ReasonInvalidSpec, Message: message,
	}
	p.selector = nil // it may be what is wrong
	if _, err := p.findMachines(ctx); err != nil {
		return steps.Wait, err
	}
	_, err = p.report(ctx)

	return steps.Wait, err
}

// selectorOf returns the set's selector, or everything that is wrong with the set.
func selectorOf(set *v1alpha1.MachineSet) (labels.Selector, error) {
	var errs []error
	spec := &set.Spec
	if spec.Replicas < 0 {
		errs = append(errs, fmt.Errorf("spec.replicas must not be negative, it is %d", spec.Replicas))
	}
	if spec.Template.Spec.Class.Kind == "" || spec.Template.Spec.Class.Name == "" {
		errs = append(errs, errors.New("spec.template.spec.class needs a kind and a name: set kind to MachineClass and name to the name of one"))
	}
	selector, err := metav1.LabelSelectorAsSelector(spec.Selector)
	switch {
	case err != nil:
		errs = append(errs, fmt.Errorf("spec.selector: %w", err))
	case spec.Selector == nil || selector.Empty():
		// The one finds no machine, so that they would be made without end; the
		// other would adopt all machines of the namespace.
		errs = append(errs, errors.New("spec.selector must select something: set matchLabels to labels of spec.template"))
	case !selector.Matches(labels.Set(spec.Template.Labels)):
		errs = append(errs, fmt.Errorf("spec.selector (%s) does not match the labels of spec.template: "+
			"give the template these labels, or correct the selector", selector))
	}

	return selector, errors.Join(errs...)
}
