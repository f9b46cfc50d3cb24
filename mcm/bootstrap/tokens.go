package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// Placeholder stands in user data for the machine's token.
const Placeholder = "<<BOOTSTRAP_TOKEN>>"

// LabelKeyMachineUID on a token's Secret holds the uid of its machine. A token with no
// or another uid belongs to another program or machine.
const LabelKeyMachineUID = "machinebus.io/machine-uid"

// Keys of a token's Secret.
const (
	keyID             = "token-id"
	keySecret         = "token-secret"
	keyExpiration     = "expiration"
	keyDescription    = "description"
	keyAuthentication = "usage-bootstrap-authentication"
	keySigning        = "usage-bootstrap-signing"
	keyGroups         = "auth-extra-groups"
)

// attempts bounds the retries for a token that another program writes at the same time.
const attempts = 10

// Tokens creates and deletes the tokens of machines. Its exported fields are set once and
// then only read. It is safe for concurrent use, also by several managers.
type Tokens struct {
	// Target is a client of the target cluster that reads from the API server
	// itself: a cache would have to hold every Secret of the cluster.
	Target client.Client
	// ExtraGroups are further groups of a token's bearer, besides system:bootstrappers,
	// separated by commas; may be empty. See ValidateGroups.
	ExtraGroups string
	// Now is the clock; nil means time.Now.
	Now func() time.Time

	created secretCache
}

// Ensure returns the machine's token, and creates it for validFor if there is none. A
// repeated create must have the same user data, or the provider refuses its idempotency
// token. So an expired token becomes valid again, also for an instance that still boots.
//
// The token is a secret: do not log it.
func (t *Tokens) Ensure(ctx context.Context, machine *v1alpha1.Machine, validFor time.Duration) (string, error) {
	if err := check(machine); err != nil {
		return "", err
	}
	if validFor <= 0 {
		return "", fmt.Errorf("bootstrap token of machine %s/%s: would be valid for %s, which is not positive",
			machine.Namespace, machine.Name, validFor)
	}
	for n := range candidates {
		token, err := t.claim(ctx, machine, tokenID(machine.UID, n), validFor)
		if !errors.Is(err, errForeign) {
			return token, err
		}
	}

	return "", fmt.Errorf("bootstrap token of machine %s/%s: Secrets %s/%s and the other candidates do not belong to it; "+
		"delete those that no machine needs", machine.Namespace, machine.Name, metav1.NamespaceSystem,
		secretName(tokenID(machine.UID, 0)))
}

// Delete removes the machine's token, if there is one. An error that wraps the API
// server's Forbidden persists. After other errors call Delete again: only Kubernetes'
// token cleaner deletes expired tokens, and it is off by default.
func (t *Tokens) Delete(ctx context.Context, machine *v1alpha1.Machine) error {
	if err := check(machine); err != nil {
		return err
	}
	if secret := t.created.take(machine.UID); secret != nil {
		err := t.Target.Delete(ctx, secret, client.Preconditions{UID: &secret.UID})
		if err == nil {
			return nil
		}
		if !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return fmt.Errorf("delete bootstrap token of machine %s/%s: %w", machine.Namespace, machine.Name, err)
		}
		// It was deleted, and another one may have been created.
	}
	for n := range candidates {
		secret, err := t.read(ctx, tokenID(machine.UID, n))
		if apierrors.IsNotFound(err) || err == nil && !owns(machine, secret) {
			continue // the token that occupied this id may be gone: look at the next candidate too
		}
		if err != nil {
			return fmt.Errorf("read bootstrap token of machine %s/%s: %w", machine.Namespace, machine.Name, err)
		}
		err = t.Target.Delete(ctx, secret, client.Preconditions{UID: &secret.UID})
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete bootstrap token of machine %s/%s: %w", machine.Namespace, machine.Name, err)
		}

		return nil
	}

	return nil
}

// errForeign means that the token with an id is not the machine's.
var errForeign = errors.New("the token with this id belongs to another machine or program")

// claim creates the token with that id, or returns the one that the machine has.
func (t *Tokens) claim(ctx context.Context, machine *v1alpha1.Machine, id string, validFor time.Duration) (string, error) {
	fault := func(verb string, err error) error {
		return fmt.Errorf("%s bootstrap token of machine %s/%s: %w", verb, machine.Namespace, machine.Name, err)
	}
	for range attempts {
		secret := t.secret(machine, id, validFor)
		err := t.Target.Create(ctx, secret)
		if err == nil {
			t.created.add(machine.UID, secret)

			return token(secret), nil
		}
		if apierrors.IsForbidden(err) {
			return "", fault("create", fmt.Errorf("%w (grant mcm the Role in deploy/kustomize/target-cluster/bootstrap-tokens.yaml, "+
				"or run it with --bootstrap-tokens=false)", err))
		}
		if !apierrors.IsAlreadyExists(err) {
			return "", fault("create", err)
		}
		secret, err = t.read(ctx, id)
		switch {
		case apierrors.IsNotFound(err):
			continue // deleted in between
		case err != nil:
			return "", fault("read", err)
		case !owns(machine, secret):
			return "", errForeign
		case t.valid(secret):
			return token(secret), nil
		}
		err = t.renew(ctx, secret, t.secret(machine, id, validFor))
		if err == nil {
			return token(secret), nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return "", fault("renew", err)
		}
	}

	return "", fault("claim", fmt.Errorf("another program changed the token during each of %d attempts", attempts))
}

// renew replaces the content of a token by a fresh one, but keeps a valid secret.
func (t *Tokens) renew(ctx context.Context, secret, fresh *corev1.Secret) error {
	before := secret.DeepCopy()
	if secretPattern.Match(secret.Data[keySecret]) {
		fresh.Data[keySecret] = secret.Data[keySecret]
	}
	secret.Data = fresh.Data

	return t.Target.Patch(ctx, secret, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

// valid reports whether a node can join with the token now.
func (t *Tokens) valid(secret *corev1.Secret) bool {
	expiration, err := time.Parse(time.RFC3339, string(secret.Data[keyExpiration]))

	return err == nil && t.now().Before(expiration) && secretPattern.Match(secret.Data[keySecret]) &&
		secretName(string(secret.Data[keyID])) == secret.Name
}

func (t *Tokens) secret(machine *v1alpha1.Machine, id string, validFor time.Duration) *corev1.Secret {
	data := map[string][]byte{
		keyID:             []byte(id),
		keySecret:         []byte(newSecret()),
		keyExpiration:     []byte(t.now().Add(validFor).UTC().Format(time.RFC3339)),
		keyAuthentication: []byte("true"),
		keySigning:        []byte("true"),
		keyDescription:    fmt.Appendf(nil, "A bootstrap token for machine %s/%s", machine.Namespace, machine.Name),
	}
	if t.ExtraGroups != "" {
		data[keyGroups] = []byte(t.ExtraGroups)
	}

	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: metav1.NamespaceSystem, Name: secretName(id),
			Labels: map[string]string{LabelKeyMachineUID: string(machine.UID)},
		},
		Type: corev1.SecretTypeBootstrapToken,
		Data: data,
	}
}

func (t *Tokens) read(ctx context.Context, id string) (*corev1.Secret, error) {
	secret := &corev1.Secret{}

	return secret, t.Target.Get(ctx, types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: secretName(id)}, secret)
}

func (t *Tokens) now() time.Time {
	if t.Now != nil {
		return t.Now()
	}

	return time.Now()
}

func secretName(id string) string { return "bootstrap-token-" + id }

func token(secret *corev1.Secret) string {
	return string(secret.Data[keyID]) + "." + string(secret.Data[keySecret])
}

// owns reports whether a token is the machine's. Tokens without our label, such as those
// of another manager, are left alone.
func owns(machine *v1alpha1.Machine, secret *corev1.Secret) bool {
	return secret.Type == corev1.SecretTypeBootstrapToken && secret.Labels[LabelKeyMachineUID] == string(machine.UID)
}

func check(machine *v1alpha1.Machine) error {
	if machine.UID == "" {
		return fmt.Errorf("bootstrap token of machine %s/%s: the machine has no uid", machine.Namespace, machine.Name)
	}

	return nil
}
