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

// LabelKeyMachineUID on a token's Secret holds the uid of its machine. A token
// without it, or with another one, is somebody else's.
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

// attempts bounds how often a token that others write at the same time is looked
// at again.
const attempts = 10

// Tokens keeps the tokens of machines. Its exported fields are set once and only read; it
// is safe for concurrent use, by several managers too.
type Tokens struct {
	// Target is a client of the target cluster that reads from the API server
	// itself: a cache would have to hold every Secret of the cluster.
	Target client.Client
	// ExtraGroups are the groups, separated by commas, that a token gives its
	// bearer besides system:bootstrappers; may be empty. See ValidateGroups.
	ExtraGroups string
	// Now is the clock; nil means time.Now.
	Now func() time.Time

	memo memo
}

// Ensure returns the machine's token. It is made to be valid for validFor, and
// the same one is returned while it is there: a create that is tried again must
// have the same user data, or the provider refuses its idempotency token. One that
// has expired becomes valid again, for an instance that still boots with it.
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

	return "", fmt.Errorf("bootstrap token of machine %s/%s: Secrets %s/%s and the other candidates belong to somebody else; "+
		"delete those that are not needed", machine.Namespace, machine.Name, metav1.NamespaceSystem,
		secretName(tokenID(machine.UID, 0)))
}

// Delete removes the machine's token; that there is none is no error. An error that
// wraps the API server's Forbidden does not pass by itself. After others Delete is to be
// called again: a token that has expired is deleted by nobody but Kubernetes' token
// cleaner, which is off by default.
func (t *Tokens) Delete(ctx context.Context, machine *v1alpha1.Machine) error {
	if err := check(machine); err != nil {
		return err
	}
	if secret := t.memo.take(machine.UID); secret != nil {
		err := t.Target.Delete(ctx, secret, client.Preconditions{UID: &secret.UID})
		if err == nil {
			return nil
		}
		if !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return fmt.Errorf("delete bootstrap token of machine %s/%s: %w", machine.Namespace, machine.Name, err)
		}
		// Somebody has deleted it, and perhaps made another one.
	}
	for n := range candidates {
		secret, err := t.read(ctx, tokenID(machine.UID, n))
		if apierrors.IsNotFound(err) || err == nil && !owns(machine, secret) {
			continue // whose id it was may be gone by now: look at the next one all the same
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

// errForeign says that an id belongs to somebody else.
var errForeign = errors.New("the token of this id belongs to somebody else")

// claim makes the token of that id, or takes the one that the machine has.
func (t *Tokens) claim(ctx context.Context, machine *v1alpha1.Machine, id string, validFor time.Duration) (string, error) {
	fault := func(verb string, err error) error {
		return fmt.Errorf("%s bootstrap token of machine %s/%s: %w", verb, machine.Namespace, machine.Name, err)
	}
	for range attempts {
		secret := t.secret(machine, id, validFor)
		err := t.Target.Create(ctx, secret)
		if err == nil {
			t.memo.add(machine.UID, secret)

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

	return "", fault("claim", errors.New("others write it all the time"))
}

// renew gives a token the content of a fresh one, but keeps its secret unless
// that is unusable.
func (t *Tokens) renew(ctx context.Context, secret, fresh *corev1.Secret) error {
	before := secret.DeepCopy()
	if secretPattern.Match(secret.Data[keySecret]) {
		fresh.Data[keySecret] = secret.Data[keySecret]
	}
	secret.Data = fresh.Data

	return t.Target.Patch(ctx, secret, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

// valid tells whether a node can join with the token at this moment.
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

// owns tells whether a token is the machine's. One that somebody made without
// our label, another manager perhaps, is not touched.
func owns(machine *v1alpha1.Machine, secret *corev1.Secret) bool {
	return secret.Type == corev1.SecretTypeBootstrapToken && secret.Labels[LabelKeyMachineUID] == string(machine.UID)
}

func check(machine *v1alpha1.Machine) error {
	if machine.UID == "" {
		return fmt.Errorf("bootstrap token of machine %s/%s: the machine has no uid", machine.Namespace, machine.Name)
	}

	return nil
}
