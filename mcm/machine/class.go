package machine

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// userDataKey is the key of a class's secret that instances boot from.
const userDataKey = "userData"

// resolveClass finds the machine's class and its secrets, which only an
// operation needs.
func (p *pass) resolveClass(ctx context.Context) (next, error) {
	if !p.creating() {
		return proceed, nil
	}
	if _, running := p.begun(); running {
		// What runs was sent with a class; it may end although the class is
		// gone by now.
		_, err := p.lookupClass(ctx)
		if err != nil {
			p.log.V(1).Info("class of a running operation cannot be read", "err", err.Error())
		}

		return proceed, nil
	}
	secret, err := p.lookupClass(ctx)
	if err == nil && p.class.Object.SecretRef != nil && secret != nil && len(secret.Data[userDataKey]) == 0 {
		err = dispatch.Errorf(dispatch.InvalidArgument, "userdata field not found in secret for machine %q: "+
			"Secret %s/%s needs a key %q", p.machine.Name, secret.Namespace, secret.Name, userDataKey)
	}
	if err == nil {
		return proceed, nil
	}
	if dispatch.CodeOf(err) == dispatch.Unknown {
		return wait, err // not the object's fault: the API server's
	}

	return p.refuse(ctx, err)
}

// refuse notes that the machine cannot be made as it or its class stands. A
// change of any of them starts the next pass.
func (p *pass) refuse(ctx context.Context, err error) (next, error) {
	news := p.failCreation(err)
	if news {
		p.cautionf("InvalidMachine", "%s", fault(err))
	}

	return again(p.Settings.Retry.Long), p.patchStatus(ctx)
}

// lookupClass fills in class, version and provider, and returns the class's
// secret. An error with a code is the objects' fault.
func (p *pass) lookupClass(ctx context.Context) (*corev1.Secret, error) {
	ref := p.machine.Spec.Class
	if ref.Kind != v1alpha1.KindMachineClass || ref.Name == "" {
		return nil, dispatch.Errorf(dispatch.InvalidArgument,
			"spec.class: kind is %q and name is %q: want kind MachineClass and the name of one", ref.Kind, ref.Name)
	}
	class := &v1alpha1.MachineClass{}
	err := p.Control.Get(ctx, client.ObjectKey{Namespace: p.machine.Namespace, Name: ref.Name}, class)
	if apierrors.IsNotFound(err) {
		return nil, dispatch.Errorf(dispatch.NotFound, "MachineClass %s/%s does not exist: create it, or correct spec.class",
			p.machine.Namespace, ref.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("read class %s: %w", ref.Name, err)
	}
	p.class.Object, p.version = class, class.ResourceVersion
	if p.provider, err = dispatch.Provider(class, p.Settings.DefaultProvider); err != nil {
		return nil, err
	}
	secret, err := p.lookupSecret(ctx, "secretRef", class.SecretRef)
	if err != nil {
		return nil, err
	}
	credentials, err := p.lookupSecret(ctx, "credentialsSecretRef", class.CredentialsSecretRef)
	if err != nil {
		return nil, err
	}
	p.class.Secret, p.class.Credentials = p.versioned(secret), p.versioned(credentials)

	return secret, nil
}

// versioned adds a secret's version to that of the class. A missing secret
// must become a nil interface, not one that holds a nil pointer.
func (p *pass) versioned(secret *corev1.Secret) metav1.Object {
	if secret == nil {
		return nil
	}
	p.version += "/" + secret.ResourceVersion

	return secret
}

func (p *pass) lookupSecret(ctx context.Context, field string, ref *corev1.SecretReference) (*corev1.Secret, error) {
	if ref == nil {
		return nil, nil //nolint:nilnil // a class need not have secrets
	}
	namespace := ref.Namespace
	if namespace == "" {
		namespace = p.class.Object.Namespace
	}
	if only := p.Settings.Namespace; only != "" && namespace != only {
		// The cache's own error for this has no type to know it by.
		return nil, dispatch.Errorf(dispatch.InvalidArgument, "MachineClass %s: %s: Secret %s/%s: mcm serves only namespace %s: "+
			"put the Secret there or run mcm with --all-namespaces", p.class.Object.Name, field, namespace, ref.Name, only)
	}
	secret := &corev1.Secret{}
	err := p.Control.Get(ctx, client.ObjectKey{Namespace: namespace, Name: ref.Name}, secret)
	if apierrors.IsNotFound(err) {
		return nil, dispatch.Errorf(dispatch.NotFound, "MachineClass %s: %s: Secret %s/%s does not exist: create it",
			p.class.Object.Name, field, namespace, ref.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("read secret %s/%s: %w", namespace, ref.Name, err)
	}

	return secret, nil
}
