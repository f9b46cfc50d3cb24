package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// kubeconfigVariable names an existing cluster. KUBECONFIG is never used: it may be a
// production cluster's.
const kubeconfigVariable = "DEMO_KUBECONFIG"

// foreignNamespace is the demo's namespace in an existing cluster.
const foreignNamespace = "machinebus-demo"

// A cluster holds the demo's objects. up stores it for down.
type cluster struct {
	Kubeconfig string `json:"kubeconfig"`
	Namespace  string `json:"namespace"`
	// Foreign is an existing cluster, in which nothing may be left behind.
	Foreign bool `json:"foreign,omitempty"`
	// CRDs are those that the demo created.
	CRDs []string `json:"crds,omitempty"`
}

func (s *setup) startCluster(ctx context.Context) error {
	if path := os.Getenv(kubeconfigVariable); path != "" {
		s.beginf("using the cluster of %s=%s", kubeconfigVariable, path)
		s.cluster = cluster{Kubeconfig: path, Namespace: foreignNamespace, Foreign: true}
	} else {
		s.beginf("starting a Kubernetes control plane (etcd, API server, controller manager, scheduler)")
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
	s.detailf("ready, with the CRDs of %s: Machine, MachineSet, MachineDeployment, MachineClass", s.paths.short(s.paths.crds()))
	return nil
}

func makeNamespace(ctx context.Context, kube client.Client) error {
	err := kube.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: foreignNamespace}})
	if apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("the cluster already has a namespace %s: end the other demo (make down), "+
			"or if that was killed, run kubectl delete namespace %[1]s", foreignNamespace)
	}
	if err != nil {
		return fmt.Errorf("the cluster of %s cannot be used: %w", kubeconfigVariable, err)
	}
	return nil
}

// clean removes the demo's objects from an existing cluster. The demo's own cluster
// simply ends.
func (c cluster) clean(ctx context.Context, n *narrator, kube client.Client) error {
	if !c.Foreign {
		return nil
	}
	n.detailf("removing the demo's objects from the cluster")
	var machines v1alpha1.MachineList
	err := kube.List(ctx, &machines, client.InNamespace(c.Namespace))
	if meta.IsNoMatchError(err) {
		err = nil // the CRDs were never created
	} else if err == nil {
		err = errors.Join(c.removeMachines(ctx, n, kube), removeNodes(ctx, kube, machines.Items))
	}
	if err != nil {
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

// removeMachines deletes all machines, waits until mcm has released them, and then does
// so with the classes, which it needs for that. If mcm does not release them, because
// it has died, it removes their finalizers: the instances end with the demo's cloud.
func (c cluster) removeMachines(ctx context.Context, n *narrator, kube client.Client) error {
	const patience = 10 * time.Second
	for _, kind := range []struct {
		object client.Object
		list   client.ObjectList
	}{
		{&v1alpha1.Machine{}, &v1alpha1.MachineList{}},
		{&v1alpha1.MachineClass{}, &v1alpha1.MachineClassList{}},
	} {
		if err := kube.DeleteAllOf(ctx, kind.object, client.InNamespace(c.Namespace)); err != nil {
			return err
		}
		waiting, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not within %s", patience))
		err := stack.Poll(waiting, "they are gone", func(ctx context.Context) error {
			err := kube.List(ctx, kind.list, client.InNamespace(c.Namespace))
			if left := meta.LenList(kind.list); err == nil && left > 0 {
				err = fmt.Errorf("%d are left", left)
			}
			return err
		})
		cancel()
		if err == nil {
			continue
		}
		n.detailf("mcm has not released all objects (%v): removing their finalizers", err)
		if err := c.release(ctx, kube, kind.list); err != nil {
			return err
		}
	}
	return nil
}

// release removes the finalizers of all objects of a kind.
func (c cluster) release(ctx context.Context, kube client.Client, list client.ObjectList) error {
	if err := kube.List(ctx, list, client.InNamespace(c.Namespace)); err != nil {
		return err
	}
	return meta.EachListItem(list, func(item runtime.Object) error {
		object, ok := item.(client.Object)
		if !ok {
			return fmt.Errorf("a list of %T", item)
		}
		return client.IgnoreNotFound(removeFinalizers(ctx, kube, object))
	})
}

// removeNodes deletes the machines' remaining Nodes, but none of another machine of the
// same name.
func removeNodes(ctx context.Context, kube client.Client, machines []v1alpha1.Machine) error {
	var errs []error
	for i := range machines {
		node := &corev1.Node{}
		err := kube.Get(ctx, client.ObjectKey{Name: machines[i].Name}, node)
		if err == nil && strings.HasPrefix(node.Spec.ProviderID, "virtual://") {
			err = errors.Join(removeFinalizers(ctx, kube, node), client.IgnoreNotFound(kube.Delete(ctx, node)))
		}
		errs = append(errs, client.IgnoreNotFound(err))
	}
	return errors.Join(errs...)
}

// nodesGone waits until no Node of these machines is left.
func nodesGone(ctx context.Context, kube client.Client, machines []v1alpha1.Machine) error {
	for i := range machines {
		name := machines[i].Name
		err := stack.Poll(ctx, "Node "+name+" is gone", func(ctx context.Context) error {
			return absent(kube.Get(ctx, client.ObjectKey{Name: name}, &corev1.Node{}))
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func removeFinalizers(ctx context.Context, kube client.Client, object client.Object) error {
	return kube.Patch(ctx, object, client.RawPatch(
		"application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`)))
}

// absent returns nil if the error of a get means that there is no such object.
func absent(err error) error {
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return err
	default:
		return errors.New("it still exists")
	}
}
