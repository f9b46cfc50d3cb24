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
	err := p.lookupClass(ctx)
	if _, running := p.begun(); running {
		// What runs was sent with a class; it may end although the class is
		// gone by now.
		if err != nil {
			p.log.V(1).Info("class of a running operation cannot be read", "err", err.Error())
		}

		return proceed, nil
	}
	if err == nil && p.class.Secret != nil && !p.userData {
		err = dispatch.Errorf(dispatch.InvalidArgument, "userdata field not found in secret for machine %q: "+
			"Secret %s/%s needs a key %q", p.machine.Name, p.class.Secret.GetNamespace(), p.class.Secret.GetName(), userDataKey)
	}
	if err == nil {
		err = validateClass(p.class.Object)
	}
	if err == nil && p.moved() {
		err = p.elsewhere("or delete the machine")
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
	p.Dispatcher.Withdraw(p.machine.UID)
	if p.isNew() {
		// From its phase alone another manager might have had something made.
		if err := p.journal.write(p.machine); err != nil {
			return wait, err
		}
		if err := p.patch(ctx); err != nil {
			return wait, err
		}
	}
	news := p.failCreation(err, v1alpha1.CreateFailedText)
	if news {
		p.cautionf("InvalidMachine", "%s", fault(err))
	}

	return again(p.Settings.Retry.Long), p.patchStatus(ctx)
}

// lookupClass finds the machine's class and fills in what useClass does. An
// error with a code is the objects' fault.
func (p *pass) lookupClass(ctx context.Context) error {
	ref := p.machine.Spec.Class
	if ref.Kind != v1alpha1.KindMachineClass || ref.Name == "" {
		return dispatch.Errorf(dispatch.InvalidArgument,
			"spec.class: kind is %q and name is %q: want kind MachineClass and the name of one", ref.Kind, ref.Name)
	}
	class, key := &v1alpha1.MachineClass{}, client.ObjectKey{Namespace: p.machine.Namespace, Name: ref.Name}
	err := p.Control.Get(ctx, key, class)
	if apierrors.IsNotFound(err) {
		if class = p.removedClass(key); class == nil {
			return dispatch.Errorf(dispatch.NotFound, "MachineClass %s does not exist: create it, or correct spec.class", key)
		}
	} else if err != nil {
		return fmt.Errorf("read class %s: %w", ref.Name, err)
	}

	return p.useClass(ctx, class)
}

// useClass fills in class, version and provider, and the class's secrets. With an
// error the provider is known nevertheless, unless it is the provider's.
func (p *pass) useClass(ctx context.Context, class *v1alpha1.MachineClass) error {
	p.class = dispatch.Class{Object: class}
	// Not the resourceVersion: labels make no difference.
	p.version = fmt.Sprintf("%.8s.%d", class.UID, class.Generation)
	var err error
	if p.provider, err = dispatch.Provider(class, p.Settings.DefaultProvider); err != nil {
		return err
	}
	p.userData = false
	if p.class.Secret, err = p.lookupSecret(ctx, "secretRef", class.SecretRef); err != nil {
		return err
	}
	p.class.Credentials, err = p.lookupSecret(ctx, "credentialsSecretRef", class.CredentialsSecretRef)

	return err
}

// lookupSecret finds a secret, adds its version to that of the class, and notes
// whether it holds user data: either of a class's two may. A missing secret must
// become a nil interface, not one that holds a nil pointer.
func (p *pass) lookupSecret(ctx context.Context, field string, ref *corev1.SecretReference) (metav1.Object, error) {
	if ref == nil {
		return nil, nil //nolint:nilnil // a class need not have secrets
	}
	key, allowed := v1alpha1.SecretKey(p.class.Object, ref)
	if !allowed {
		return nil, dispatch.Errorf(dispatch.InvalidArgument, "MachineClass %s: %s: Secret %s is in another namespace: "+
			"put it into %s, where the class is", p.class.Object.Name, field, key, p.class.Object.Namespace)
	}
	secret := &corev1.Secret{}
	err := p.Control.Get(ctx, key, secret)
	if apierrors.IsNotFound(err) {
		if secret = p.removedSecret(key); secret == nil {
			return nil, dispatch.Errorf(dispatch.NotFound, "MachineClass %s: %s: Secret %s does not exist: create it, "+
				"of type Opaque (mcm does not see those of Helm, service accounts, registries, TLS and bootstrap tokens)",
				p.class.Object.Name, field, key)
		}
	} else if err != nil {
		return nil, fmt.Errorf("read secret %s: %w", key, err)
	}
	p.version += "/" + secret.ResourceVersion
	p.userData = p.userData || len(secret.Data[userDataKey]) > 0

	return secret, nil
}
