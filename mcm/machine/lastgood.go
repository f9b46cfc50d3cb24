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
// as it stands, as it was last accepted, or as it was before somebody removed it.
// An error with a code says that there is none.
func (p *pass) classForDelete(ctx context.Context) error {
	err := p.lookupClass(ctx)
	if _, running := p.begun(); running {
		// It was sent with a class; what comes of it does not depend on what the
		// class is by now.
		return nil
	}
	// A class that names no provider, or an impossible one, is spoiled too.
	if former := p.lastAccepted(); former != nil && (p.provider == "" || p.moved() || p.journal.LastGood) {
		now := p.version // a change of the class as it stands is what ends a wait
		err = p.useClass(ctx, former)
		p.version = now
	}
	switch {
	case err != nil && (dispatch.CodeOf(err) == dispatch.Unknown || p.provider == ""):
		return err
	case p.moved():
		return p.elsewhere("until the machine is gone")
	case err == nil:
		return nil
	default:
		p.lacking = err // some drivers have credentials of their own

		return nil
	}
}

// moved tells whether the class names another provider than the one that has, or
// may have, the machine's instance; that one would find nothing to delete, and say so.
func (p *pass) moved() bool { return p.journal.Provider != "" && p.journal.Provider != p.provider }

// elsewhere is the error for a machine that has moved.
func (p *pass) elsewhere(remedy string) error {
	return dispatch.Errorf(dispatch.FailedPrecondition, "MachineClass %s: field provider is %q, but %q has been asked for the machine's instance: "+
		"set it back %s (if that provider can have nothing, remove the machine's annotation %s)",
		p.class.Object.Name, p.class.Object.Provider, p.journal.Provider, remedy, v1alpha1.AnnotationKeyOperation)
}

// removedClass and removedSecret are what is remembered of an object that is
// gone; only deletions use it.
func (p *pass) removedClass(key client.ObjectKey) *v1alpha1.MachineClass {
	if p.Removed == nil || !p.leaving() {
		return nil
	}

	return p.Removed.Class(key)
}

func (p *pass) removedSecret(key client.ObjectKey) *corev1.Secret {
	if p.Removed == nil || !p.leaving() {
		return nil
	}

	return p.Removed.Secret(key)
}

// leaving tells whether the machine's instance is to go.
func (p *pass) leaving() bool { return !p.machine.DeletionTimestamp.IsZero() || p.journal.Return }

// lastAccepted is the class as its driver last made an instance from it; nil when
// that is how it stands, or unknown.
func (p *pass) lastAccepted() *v1alpha1.MachineClass {
	if p.class.Object == nil {
		return nil
	}
	former, err := lastgood.LastAccepted(p.class.Object)
	if err != nil {
		p.log.Info("last accepted version of the class cannot be read", "err", err.Error())
	}

	return former
}

// another tells whether a refused deletion is to be tried at once with the class
// as it was last accepted.
func (p *pass) another(code dispatch.Code) bool {
	mayBeClass := code == dispatch.InvalidArgument || code == dispatch.FailedPrecondition

	return mayBeClass && !p.journal.LastGood && p.lastAccepted() != nil
}

// accept notes on the class that its driver makes instances from it as it
// stands. That this does not work is no reason to stop a machine.
func (p *pass) accept(ctx context.Context, state dispatch.State) {
	class := p.class.Object
	if class == nil || state.ClassGeneration == 0 || state.ClassGeneration != class.Generation {
		return // it was edited since, or another manager had sent it
	}
	// Many machines of a class come at once, before the cache knows of the first.
	if last, _ := p.accepted.Swap(class.UID, class.Generation); last == class.Generation {
		return
	}
	noted := class.DeepCopy()
	changed, err := lastgood.Accept(noted)
	if err == nil && changed {
		err = p.Control.Patch(ctx, noted, client.MergeFrom(class))
	}
	if err != nil {
		p.accepted.Delete(class.UID)
		p.log.Info("accepted version of the class not noted", "class", class.Name, "err", err.Error())
	}
}
