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

// deleteLateTimeout bounds the check whether a machine still needs its token, and the
// token's deletion.
const deleteLateTimeout = 5 * time.Second

// An InFlight reports whether an operation of a machine is in flight at a provider;
// dispatch.Dispatcher is one.
type InFlight interface {
	InFlight(provider, operationID string, uid types.UID) bool
}

// A Handler answers fetches from the manager's caches. It is a
// bus.FetchHandler and safe for concurrent use.
type Handler struct {
	// Reader reads classes and secrets.
	Reader client.Reader
	// Operations knows the operations of this manager.
	Operations InFlight
	// Live reads from the API server. It is for fetches that belong to an operation of
	// another manager: the Machine's journal has the operation, and the objects that it
	// refers to may not be in this process's cache yet. Nil means that there is no other
	// manager.
	Live client.Reader
	// Removed remembers deleted classes and secrets; may be nil.
	Removed Removed
	// Reserved is the Secret with the control plane's own key. No class may refer to it:
	// the key opens every sealed answer.
	Reserved client.ObjectKey
	// DefaultProvider is the driver for classes that name none; may be empty.
	DefaultProvider string
	// Tokens issues the tokens with which nodes join; nil if mcm issues none.
	Tokens TokenIssuer
	// CreationTimeout returns how long a machine may take to join, which is also how long
	// its token is valid; such as machine.CreationTimeout.
	CreationTimeout func(*v1alpha1.Machine) time.Duration
	// UnderWay returns the id of the operation that a Machine's journal has in flight, ""
	// for none; such as machine.UnderWay.
	UnderWay func(*v1alpha1.Machine) (operationID string)
}

// Removed returns deleted classes and secrets as they were last seen, nil for unknown
// ones; machineclass.Removed is one.
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
		return nil, dispatch.Errorf(dispatch.PermissionDenied, "MachineClass %s/%s does not give access to Secret %s: a driver only gets "+
			"secrets in the class's namespace that the class refers to, and never the control plane's key", class.Namespace, class.Name, key)
	}
	secret, err := h.readSecret(ctx, key, want)
	if apierrors.IsNotFound(err) {
		return nil, dispatch.Errorf(dispatch.NotFound, "Secret %s does not exist: create it, or correct the reference in MachineClass %s/%s",
			key, class.Namespace, class.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("read secret: %w", err)
	}

	return &driverv1.SecretContent{Reference: reference(secret), Data: secret.Data}, nil
}

// Bootstrap returns the values for the placeholders in a machine's user data. It only
// does so while an operation that needs them is in flight at the driver's provider.
func (h *Handler) Bootstrap(
	ctx context.Context, provider string, req *driverv1.FetchBootstrapRequest,
) (*driverv1.BootstrapContent, error) {
	if kind := dispatch.KindOf(req.GetOperationId()); kind != dispatch.Create && kind != dispatch.Initialize {
		return nil, dispatch.Errorf(dispatch.PermissionDenied, "operation %s is no create or initialize, and only those get bootstrap values",
			req.GetOperationId())
	}
	m := &v1alpha1.Machine{}
	err := h.Reader.Get(ctx, client.ObjectKey{Namespace: req.GetNamespace(), Name: req.GetMachine()}, m)
	if !h.Operations.InFlight(provider, req.GetOperationId(), types.UID(req.GetMachineUid())) {
		if m, err = h.machineOfOtherManager(ctx, provider, req); err != nil {
			return nil, err
		}
		if m == nil {
			return nil, dispatch.Errorf(dispatch.PermissionDenied, "operation %s is not in flight at provider %s",
				req.GetOperationId(), provider)
		}
	}

	values := map[string]string{PlaceholderMachineName: req.GetMachine()}
	if h.Tokens == nil {
		if err == nil {
			err = h.checkNoTokenNeeded(ctx, m)
		}

		return &driverv1.BootstrapContent{Values: values}, client.IgnoreNotFound(err)
	}
	if err != nil {
		return nil, fmt.Errorf("read machine: %w", err)
	}
	if string(m.UID) != req.GetMachineUid() {
		return nil, dispatch.Errorf(dispatch.NotFound, "machine %s/%s was replaced by another machine of the same name", m.Namespace, m.Name)
	}
	if !m.DeletionTimestamp.IsZero() {
		return nil, dispatch.Errorf(dispatch.FailedPrecondition, "machine %s/%s is being deleted and gets no bootstrap token",
			m.Namespace, m.Name)
	}
	token, err := h.Tokens.Ensure(ctx, m, h.CreationTimeout(m))
	if late := h.deleteLateToken(ctx, provider, req, m); late != nil {
		return nil, late
	}
	if err != nil {
		return nil, err
	}
	values[bootstrap.Placeholder] = token

	return &driverv1.BootstrapContent{Values: values}, nil
}

// deleteLateToken deletes the token of a machine that was deleted while the token was
// created, and returns an error then. The machine's deletion removes the token once no
// operation is in flight, which may have been before the token was stored. A machine that
// stays keeps its token: the next create needs the same.
func (h *Handler) deleteLateToken(
	ctx context.Context, provider string, req *driverv1.FetchBootstrapRequest, m *v1alpha1.Machine,
) error {
	if h.Operations.InFlight(provider, req.GetOperationId(), m.UID) {
		return nil
	}
	// Whatever delayed the token may have used up the time of ctx.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteLateTimeout)
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

	return dispatch.Errorf(dispatch.FailedPrecondition, "machine %s/%s was deleted while its bootstrap token was created", m.Namespace, m.Name)
}

// checkNoTokenNeeded returns an error if the user data of the machine's class contains the
// token's placeholder: without a token the instance would never join.
func (h *Handler) checkNoTokenNeeded(ctx context.Context, m *v1alpha1.Machine) error {
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
			return dispatch.Errorf(dispatch.FailedPrecondition, "Secret %s: user data contains %s, but mcm issues no bootstrap tokens "+
				"because it has no target cluster or runs with --bootstrap-tokens=false: replace the placeholder by your own token",
				key, bootstrap.Placeholder)
		}
	}

	return nil
}

// machineOfOtherManager returns the stored machine if another manager, the leading one,
// has the operation in flight; otherwise nil. Drivers send fetches to any manager.
func (h *Handler) machineOfOtherManager(
	ctx context.Context, provider string, req *driverv1.FetchBootstrapRequest,
) (*v1alpha1.Machine, error) {
	if h.Live == nil {
		return nil, nil //nolint:nilnil // there is no other manager
	}
	m := &v1alpha1.Machine{}
	err := h.Live.Get(ctx, client.ObjectKey{Namespace: req.GetNamespace(), Name: req.GetMachine()}, m)
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // no operation can be in flight for it
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

// class reads a class. For a class of another provider it returns NotFound, so that a
// driver learns nothing about other providers.
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

// classAnnotations omits the annotations that hold an earlier version of the class: that
// version may have belonged to another provider.
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
