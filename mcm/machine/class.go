package machine

import (
	"context"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/steps"
)

// userDataKey is the key of a class's secret that instances boot from.
const userDataKey = "userData"

// machineClass is the class of a machine, with its secrets.
type machineClass struct {
	*object
	dispatch.Class

	dispatcher Dispatcher
	removed    Removed
	accepted   *sync.Map // generation by uid of a class, as last noted on it

	version  string // of the class and its secrets
	provider string
	userData bool  // whether a secret of the class has some
	lacking  error // why the class's secret is not known
}

// resolveClass finds the machine's class and its secrets, which only an
// operation needs.
func (c *machineClass) resolveClass(ctx context.Context) (steps.Next, error) {
	if !c.creating() {
		return steps.Proceed, nil
	}
	err := c.lookupClass(ctx)
	if _, running := c.operationAt(c.dispatcher); running {
		// What runs was sent with a class; it may end although the class is
		// gone by now.
		if err != nil {
			c.log.V(1).Info("class of a running operation cannot be read", "err", err.Error())
		}

		return steps.Proceed, nil
	}
	if err == nil && c.Secret != nil && !c.userData {
		err = dispatch.Errorf(dispatch.InvalidArgument, "userdata field not found in secret for machine %q: "+
			"Secret %s/%s needs a key %q", c.machine.Name, c.Secret.GetNamespace(), c.Secret.GetName(), userDataKey)
	}
	if err == nil {
		err = validateClass(c.Object)
	}
	if err == nil && c.providerChanged() {
		err = c.providerChangedError("or delete the machine")
	}
	if err == nil {
		return steps.Proceed, nil
	}
	if dispatch.CodeOf(err) == dispatch.Unknown {
		return steps.Wait, err // not the object's fault: the API server's
	}

	return c.refuseClass(ctx, err)
}

// refuseClass notes that the machine cannot be made as it or its class stands. A
// change of any of them starts the next pass.
func (c *machineClass) refuseClass(ctx context.Context, err error) (steps.Next, error) {
	c.dispatcher.Withdraw(c.machine.UID)
	if c.isNew() {
		// From its phase alone another manager might have had something made.
		if err := c.journal.write(c.machine); err != nil {
			return steps.Wait, err
		}
		if err := c.patch(ctx); err != nil {
			return steps.Wait, err
		}
	}
	news := c.failCreation(err, v1alpha1.CreateFailedText)
	if news {
		c.warnAfterWritef("InvalidMachine", "%s", fault(err))
	}

	return steps.Again(c.settings.Retry.Long), c.patchStatus(ctx)
}

// lookupClass finds the machine's class and fills in what useClass does. An
// error with a code is the objects' fault.
func (c *machineClass) lookupClass(ctx context.Context) error {
	ref := c.machine.Spec.Class
	if ref.Kind != v1alpha1.KindMachineClass || ref.Name == "" {
		return dispatch.Errorf(dispatch.InvalidArgument,
			"spec.class: kind is %q and name is %q: want kind MachineClass and the name of one", ref.Kind, ref.Name)
	}
	class, key := &v1alpha1.MachineClass{}, client.ObjectKey{Namespace: c.machine.Namespace, Name: ref.Name}
	err := c.control.Get(ctx, key, class)
	if apierrors.IsNotFound(err) {
		if class = c.removedClass(key); class == nil {
			return dispatch.Errorf(dispatch.NotFound, "MachineClass %s does not exist: create it, or correct spec.class", key)
		}
	} else if err != nil {
		return fmt.Errorf("read class %s: %w", ref.Name, err)
	}

	return c.useClass(ctx, class)
}

// useClass fills in class, version and provider, and the class's secrets. With an
// error the provider is known nevertheless, unless it is the provider's.
func (c *machineClass) useClass(ctx context.Context, class *v1alpha1.MachineClass) error {
	c.Class = dispatch.Class{Object: class}
	// Not the resourceVersion: labels make no difference.
	c.version = fmt.Sprintf("%.8s.%d", class.UID, class.Generation)
	var err error
	if c.provider, err = dispatch.Provider(class, c.settings.DefaultProvider); err != nil {
		return err
	}
	c.userData = false
	if c.Secret, err = c.lookupSecret(ctx, "secretRef", class.SecretRef); err != nil {
		return err
	}
	c.Credentials, err = c.lookupSecret(ctx, "credentialsSecretRef", class.CredentialsSecretRef)

	return err
}

// lookupSecret finds a secret, adds its version to that of the class, and notes
// whether it holds user data: either of a class's two may. A missing secret must
// become a nil interface, not one that holds a nil pointer.
func (c *machineClass) lookupSecret(ctx context.Context, field string, ref *corev1.SecretReference) (metav1.Object, error) {
	if ref == nil {
		return nil, nil //nolint:nilnil // a class need not have secrets
	}
	key, allowed := v1alpha1.SecretKey(c.Object, ref)
	if !allowed {
		return nil, dispatch.Errorf(dispatch.InvalidArgument, "MachineClass %s: %s: Secret %s is in another namespace: "+
			"put it into %s, where the class is", c.Object.Name, field, key, c.Object.Namespace)
	}
	secret := &corev1.Secret{}
	err := c.control.Get(ctx, key, secret)
	if apierrors.IsNotFound(err) {
		if secret = c.removedSecret(key); secret == nil {
			return nil, dispatch.Errorf(dispatch.NotFound, "MachineClass %s: %s: Secret %s does not exist: create it, "+
				"of type Opaque (mcm does not see those of Helm, service accounts, registries, TLS and bootstrap tokens)",
				c.Object.Name, field, key)
		}
	} else if err != nil {
		return nil, fmt.Errorf("read secret %s: %w", key, err)
	}
	c.version += "/" + secret.ResourceVersion
	c.userData = c.userData || len(secret.Data[userDataKey]) > 0

	return secret, nil
}
