package drivertest

import (
	"bytes"
	"errors"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A cache is what a replica holds of one control plane's.
type cache struct {
	class   *driverv1.Class
	secrets map[string]*driverv1.SecretContent
	pin     string // the control plane's key
}

// cacheOf returns that of a control plane. r.mu is held.
func (r *replica) cacheOf(cluster string) *cache {
	c := r.caches[cluster]
	if c == nil {
		c = &cache{secrets: map[string]*driverv1.SecretContent{}}
		r.caches[cluster] = c
	}

	return c
}

func (r *replica) onChanged(m *nats.Msg) {
	env, err := bus.Decode(m.Data, "")
	if err != nil {
		r.t.Error(err)

		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.cacheOf(clusterOf(m))
	switch kind := env.GetChanged().GetKind(); {
	case r.fault == "CHANGED-1", r.fault == "CHANGED-1/secret" && kind == driverv1.Changed_KIND_SECRET:
	case kind == driverv1.Changed_KIND_SECRET:
		delete(c.secrets, env.GetChanged().GetReference().GetName())
	default:
		c.class = nil
	}
}

// fetch asks the manager for the class and its secret, unless they are known.
func (r *replica) fetch(cluster string, ref *driverv1.ClassReference) (*driverv1.Class, *driverv1.SecretContent, error) {
	r.mu.Lock()
	c := r.cacheOf(cluster)
	class, secret := c.class, c.secrets[ref.GetSecret().GetName()]
	r.mu.Unlock()
	same := func(a, b *driverv1.ObjectReference) bool { return a.GetResourceVersion() == b.GetResourceVersion() }
	if class == nil || r.fault != "REF-1" && !same(class.GetReference(), ref.GetClass()) {
		env, err := r.ask(cluster, "class", &driverv1.Envelope{Body: &driverv1.Envelope_FetchClass{
			FetchClass: &driverv1.FetchClassRequest{Class: ref.GetClass()},
		}})
		if err != nil {
			return nil, nil, err
		}
		if err := bus.ErrorOf(env.GetFetchedClass().GetStatus()); err != nil {
			return nil, nil, err
		}
		class = env.GetFetchedClass().GetClass()
	}
	if ref.GetSecret() != nil && (secret == nil || r.fault != "REF-1/secret" && !same(secret.GetReference(), ref.GetSecret())) {
		var err error
		if secret, err = r.fetchSecret(cluster, ref); err != nil {
			return nil, nil, err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	c.class, c.secrets[ref.GetSecret().GetName()] = class, secret

	return class, secret, nil
}

func (r *replica) fetchSecret(cluster string, ref *driverv1.ClassReference) (*driverv1.SecretContent, error) {
	nonce := []byte(nuid.Next())
	env, err := r.ask(cluster, "secret", &driverv1.Envelope{Body: &driverv1.Envelope_FetchSecret{
		FetchSecret: &driverv1.FetchSecretRequest{Class: ref.GetClass(), Secret: ref.GetSecret(), Recipient: r.key.Public(), Nonce: nonce},
	}})
	if err != nil {
		return nil, err
	}
	if err := bus.ErrorOf(env.GetFetchedSecret().GetStatus()); err != nil {
		return nil, err
	}
	sealed := env.GetFetchedSecret().GetSealed()
	r.mu.Lock()
	c := r.cacheOf(cluster)
	if c.pin == "" || r.fault == "FETCH-3" {
		c.pin = sealed.GetSender()
	}
	pin := c.pin
	r.mu.Unlock()
	secret := &driverv1.SecretContent{}
	if err := r.key.Open(sealed, pin, secret); err != nil {
		return nil, err
	}
	if !bytes.Equal(secret.GetNonce(), nonce) && r.fault != "FETCH-2" {
		return nil, errors.New("the secret answers another question")
	}

	return secret, nil
}

// fetchBootstrap asks the manager for the values that go into user data.
func (r *replica) fetchBootstrap(o *op, m *driverv1.Machine) error {
	env, err := r.ask(o.cluster, "bootstrap", &driverv1.Envelope{Body: &driverv1.Envelope_FetchBootstrap{
		FetchBootstrap: &driverv1.FetchBootstrapRequest{
			OperationId: o.env.GetOperationId(), Namespace: m.GetNamespace(), Machine: m.GetName(), MachineUid: m.GetUid(),
			Recipient: r.key.Public(), Nonce: []byte(nuid.Next()),
		},
	}})
	if err != nil {
		return err
	}

	return bus.ErrorOf(env.GetFetchedBootstrap().GetStatus())
}

func (r *replica) ask(cluster, what string, env *driverv1.Envelope) (*driverv1.Envelope, error) {
	payload, err := proto.Marshal(env)
	if err != nil {
		return nil, err
	}
	m, err := r.nc.Request("mcm.v1."+cluster+".fetch."+testProvider+"."+what, payload, patience)
	if err != nil {
		return nil, err
	}

	return bus.Decode(m.Data, "")
}
