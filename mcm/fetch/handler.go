package fetch

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/bootstrap"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/lastgood"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// takeBackTimeout is for looking whether a token is still wanted, and for deleting it.
const takeBackTimeout = 5 * time.Second

// An InFlight tells whether an operation of a machine is under way at a
// provider; dispatch.Dispatcher is one.
type InFlight interface {
	InFlight(provider, operationID string, uid types.UID) bool
}

// A Handler answers fetches from the manager's caches. It is a
// bus.FetchHandler and safe for concurrent use.
type Handler struct {
	// Reader reads classes and secrets.
	Reader client.Reader
	// Operations knows what this manager has under way.
	Operations InFlight
	// Live reads objects as they are stored, not from a cache. Another manager may
	// have sent the request that a fetch is for: what it has under way stands in the
	// Machines' journals, and what it referred to may not be in the cache here yet.
	// Nil means that there is no other.
	Live client.Reader
	// Removed remembers classes and secrets that are gone; nil means that nothing
	// does.
	Removed Removed
	// Reserved is the Secret with the control plane's own key, which no class may
	// refer to: with it one can open every sealed answer.
	Reserved client.ObjectKey
	// DefaultProvider is the driver for classes that name none; may be empty.
	DefaultProvider string
	// Tokens makes the tokens with which nodes join; nil when there are none.
	Tokens TokenIssuer
	// CreationTimeout tells how long a machine may take to join: its token is valid
	// for as long. machine.CreationTimeout knows.
	CreationTimeout func(*v1alpha1.Machine) time.Duration
	// UnderWay reads from a machine which operation its manager has begun, "" for
	// none. machine.UnderWay is one.
	UnderWay func(*v1alpha1.Machine) (operationID string)
}

// Removed remembers classes and secrets that are gone, and returns nil for those
// that it does not know; machineclass.Removed is one.
type Removed interface {
	Class(key client.ObjectKey) *v1alpha1.MachineClass
	Secret(key client.ObjectKey) *corev1.Secret
}

// A TokenIssuer makes and deletes bootstrap tokens; bootstrap.Tokens is one.
type TokenIssuer interface {
	Ensure(ctx context.Context, m *v1alpha1.Machine, validFor time.Duration) (token string, err error)
	Delete(ctx context.Context, m *v1alpha1.Machine) error
}

// Class returns a class of the asking driver's provider.
func (h *Handler) Class(ctx context.Context, provider string, req *driverv1.FetchClassRequest) (*driverv1.Class, error) {
	class, err := h.class(ctx, provider, req.GetClass())
	if err != nil {
		return nil, err
	}

	return classMessage(class, provider)
}

// Secret returns a secret, if the class that the driver names is its
// provider's and refers to it.
func (h *Handler) Secret(ctx context.Context, provider string, req *driverv1.FetchSecretRequest) (*driverv1.SecretContent, error) {
	class, err := h.class(ctx, provider, req.GetClass())
	if err != nil {
		return nil, err
	}
	want := req.GetSecret()
	key := client.ObjectKey{Namespace: want.GetNamespace(), Name: want.GetName()}
	if key == h.Reserved || !slices.Contains(v1alpha1.SecretsOf(class), key) {
		return nil, dispatch.Errorf(dispatch.PermissionDenied, "MachineClass %s/%s may not have Secret %s: a class has those that it "+
			"refers to, in its own namespace, and never the control plane's key", class.Namespace, class.Name, key)
	}
	secret, err := h.readSecret(ctx, key, want)
	if apierrors.IsNotFound(err) {
		return nil, dispatch.Errorf(dispatch.NotFound, "Secret %s/%s does not exist", want.GetNamespace(), want.GetName())
	}
	if err != nil {
		return nil, fmt.Errorf("read secret: %w", err)
	}

	return &driverv1.SecretContent{Reference: reference(secret), Data: secret.Data}, nil
}

// Bootstrap returns what replaces the placeholders of a machine's user data,
// while the operation that needs them is under way at the asking driver's
// provider.
func (h *Handler) Bootstrap(
	ctx context.Context, provider string, req *driverv1.FetchBootstrapRequest,
) (*driverv1.BootstrapContent, error) {
	if kind := dispatch.KindOf(req.GetOperationId()); kind != dispatch.Create && kind != dispatch.Initialize {
		return nil, dispatch.Errorf(dispatch.PermissionDenied, "operation %s boots no instance", req.GetOperationId())
	}
	m := &v1alpha1.Machine{}
	err := h.Reader.Get(ctx, client.ObjectKey{Namespace: req.GetNamespace(), Name: req.GetMachine()}, m)
	if !h.Operations.InFlight(provider, req.GetOperationId(), types.UID(req.GetMachineUid())) {
		if m, err = h.elsewhere(ctx, provider, req); err != nil {
			return nil, err
		}
		if m == nil {
			return nil, dispatch.Errorf(dispatch.PermissionDenied, "no operation %s is under way at provider %s",
				req.GetOperationId(), provider)
		}
	}

	values := map[string]string{PlaceholderMachineName: req.GetMachine()}
	if h.Tokens == nil {
		if err == nil {
			err = h.wantsNoToken(ctx, m)
		}

		return &driverv1.BootstrapContent{Values: values}, client.IgnoreNotFound(err)
	}
	if err != nil {
		return nil, fmt.Errorf("read machine: %w", err)
	}
	if string(m.UID) != req.GetMachineUid() {
		return nil, dispatch.Errorf(dispatch.NotFound, "machine %s/%s has another uid by now", m.Namespace, m.Name)
	}
	if !m.DeletionTimestamp.IsZero() {
		return nil, dispatch.Errorf(dispatch.FailedPrecondition, "machine %s/%s is being deleted: it gets no token to join with",
			m.Namespace, m.Name)
	}
	token, err := h.Tokens.Ensure(ctx, m, h.CreationTimeout(m))
	if late := h.takeBack(ctx, provider, req, m); late != nil {
		return nil, late
	}
	if err != nil {
		return nil, err
	}
	values[bootstrap.Placeholder] = token

	return &driverv1.BootstrapContent{Values: values}, nil
}

// takeBack deletes the token of a machine that went while it was made, and fails then:
// whoever removes a machine looks for its token when no operation is under way any
// more, and perhaps before this one was stored. That of a machine that stays is not
// touched, for the next create boots from the same.
func (h *Handler) takeBack(ctx context.Context, provider string, req *driverv1.FetchBootstrapRequest, m *v1alpha1.Machine) error {
	if h.Operations.InFlight(provider, req.GetOperationId(), m.UID) {
		return nil
	}
	// What has made a token late may have taken all the time that there was.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), takeBackTimeout)
	defer cancel()
	live, now := h.Live, &v1alpha1.Machine{}
	if live == nil {
		live = h.Reader
	}
	err := live.Get(ctx, client.ObjectKeyFromObject(m), now)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read machine: %w", err)
	}
	if err == nil && now.UID == m.UID && now.DeletionTimestamp.IsZero() {
		return nil
	}
	if err := h.Tokens.Delete(ctx, m); err != nil {
		return err
	}

	return dispatch.Errorf(dispatch.FailedPrecondition, "machine %s/%s went while its token was made", m.Namespace, m.Name)
}

// wantsNoToken fails when user data of the machine's class has a token's placeholder
// in it: with that in the token's place its instance would never join.
func (h *Handler) wantsNoToken(ctx context.Context, m *v1alpha1.Machine) error {
	class := &v1alpha1.MachineClass{}
	if err := h.Reader.Get(ctx, client.ObjectKey{Namespace: m.Namespace, Name: m.Spec.Class.Name}, class); err != nil {
		return fmt.Errorf("read class: %w", err)
	}
	for _, key := range v1alpha1.SecretsOf(class) {
		secret := &corev1.Secret{}
		if err := h.Reader.Get(ctx, key, secret); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("read secret: %w", err)
		}
		text := string(secret.Data[userDataKey])
		if strings.Contains(text, bootstrap.Placeholder) || strings.Contains(text, url.QueryEscape(bootstrap.Placeholder)) {
			return dispatch.Errorf(dispatch.FailedPrecondition, "Secret %s: user data has %s in it, and mcm makes no bootstrap tokens, "+
				"as it has no target cluster or runs with --bootstrap-tokens=false: put a token of your own there", key, bootstrap.Placeholder)
		}
	}

	return nil
}

// elsewhere returns the machine as it is stored if another manager, the leading
// one, has the operation under way, and nil if none has: fetches go to any of them.
func (h *Handler) elsewhere(
	ctx context.Context, provider string, req *driverv1.FetchBootstrapRequest,
) (*v1alpha1.Machine, error) {
	if h.Live == nil {
		return nil, nil //nolint:nilnil // there is no other manager
	}
	m := &v1alpha1.Machine{}
	err := h.Live.Get(ctx, client.ObjectKey{Namespace: req.GetNamespace(), Name: req.GetMachine()}, m)
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // nobody can have begun anything for it
	}
	if err != nil {
		return nil, fmt.Errorf("read machine: %w", err)
	}
	if string(m.UID) != req.GetMachineUid() || h.UnderWay(m) != req.GetOperationId() {
		return nil, nil //nolint:nilnil // as above
	}
	_, err = h.class(ctx, provider, &driverv1.ObjectReference{Namespace: m.Namespace, Name: m.Spec.Class.Name})
	if dispatch.CodeOf(err) == dispatch.NotFound {
		return nil, nil //nolint:nilnil // another provider's
	}
	if err != nil {
		return nil, err
	}

	return m, nil
}

// userDataKey is the key of a class's secret that instances boot from.
const userDataKey = "userData"

// PlaceholderMachineName stands in user data for the machine's name.
const PlaceholderMachineName = "<<MACHINE_NAME>>"

// class reads a class and refuses one of another provider as if there were
// none: a driver learns nothing of others.
func (h *Handler) class(ctx context.Context, provider string, ref *driverv1.ObjectReference) (*v1alpha1.MachineClass, error) {
	class, err := h.readClass(ctx, client.ObjectKey{Namespace: ref.GetNamespace(), Name: ref.GetName()}, ref)
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("read class: %w", err)
	}
	owner := ""
	if err == nil {
		class = lastgood.Version(class, ref.GetResourceVersion())
		owner, err = dispatch.Provider(class, h.DefaultProvider)
	}
	if err != nil || owner != provider {
		return nil, dispatch.Errorf(dispatch.NotFound, "provider %s has no MachineClass %s/%s",
			provider, ref.GetNamespace(), ref.GetName())
	}

	return class, nil
}

func reference(o metav1.Object) *driverv1.ObjectReference {
	return &driverv1.ObjectReference{
		Namespace: o.GetNamespace(), Name: o.GetName(), Uid: string(o.GetUID()), ResourceVersion: o.GetResourceVersion(),
	}
}

func classMessage(class *v1alpha1.MachineClass, provider string) (*driverv1.Class, error) {
	spec, err := json.Marshal(class.ProviderSpec)
	if err != nil {
		return nil, fmt.Errorf("providerSpec of class %s: %w", class.Name, err)
	}
	m := &driverv1.Class{
		Reference: reference(class), Provider: provider, ProviderSpec: spec,
		Labels: class.Labels, Annotations: classAnnotations(class.Annotations),
	}
	if t := class.NodeTemplate; t != nil {
		m.NodeTemplate = &driverv1.ClassNodeTemplate{
			InstanceType: t.InstanceType, Region: t.Region, Zone: t.Zone,
			Capacity: quantities(t.Capacity), VirtualCapacity: quantities(t.VirtualCapacity),
		}
		if t.Architecture != nil {
			m.NodeTemplate.Architecture = *t.Architecture
		}
	}

	return m, nil
}

// classAnnotations leaves out of a class's those that hold itself, as it was: it may
// have been another provider's.
func classAnnotations(all map[string]string) map[string]string {
	some := maps.Clone(all)
	delete(some, corev1.LastAppliedConfigAnnotation)
	delete(some, v1alpha1.AnnotationKeyAccepted)

	return some
}

func quantities(list corev1.ResourceList) map[string]string {
	m := make(map[string]string, len(list))
	for name, q := range list {
		m[string(name)] = q.String()
	}

	return m
}
