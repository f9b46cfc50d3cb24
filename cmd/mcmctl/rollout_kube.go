package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A deployments is a client for the machine deployments of one namespace.
type deployments struct {
	client.Client

	namespace string
}

func (k *kubernetes) deployments() (*deployments, error) {
	c, namespace, err := k.connect()
	if err != nil {
		return nil, err
	}

	return &deployments{Client: c, namespace: namespace}, nil
}

// get returns the deployment that an argument denotes: name, mcd/name or similar.
func (d *deployments) get(ctx context.Context, argument string) (*v1alpha1.MachineDeployment, error) {
	name := argument
	if kind, rest, ok := strings.Cut(argument, "/"); ok {
		switch strings.ToLower(kind) {
		case "mcd", "machinedeployment", "machinedeployments":
			name = rest
		default:
			return nil, fmt.Errorf("%s is not a machine deployment: want NAME or mcd/NAME", argument)
		}
	}
	got := &v1alpha1.MachineDeployment{}
	err := d.Get(ctx, client.ObjectKey{Namespace: d.namespace, Name: name}, got)
	switch {
	case apierrors.IsNotFound(err):
		return nil, &missingError{d.namespace, name, err}
	case err != nil:
		return nil, fmt.Errorf("read machine deployment %s/%s: %w", d.namespace, name, err)
	}

	return got, nil
}

// A missingError means that the deployment does not exist, in fewer words than the
// API server's error.
type missingError struct {
	namespace, name string
	cause           error
}

func (e *missingError) Error() string {
	return fmt.Sprintf("there is no machine deployment %s in namespace %s (choose another namespace with --namespace)", e.name, e.namespace)
}

func (e *missingError) Unwrap() error { return e.cause }

// changeBackoff retries a change for about five seconds. During a rollout mcm writes
// the status many times a second.
var changeBackoff = wait.Backoff{Steps: 10, Duration: 10 * time.Millisecond, Factor: 2, Jitter: 0.5}

// change stores what f does to a deployment. After a conflict it reads the deployment
// and calls f again.
func (d *deployments) change(ctx context.Context, argument string, f func(*v1alpha1.MachineDeployment) error) error {
	err := retry.RetryOnConflict(changeBackoff, func() error {
		got, err := d.get(ctx, argument)
		if err != nil {
			return err
		}
		before := got.DeepCopy()
		if err := f(got); err != nil {
			return err
		}
		if err := d.Patch(ctx, got, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
			return fmt.Errorf("change machine deployment %s/%s: %w", d.namespace, got.Name, err)
		}

		return nil
	})
	if apierrors.IsConflict(err) {
		return fmt.Errorf("change machine deployment %s: others kept changing it for 5s, try again: %w", argument, err)
	}

	return err
}

// complete offers the names of the deployments for the first argument.
func (k *kubernetes) complete(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	d, err := k.deployments()
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
