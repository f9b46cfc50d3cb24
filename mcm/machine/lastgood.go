package machine

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/lastgood"
)

// Removed is the part of machineclass.Removed that the steps use.
type Removed interface {
	Class(key client.ObjectKey) *v1alpha1.MachineClass
	Secret(key client.ObjectKey) *corev1.Secret
}

// classForDelete finds the class with which the machine's instance is deleted:
// as it stands, as it was last accepted, or as it was before it was removed.
// An error with a code says that there is none.
func (c *machineClass) classForDelete(ctx context.Context) error {
	err := c.lookupClass(ctx)
	if _, running := c.operationAt(c.dispatcher); running {
		// It was sent with a class; what comes of it does not depend on what the
		// class is by now.
		return nil
	}
	// A class that names no provider, or an impossible one, is spoiled too.
	if former := c.lastAccepted(); former != nil && (c.provider == "" || c.providerChanged() || c.journal.LastGood) {
		now := c.version // a change of the class as it stands is what ends a wait
		err = c.useClass(ctx, former)
		c.version = now
	}
	switch {
	case err != nil && (dispatch.CodeOf(err) == dispatch.Unknown || c.provider == ""):
		return err
	case c.providerChanged():
		return c.providerChangedError("until the machine is gone")
	case err == nil:
		return nil
	default:
		c.lacking = err // some drivers have credentials of their own

		return nil
	}
}

// providerChanged reports whether the class names another provider than the one that has, or
// may have, the machine's instance; that one would find nothing to delete, and say so.
func (c *machineClass) providerChanged() bool {
	return c.journal.Provider != "" && c.journal.Provider != c.provider
}

// providerChangedError is the error for a machine whose class names another provider.
func (c *machineClass) providerChangedError(remedy string) error {
	return dispatch.Errorf(dispatch.FailedPrecondition, "MachineClass %s: field provider is %q, but %q has been asked for the machine's instance: "+
		"set it back %s (if that provider can have nothing, remove the machine's annotation %s)",
		c.Object.Name, c.Object.Provider, c.journal.Provider, remedy, v1alpha1.AnnotationKeyOperation)
}

// removedClass and removedSecret are what is remembered of an object that is
// gone; only deletions use it.
func (c *machineClass) removedClass(key client.ObjectKey) *v1alpha1.MachineClass {
	if c.removed == nil || !c.leaving() {
		return nil
	}

	return c.removed.Class(key)
}

func (c *machineClass) removedSecret(key client.ObjectKey) *corev1.Secret {
	if c.removed == nil || !c.leaving() {
		return nil
	}

	return c.removed.Secret(key)
}

// lastAccepted is the class as its driver last made an instance from it; nil when
// that is how it stands, or unknown.
func (c *machineClass) lastAccepted() *v1alpha1.MachineClass {
	if c.Object == nil {
		return nil
	}
	former, err := lastgood.LastAccepted(c.Object)
	if err != nil {
		c.log.Info("last accepted version of the class cannot be read", "err", err.Error())
	}

	return former
}

// mayRetryWithLastGood reports whether a refused deletion is to be tried at once with the class
// as it was last accepted.
func (c *machineClass) mayRetryWithLastGood(code dispatch.Code) bool {
	mayBeClass := code == dispatch.InvalidArgument || code == dispatch.FailedPrecondition

	return mayBeClass && !c.journal.LastGood && c.lastAccepted() != nil
}

// noteAccepted notes on the class that its driver makes instances from it as it
// stands. That this does not work is no reason to stop a machine.
func (c *machineClass) noteAccepted(ctx context.Context, state dispatch.State) {
	class := c.Object
	if class == nil || state.ClassGeneration == 0 || state.ClassGeneration != class.Generation {
		return // it was edited since, or another manager had sent it
	}
	// Many machines of a class come at once, before the cache knows of the first.
	if last, _ := c.accepted.Swap(class.UID, class.Generation); last == class.Generation {
		return
	}
	noted := class.DeepCopy()
	changed, err := lastgood.Accept(noted)
	if err == nil && changed {
		err = c.control.Patch(ctx, noted, client.MergeFrom(class))
	}
	if err != nil {
		c.accepted.Delete(class.UID)
		c.log.Info("accepted version of the class not noted", "class", class.Name, "err", err.Error())
	}
}
