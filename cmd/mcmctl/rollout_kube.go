package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// kubernetes holds the flags that say which control cluster to talk to.
type kubernetes struct {
	kubeconfig, context, namespace string
}

func (k *kubernetes) addFlags(cmd *cobra.Command) {
	f := cmd.PersistentFlags()
	f.StringVar(&k.kubeconfig, "kubeconfig", "", "kubeconfig `file` of the control cluster (env KUBECONFIG; else ~/.kube/config)")
	f.StringVar(&k.context, "context", "", "context of the kubeconfig; empty for its current one")
	f.StringVarP(&k.namespace, "namespace", "n", "", "namespace; empty for that of the context")
	mustComplete(cmd, "context", cobra.NoFileCompletions)
	mustComplete(cmd, "namespace", cobra.NoFileCompletions)
}

// A deployments is a client for the machine deployments of one namespace.
type deployments struct {
	client.Client

	namespace string
}

func (k *kubernetes) connect() (*deployments, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = k.kubeconfig
	config := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: k.context})
	cfg, err := config.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("find the control cluster: %w (say where it is with --kubeconfig)", err)
	}
	namespace := k.namespace
	if namespace == "" {
		if namespace, _, err = config.Namespace(); err != nil {
			return nil, fmt.Errorf("find the namespace: %w", err)
		}
	}
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("register API types: %w", err)
	}
	ctrllog.SetLogger(logr.Discard()) // it complains when it has none
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("connect to the control cluster at %s: %w", cfg.Host, err)
	}

	return &deployments{Client: c, namespace: namespace}, nil
}

// get returns the deployment that an argument names, as name, mcd/name or the
// like.
func (d *deployments) get(ctx context.Context, argument string) (*v1alpha1.MachineDeployment, error) {
	name := argument
	if kind, rest, ok := strings.Cut(argument, "/"); ok {
		switch strings.ToLower(kind) {
		case "mcd", "machinedeployment", "machinedeployments":
			name = rest
		default:
			return nil, fmt.Errorf("%s is no machine deployment: want NAME or mcd/NAME", argument)
		}
	}
	got := &v1alpha1.MachineDeployment{}
	err := d.Get(ctx, client.ObjectKey{Namespace: d.namespace, Name: name}, got)
	switch {
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("there is no machine deployment %s in namespace %s (another one: --namespace)", name, d.namespace)
	case err != nil:
		return nil, fmt.Errorf("read machine deployment %s/%s: %w", d.namespace, name, err)
	}

	return got, nil
}

// change stores what f does to a deployment, provided that nobody else has
// changed it since it was read.
func (d *deployments) change(ctx context.Context, argument string, f func(*v1alpha1.MachineDeployment) error) error {
	got, err := d.get(ctx, argument)
	if err != nil {
		return err
	}
	before := got.DeepCopy()
	if err := f(got); err != nil {
		return err
	}
	err = d.Patch(ctx, got, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) {
		return errors.Join(fmt.Errorf("machine deployment %s was changed by somebody else just now: try again", got.Name), err)
	}
	if err != nil {
		return fmt.Errorf("change machine deployment %s/%s: %w", d.namespace, got.Name, err)
	}

	return nil
}

// complete offers the names of the deployments, for one argument.
func (k *kubernetes) complete(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	d, err := k.connect()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTimeout)
	defer cancel()
	list := &v1alpha1.MachineDeploymentList{}
	if err := d.List(ctx, list, client.InNamespace(d.namespace)); err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var names []string
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
	}

	return names, cobra.ShellCompDirectiveNoFileComp
}
