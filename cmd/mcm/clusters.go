package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/cluster"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/machineclass"
)

// Special values of the kubeconfig flags.
const (
	noTarget  = "none"
	inCluster = "inClusterConfig"
)

// stopTimeout bounds the wait for goroutines when mcm stops, well below a Pod's 30 s.
// client-go's watches stop only after their backoff, which grows to a minute while the
// API server is away.
const stopTimeout = 10 * time.Second

func newScheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return nil, fmt.Errorf("register API types: %w", err)
	}

	return scheme, nil
}

// restConfigs returns the configurations of the control and the target cluster; target
// is nil if there is none.
func (o *options) restConfigs() (control, target *rest.Config, err error) {
	if o.targetKubeconfig != noTarget {
		if target, err = o.restConfig("--target-kubeconfig", o.targetKubeconfig); err != nil {
			return nil, nil, err
		}
	}
	if o.controlKubeconfig == "" {
		return target, target, nil
	}
	control, err = o.restConfig("--control-kubeconfig", o.controlKubeconfig)

	return control, target, err
}

func (o *options) restConfig(flag, path string) (*rest.Config, error) {
	var cfg *rest.Config
	var err error
	if path == "" || path == inCluster {
		cfg, err = rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("mcm does not run in a cluster (%w): set %s=<path of a kubeconfig>", err, flag)
		}
	} else {
		cfg, err = clientcmd.BuildConfigFromFlags("", path)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", flag, err)
		}
	}
	cfg.QPS, cfg.Burst = o.requestLimits()
	cfg.UserAgent = "machinebus-mcm/" + version()

	return cfg, nil
}

// newManager makes the manager of the control cluster.
func (o *options) newManager(cfg *rest.Config, scheme *runtime.Scheme, lock *leaderLock) (ctrl.Manager, error) {
	caches := cache.Options{
		SyncPeriod:       &o.syncPeriod,
		DefaultTransform: cache.TransformStripManagedFields(),
		ByObject:         map[client.Object]cache.ByObject{&corev1.Secret{}: machineclass.SecretCache()},
	}
	if !o.allNamespaces {
		caches.DefaultNamespaces = map[string]cache.Config{o.namespace: {}}
	}
	metrics := metricsserver.Options{BindAddress: o.listenAddress()}
	if o.profiling {
		metrics.ExtraHandlers = profiles()
	}
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme:                        scheme,
		Cache:                         caches,
		Metrics:                       metrics,
		LeaderElection:                o.lease.elect,
		LeaderElectionID:              leaseName,
		LeaderElectionNamespace:       o.namespace,
		LeaderElectionReleaseOnCancel: true,
		GracefulShutdownTimeout:       new(stopTimeout),
		LeaseDuration:                 &o.lease.leaseDuration,
		RenewDeadline:                 &o.lease.renewDeadline,
		RetryPeriod:                   &o.lease.retryPeriod,

		LeaderElectionResourceLockInterface: lock,
	})
	if err != nil {
		return nil, fmt.Errorf("set up for the control cluster at %s: %w", cfg.Host, err)
	}

	return mgr, nil
}

// newTarget adds the target cluster and caches only its Nodes.
func newTarget(mgr ctrl.Manager, cfg *rest.Config, scheme *runtime.Scheme) (cluster.Cluster, error) {
	target, err := cluster.New(cfg, func(co *cluster.Options) {
		co.Scheme = scheme
		co.Cache = cache.Options{ByObject: map[client.Object]cache.ByObject{&corev1.Node{}: {Transform: slimNode}}}
	})
	if err != nil {
		return nil, fmt.Errorf("set up for the target cluster at %s: %w", cfg.Host, err)
	}
	if err := mgr.Add(target); err != nil {
		return nil, fmt.Errorf("add the target cluster: %w", err)
	}

	return target, nil
}

// slimNode drops large unused fields: image lists make most of a Node.
func slimNode(o any) (any, error) {
	if node, ok := o.(*corev1.Node); ok {
		node.Status.Images = nil
		node.ManagedFields = nil
	}

	return o, nil
}

// clusterUID returns the uid of the kube-system namespace, which identifies the control
// cluster. Where the roles of the machine controller manager do not let that be read, the uid
// of the Secret with the control plane's key takes its place: no other cluster has it either.
func clusterUID(ctx context.Context, reader client.Reader, host string, key client.ObjectKey) (types.UID, error) {
	namespace := &corev1.Namespace{}
	err := reader.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, namespace)
	if !apierrors.IsForbidden(err) {
		if err != nil {
			return "", fmt.Errorf("read namespace %s of the control cluster at %s: %w", metav1.NamespaceSystem, host, err)
		}

		return namespace.UID, nil
	}
	secret := &corev1.Secret{}
	if err := reader.Get(ctx, key, secret); err != nil {
		return "", fmt.Errorf("read Secret %s: %w", key, err)
	}
	klog.Background().Info("mcm may not read the namespace "+metav1.NamespaceSystem+" of the control cluster, so the uid of a Secret "+
		"identifies the cluster; if the Secret is made again, instances without a machine belong to an owner of the past (--adopt-owner)",
		"secret", key, "uid", secret.UID)

	return secret.UID, nil
}
