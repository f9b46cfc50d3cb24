package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// kubeFlags say which cluster to read from and to apply to. Only a command that
// needs a cluster has them.
type kubeFlags struct {
	kubeconfig string
	namespace  string
}

func (k *kubeFlags) addFlags(f *pflag.FlagSet) {
	f.StringVar(&k.kubeconfig, "kubeconfig", "", "kubeconfig `file` of the control cluster; empty means what kubectl would use")
	f.StringVarP(&k.namespace, "namespace", "n", "default", "namespace of the class")
}

func (k *kubeFlags) connect() (client.Client, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = k.kubeconfig
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("kubeconfig: %w", err)
	}
	c, err := client.New(cfg, client.Options{})
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", cfg.Host, err)
	}

	return c, nil
}

// get reads the object that resource/name means, the way kubectl takes it.
func (k *kubeFlags) get(ctx context.Context, arg string) (*unstructured.Unstructured, error) {
	resource, name, ok := strings.Cut(arg, "/")
	if !ok || resource == "" || name == "" {
		return nil, fmt.Errorf("%q: want resource/name, such as awsmachineclass/small", arg)
	}
	c, err := k.connect()
	if err != nil {
		return nil, err
	}
	kind, err := kindOf(c.RESTMapper(), resource)
	if err != nil {
		return nil, err
	}
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(kind)
	if err := c.Get(ctx, client.ObjectKey{Namespace: k.namespace, Name: name}, o); err != nil {
		return nil, fmt.Errorf("read %s %s/%s: %w", kind.Kind, k.namespace, name, err)
	}

	return o, nil
}

func kindOf(mapper meta.RESTMapper, resource string) (schema.GroupVersionKind, error) {
	group := schema.ParseGroupResource(strings.ToLower(resource))
	kind, err := mapper.KindFor(group.WithVersion(""))
	if err != nil {
		return kind, fmt.Errorf("the cluster has no resource %s: %w", resource, err)
	}

	return kind, nil
}

// apply stores an object by server-side apply.
func (k *kubeFlags) apply(ctx context.Context, o *unstructured.Unstructured, force bool) error {
	c, err := k.connect()
	if err != nil {
		return err
	}
	opts := []client.ApplyOption{client.FieldOwner("mcmctl")}
	if force {
		opts = append(opts, client.ForceOwnership)
	}
	if err := c.Apply(ctx, client.ApplyConfigurationFromUnstructured(o), opts...); err != nil {
		return fmt.Errorf("apply MachineClass %s/%s: %w", o.GetNamespace(), o.GetName(), err)
	}

	return nil
}
