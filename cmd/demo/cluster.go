package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/internal/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// kubeconfigVariable names an existing cluster. The ambient KUBECONFIG is never
// used: it may be somebody's production.
const kubeconfigVariable = "DEMO_KUBECONFIG"

// foreignNamespace is the demo's in an existing cluster.
const foreignNamespace = "machinebus-demo"

// A cluster is where the objects live. It is written down by up for down.
type cluster struct {
	Kubeconfig string `json:"kubeconfig"`
	Namespace  string `json:"namespace"`
	// Foreign: an existing cluster, in which nothing may be left behind.
	Foreign bool `json:"foreign,omitempty"`
	// CRDs are those that the demo made.
	CRDs []string `json:"crds,omitempty"`
}

func (s *setup) startCluster(ctx context.Context) error {
	if path := os.Getenv(kubeconfigVariable); path != "" {
		s.begin("using the cluster of %s=%s", kubeconfigVariable, path)
		s.cluster = cluster{Kubeconfig: path, Namespace: foreignNamespace, Foreign: true}
	} else {
		s.begin("starting a Kubernetes control plane (etcd, API server, controller manager, scheduler)")
		dev, err := s.site.StartDevCluster(ctx)
		if err != nil {
			return err
		}
		s.cluster = cluster{Kubeconfig: dev.Kubeconfig, Namespace: metav1.NamespaceDefault}
	}
	kube, err := stack.NewClient(s.cluster.Kubeconfig)
	if err != nil {
		return err
	}
	if s.cluster.Foreign {
		if err := makeNamespace(ctx, kube); err != nil {
			return err
		}
	}
	s.kube = kube
	s.cluster.CRDs, err = stack.ApplyCRDs(ctx, kube, s.paths.crds())
	if err != nil {
		return err
	}
	s.tell("ready, with the CRDs of %s: Machine, MachineSet, MachineDeployment, MachineClass", s.paths.short(s.paths.crds()))
	return nil
}

func makeNamespace(ctx context.Context, kube client.Client) error {
	err := kube.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: foreignNamespace}})
	if apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("the cluster has a namespace %s: another demo uses it (make down ends one that was left up), "+
			"or one was killed; then remove it with kubectl delete namespace %[1]s", foreignNamespace)
	}
	if err != nil {
		return fmt.Errorf("the cluster of %s does not do: %w", kubeconfigVariable, err)
	}
	return nil
}

// clean removes from an existing cluster what the demo made there. Our own
// cluster simply ends.
func (c cluster) clean(ctx context.Context, n *narrator, kube client.Client) error {
	if !c.Foreign {
		return nil
	}
	n.tell("removing the demo's objects from the cluster")
	if err := c.removeMachines(ctx, n, kube); err != nil {
		return err
	}
	var errs []error
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace}}
	errs = append(errs, client.IgnoreNotFound(kube.Delete(ctx, namespace)))
	for _, name := range c.CRDs {
		crd := &apiextensionsv1.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Name: name}}
		errs = append(errs, client.IgnoreNotFound(kube.Delete(ctx, crd)))
	}
	errs = append(errs, stack.Poll(ctx, "the namespace "+c.Namespace+" is gone", func(ctx context.Context) error {
		return absent(kube.Get(ctx, client.ObjectKeyFromObject(namespace), namespace))
	}))
	return errors.Join(errs...)
}

// removeMachines deletes all machines and classes, and waits for mcm to let them
// go. What it does not let go, because it has died, is taken from it: the
// instances were ours, and end with their cloud.
func (c cluster) removeMachines(ctx context.Context, n *narrator, kube client.Client) error {
	const patience = 15 * time.Second
	waiting, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not within %s", patience))
	defer cancel()
	kinds := []client.Object{&v1alpha1.Machine{}, &v1alpha1.MachineClass{}}
	for _, kind := range kinds {
		if err := kube.DeleteAllOf(ctx, kind, client.InNamespace(c.Namespace)); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	err := stack.Poll(waiting, "all machines and classes are gone", func(ctx context.Context) error {
		left, err := c.objects(ctx, kube)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("%d are left", len(left))
		}
		return err
	})
	if err == nil {
		return nil
	}
	n.tell("mcm does not let go of everything (%v): removing the finalizers", err)
	left, err := c.objects(ctx, kube)
	for _, object := range left {
		err = errors.Join(err, client.IgnoreNotFound(removeFinalizers(ctx, kube, object)))
	}
	return err
}

func removeFinalizers(ctx context.Context, kube client.Client, object client.Object) error {
	return kube.Patch(ctx, object, client.RawPatch(
		"application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`)))
}

// objects returns the machines and classes there are.
func (c cluster) objects(ctx context.Context, kube client.Client) ([]client.Object, error) {
	var machines v1alpha1.MachineList
	if err := kube.List(ctx, &machines, client.InNamespace(c.Namespace)); err != nil {
		return nil, err
	}
	var classes v1alpha1.MachineClassList
	if err := kube.List(ctx, &classes, client.InNamespace(c.Namespace)); err != nil {
		return nil, err
	}
	var objects []client.Object
	for i := range machines.Items {
		objects = append(objects, &machines.Items[i])
	}
	for i := range classes.Items {
		objects = append(objects, &classes.Items[i])
	}
	return objects, nil
}

// absent turns the answer to a get into nil when there is no such object.
func absent(err error) error {
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return err
	default:
		return errors.New("it is there")
	}
}
