package orphans

import (
	"context"
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// A listing is the instances that a driver lists for one class.
type listing struct {
	class     dispatch.Class
	provider  string
	instances []dispatch.Listed
	doubtful  bool // too many instances are missing from it
}

// maxLists is how many classes are listed at once.
const maxLists = 8

// list asks the drivers for the instances of all classes. It leaves out a class that cannot
// be listed and adds its provider to p.unlisted: the grace period of its instances starts
// again with the next list.
func (p *pass) list(ctx context.Context) []listing {
	lists := make([]*listing, len(p.classes))
	slots := make(chan struct{}, maxLists)
	var group sync.WaitGroup
	for i := range p.classes {
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			l, err := p.listClass(ctx, &p.classes[i])
			if err != nil {
				p.log.Info("cannot list the instances of the class; none of them is deleted", "class", client.ObjectKeyFromObject(&p.classes[i]),
					"code", dispatch.CodeOf(err).String(), "err", err.Error())

				return
			}
			lists[i] = l
		})
	}
	group.Wait()
	var all []listing
	p.unlisted = slices.DeleteFunc(p.unlisted, func(provider string) bool {
		return p.whole() || slices.Contains(p.providers, provider)
	})
	for i, l := range lists {
		if l != nil {
			all = append(all, *l)

			continue
		}
		// A class without a valid provider is listed once it has one.
		provider, err := dispatch.Provider(&p.classes[i], p.Settings.DefaultProvider)
		if err == nil && !slices.Contains(p.unlisted, provider) {
			p.unlisted = append(p.unlisted, provider)
		}
	}

	return all
}

func (p *pass) listClass(ctx context.Context, object *v1alpha1.MachineClass) (*listing, error) {
	provider, err := dispatch.Provider(object, p.Settings.DefaultProvider)
	if err != nil {
		return nil, err
	}
	class := dispatch.Class{Object: object}
	if class.Secret, err = p.secret(ctx, object, object.SecretRef); err != nil {
		return nil, err
	}
	if class.Credentials, err = p.secret(ctx, object, object.CredentialsSecretRef); err != nil {
		return nil, err
	}
	instances, err := p.Dispatcher.List(ctx, provider, class)

	return &listing{class: class, provider: provider, instances: instances}, err
}

// secret returns a nil interface if the class refers to no secret.
func (p *pass) secret(ctx context.Context, class *v1alpha1.MachineClass, ref *corev1.SecretReference) (metav1.Object, error) {
	if ref == nil {
		return nil, nil
	}
	name, allowed := v1alpha1.SecretKey(class, ref)
	if !allowed {
		return nil, fmt.Errorf("secret %s is not in the namespace of its class: move it there", name)
	}
	secret := &corev1.Secret{}
	if err := p.Cache.Get(ctx, name, secret); err != nil {
		return nil, fmt.Errorf("read secret %s: %w", name, err)
	}

	return secret, nil
}
