package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// kubernetes holds the flags for the control cluster. Only commands that need one
// have them.
type kubernetes struct {
	kubeconfig, context, namespace string
}

func (k *kubernetes) addFlags(cmd *cobra.Command, f *pflag.FlagSet) {
	f.StringVar(&k.kubeconfig, "kubeconfig", "", "kubeconfig `file` of the control cluster (env KUBECONFIG; else ~/.kube/config)")
	f.StringVar(&k.context, "context", "", "context of the kubeconfig; empty for the current one")
	f.StringVarP(&k.namespace, "namespace", "n", "", "namespace; empty for the namespace of the context")
	mustComplete(cmd, "context", cobra.NoFileCompletions)
	mustComplete(cmd, "namespace", cobra.NoFileCompletions)
}

func (k *kubernetes) config() clientcmd.ClientConfig {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = k.kubeconfig

	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: k.context})
}

// inNamespace returns the namespace to work in. It needs no cluster.
func (k *kubernetes) inNamespace() (string, error) {
	if k.namespace != "" {
		return k.namespace, nil
	}
	namespace, _, err := k.config().Namespace()
	if err != nil {
		return "", fmt.Errorf("find the namespace: %w (set it with --namespace)", err)
	}

	return namespace, nil
}

// connect returns a client, and the namespace to work in.
func (k *kubernetes) connect() (c client.Client, namespace string, err error) {
	cfg, err := k.config().ClientConfig()
	if err != nil {
		return nil, "", fmt.Errorf("find the control cluster: %w (set its kubeconfig with --kubeconfig)", err)
	}
	cfg.QPS = -1 // the API server has limits of its own
	if namespace, err = k.inNamespace(); err != nil {
		return nil, "", err
	}
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, "", fmt.Errorf("register API types: %w", err)
	}
	ctrllog.SetLogger(logr.Discard()) // controller-runtime warns if it has none
	if c, err = client.New(cfg, client.Options{Scheme: scheme}); err != nil {
		return nil, "", fmt.Errorf("connect to the control cluster at %s: %w", cfg.Host, err)
	}

	return c, namespace, nil
}

// get reads the object that an argument resource/name denotes, as in kubectl.
func (k *kubernetes) get(ctx context.Context, arg string) (*unstructured.Unstructured, error) {
	resource, name, ok := strings.Cut(arg, "/")
	if !ok || resource == "" || name == "" {
		return nil, fmt.Errorf("%q: want resource/name, such as awsmachineclass/small", arg)
	}
	c, namespace, err := k.connect()
	if err != nil {
		return nil, err
	}
	kind, err := kindOf(c.RESTMapper(), resource)
	if err != nil {
		return nil, err
	}
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(kind)
	if err := c.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, o); err != nil {
		return nil, fmt.Errorf("read %s %s/%s: %w", kind.Kind, namespace, name, err)
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
func (k *kubernetes) apply(ctx context.Context, o *unstructured.Unstructured, force bool) error {
	c, _, err := k.connect()
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
