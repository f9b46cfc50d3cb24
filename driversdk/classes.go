package driversdk

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// fetcher is the part of [bus.FetchClient] that is used here.
type fetcher interface {
	Class(ctx context.Context, cluster string, ref *driverv1.ObjectReference) (*driverv1.Class, error)
	Secret(ctx context.Context, cluster string, class, secret *driverv1.ObjectReference) (*driverv1.SecretContent, error)
	Bootstrap(ctx context.Context, cluster, operationID string, m *driverv1.Machine) (map[string]string, error)
}

// What is fetched, as the metrics call it.
const (
	whatClass     = "class"
	whatSecret    = "secret"
	whatBootstrap = "bootstrap"
)

// classes turns the references of requests into classes, from its cache where it
// can.
type classes[S any] struct {
	fetch   fetcher
	decoder specDecoder[S]
	metrics *metrics
	known   *cache[*classVersion[S]]
	secrets *cache[Secret]
}

// A classVersion is a fetched class; spec decodes it once, in the goroutine of
// the first operation that needs it, where a panic of S's methods is caught.
type classVersion[S any] struct {
	*driverv1.Class
	spec func() (S, error)
}

func newClasses[S any](fetch fetcher, decoder specDecoder[S], m *metrics) *classes[S] {
	return &classes[S]{
		fetch: fetch, decoder: decoder, metrics: m,
		known:   newCache[*classVersion[S]](func(hit bool) { m.looked(whatClass, hit) }),
		secrets: newCache[Secret](func(hit bool) { m.looked(whatSecret, hit) }),
	}
}

// resolve returns the class that a request names, decoded and with its secrets.
func (c *classes[S]) resolve(ctx context.Context, cluster string, ref *driverv1.ClassReference) (*Class[S], error) {
	if ref.GetClass().GetName() == "" {
		return nil, Errorf(InvalidArgument, "request names no class")
	}
	version, err := c.version(ctx, cluster, ref.GetClass())
	if err != nil {
		return nil, err
	}
	spec, err := version.spec()
	if err != nil {
		return nil, fmt.Errorf("class %s/%s: %w", ref.GetClass().GetNamespace(), ref.GetClass().GetName(), err)
	}
	class := &Class[S]{
		Cluster: cluster, Namespace: ref.GetClass().GetNamespace(), Name: ref.GetClass().GetName(),
		UID: version.GetReference().GetUid(), ResourceVersion: version.GetReference().GetResourceVersion(),
		Labels: version.GetLabels(), Annotations: version.GetAnnotations(),
		SecretRef: secretReferenceOf(ref.GetSecret()), CredentialsSecretRef: secretReferenceOf(ref.GetCredentialsSecret()),
		Spec: spec, Secret: Secret{}, NodeTemplate: nodeTemplateOf(version.GetNodeTemplate()),
	}
	// In this order: credentials win.
	for _, secretRef := range []*driverv1.ObjectReference{ref.GetSecret(), ref.GetCredentialsSecret()} {
		if secretRef.GetName() == "" {
			continue
		}
		secret, err := c.secret(ctx, cluster, ref.GetClass(), secretRef)
		if err != nil {
			return nil, err
		}
		maps.Copy(class.Secret, secret)
	}

	return class, nil
}

func (c *classes[S]) version(ctx context.Context, cluster string, ref *driverv1.ObjectReference) (*classVersion[S], error) {
	fetch := func(ctx context.Context) (*classVersion[S], objectVersion, error) {
		class, err := spanned(ctx, "fetch "+whatClass, func(ctx context.Context) (*driverv1.Class, error) {
			return c.fetch.Class(ctx, cluster, ref)
		})
		c.metrics.fetched(whatClass, err)
		if err != nil {
			return nil, objectVersion{}, fetchError("class", ref, err)
		}
		raw := class.GetProviderSpec()
		spec := sync.OnceValues(func() (S, error) { return c.decoder.decode(raw) })

		return &classVersion[S]{Class: class, spec: spec}, versionOf(class.GetReference()), nil
	}

	return c.known.get(ctx, keyOf(cluster, ref), versionOf(ref), fetch)
}

func (c *classes[S]) secret(ctx context.Context, cluster string, class, ref *driverv1.ObjectReference) (Secret, error) {
	fetch := func(ctx context.Context) (Secret, objectVersion, error) {
		content, err := spanned(ctx, "fetch "+whatSecret, func(ctx context.Context) (*driverv1.SecretContent, error) {
			return c.fetch.Secret(ctx, cluster, class, ref)
		})
		c.metrics.fetched(whatSecret, err)
		if err != nil {
			return nil, objectVersion{}, fetchError("secret", ref, err)
		}

		return content.GetData(), versionOf(content.GetReference()), nil
	}

	return c.secrets.get(ctx, keyOf(cluster, ref), versionOf(ref), fetch)
}

// changed forgets what a notice is about. It does not block.
func (c *classes[S]) changed(cluster string, change *driverv1.Changed) {
	key := keyOf(cluster, change.GetReference())
	switch change.GetKind() {
	case driverv1.Changed_KIND_CLASS:
		c.known.drop(key)
		c.metrics.changed(whatClass)
	case driverv1.Changed_KIND_SECRET:
		c.secrets.drop(key)
		c.metrics.changed(whatSecret)
	default: // a kind of a newer contract: nothing of it is kept here
	}
}

func (c *classes[S]) wait() {
	c.known.wait()
	c.secrets.wait()
}

// fetchError words a failed fetch. Codes that would say something about the
// instance are replaced: a class that is gone must not look like a machine that
// is gone.
func fetchError(what string, ref *driverv1.ObjectReference, err error) error {
	code := bus.CodeOf(err)
	if bus.OriginOf(err) != bus.OriginDriver {
		code = Unavailable // the manager did not answer, and the cloud was not called
	}
	switch code {
	case Unavailable, Canceled, DeadlineExceeded, Internal, PermissionDenied, Unauthenticated, FailedPrecondition:
	case NotFound, OutOfRange, InvalidArgument:
		code = FailedPrecondition
	default:
		code = Internal
	}
	name := ref.GetNamespace() + "/" + ref.GetName()
	var coded *bus.Error
	if errors.As(err, &coded) && coded.Origin == bus.OriginDriver && !errors.Is(err, bus.ErrUntrusted) {
		return Errorf(code, "the manager refused %s %s: %w", what, name, err)
	}

	return Errorf(code, "%s %s is needed: %w", what, name, err)
}

func nodeTemplateOf(t *driverv1.ClassNodeTemplate) ClassNodeTemplate {
	return ClassNodeTemplate{
		InstanceType: t.GetInstanceType(), Region: t.GetRegion(), Zone: t.GetZone(), Architecture: t.GetArchitecture(),
		Capacity: t.GetCapacity(), VirtualCapacity: t.GetVirtualCapacity(),
	}
}
