package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	corev1 "k8s.io/api/core/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/cluster"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

const (
	// maxRequest leaves room for nodes with all their annotations.
	maxRequest = 64 << 20
	// window is how many bytes a client may have in flight, per call and in total.
	window = 1 << 20
	// stopTimeout is for calls that run when the program stops.
	stopTimeout = 5 * time.Second
	// endTimeout bounds the wait for everything else. client-go's watches stop only after
	// their backoff, which grows to a minute while the API server is away.
	endTimeout = 10 * time.Second
	// connectionAge is how long a client may stay connected. With a new connection it
	// presents its certificate again, and may get to another replica. connectionGrace is
	// for calls that run at that time.
	connectionAge, connectionGrace = time.Hour, time.Minute
)

// A gateway holds the parts of the program.
type gateway struct {
	options *options
	manager ctrl.Manager
	target  cluster.Cluster
	server  *grpc.Server
	serving atomic.Bool
}

// run serves until ctx ends.
func run(ctx context.Context, o *options) error {
	guard, err := o.tls.credentials()
	if err != nil {
		return err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", o.listen)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	defer listener.Close()
	g := &gateway{options: o}
	if err := g.connect(); err != nil {
		return err
	}
	provided, disconnect, err := o.nats.connect(ctx)
	if err != nil {
		return err
	}
	defer disconnect()
	observer := autoscaler.NewObserver()
	collectors := observer.Collectors()
	if provided != nil {
		collectors = append(collectors, provided)
		if err := g.manager.Add(provided); err != nil {
			return fmt.Errorf("add the node groups of drivers: %w", err)
		}
	}
	for _, c := range collectors {
		if err := ctrlmetrics.Registry.Register(c); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	// The cluster-autoscaler makes thousands of calls one after the other: reuse goroutines.
	workers := grpc.NumStreamWorkers(uint32(2 * runtime.GOMAXPROCS(0)))
	age := grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: connectionAge, MaxConnectionAgeGrace: connectionGrace})
	// Windows of a fixed size avoid a ping for each call to measure the bandwidth.
	windows := []grpc.ServerOption{grpc.InitialWindowSize(window), grpc.InitialConnWindowSize(window)}
	g.server = grpc.NewServer(append(windows, grpc.Creds(guard), grpc.MaxRecvMsgSize(maxRequest),
		grpc.UnaryInterceptor(observer.Intercept), workers, age)...)
	externalgrpc.RegisterCloudProviderServer(g.server, autoscaler.New(autoscaler.Config{
		Control: g.manager.GetClient(), Live: g.manager.GetAPIReader(), Nodes: g.target.GetCache(),
		// The newer events API keeps only the first text of a reason for minutes.
		Events: g.manager.GetEventRecorderFor("mcm-autoscaler"), //nolint:staticcheck // see above
		Groups: o.groups, Provided: provided, Marks: o.marks, GPULabel: o.gpuLabel,
	}))
	err = errors.Join(
		g.manager.Add(everywhere(func(ctx context.Context) error { return g.serve(ctx, listener) })),
		g.addChecks(),
	)
	if err != nil {
		return err
	}
	klog.Background().Info("starting", "version", version(), "listen", listener.Addr().String(), "plaintext", o.tls.plaintext)
	err = g.manager.Start(ctx)
	if ctx.Err() != nil && errors.Is(err, context.DeadlineExceeded) {
		klog.Background().Info("exiting although some goroutines did not stop in time", "reason", err.Error())

		return nil
	}
	if err != nil {
		return fmt.Errorf("run: %w", err)
	}

	return nil
}

// connect sets up for both clusters.
func (g *gateway) connect() error {
	o := g.options
	scheme := k8sruntime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return fmt.Errorf("register API types: %w", err)
	}
	control, err := o.restConfig("--kubeconfig", o.kubeconfig)
	if err != nil {
		return err
	}
	target := control
	if o.targetKubeconfig != "" {
		if target, err = o.restConfig("--target-kubeconfig", o.targetKubeconfig); err != nil {
			return err
		}
	}
	caches := cache.Options{DefaultTransform: cache.TransformStripManagedFields()}
	if !o.allNamespaces {
		caches.DefaultNamespaces = map[string]cache.Config{o.namespace: {}}
	}
	g.manager, err = ctrl.NewManager(control, ctrl.Options{
		Scheme: scheme, Cache: caches, Metrics: metricsserver.Options{BindAddress: o.healthAddress()}, GracefulShutdownTimeout: new(endTimeout),
	})
	if err != nil {
		return fmt.Errorf("set up for the cluster at %s: %w", control.Host, err)
	}
	g.target, err = cluster.New(target, func(co *cluster.Options) {
		co.Scheme = scheme
		co.Cache = cache.Options{ByObject: map[client.Object]cache.ByObject{&corev1.Node{}: {Transform: slimNode}}}
	})
	if err != nil {
		return fmt.Errorf("set up for the target cluster at %s: %w", target.Host, err)
	}

	return g.manager.Add(g.target)
}

func (o *options) restConfig(flag, path string) (*rest.Config, error) {
	var cfg *rest.Config
	var err error
	if path == "" {
		if cfg, err = rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("mcm-autoscaler does not run in a cluster (%w): set %s=<path of a kubeconfig>", err, flag)
		}
	} else if cfg, err = clientcmd.BuildConfigFromFlags("", path); err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	cfg.QPS, cfg.Burst = o.kubeQPS, o.kubeBurst
	cfg.UserAgent = "machinebus-mcm-autoscaler/" + version()

	return cfg, nil
}

// slimNode drops large unused fields.
func slimNode(o any) (any, error) {
	if node, ok := o.(*corev1.Node); ok {
		node.ManagedFields = nil
		node.Status = corev1.NodeStatus{}
	}

	return o, nil
}

// serve accepts calls once all objects have been read: an answer from some of them
// would be wrong.
func (g *gateway) serve(ctx context.Context, listener net.Listener) error {
	for _, o := range []client.Object{
		&v1alpha1.MachineDeployment{}, &v1alpha1.MachineSet{}, &v1alpha1.Machine{}, &v1alpha1.MachineClass{},
	} {
		if _, err := g.manager.GetCache().GetInformer(ctx, o); err != nil {
			return fmt.Errorf("read %T from the cluster: %w", o, err)
		}
	}
	if _, err := g.target.GetCache().GetInformer(ctx, &corev1.Node{}); err != nil {
		return fmt.Errorf("read nodes from the target cluster: %w", err)
	}
	done := make(chan error, 1)
	go func() { done <- g.server.Serve(listener) }()
	g.serving.Store(true)
	klog.FromContext(ctx).Info("serving the cluster-autoscaler", "address", listener.Addr().String())
	select {
	case err := <-done:
		return fmt.Errorf("serve %s: %w", listener.Addr(), err)
	case <-ctx.Done():
	}
	g.serving.Store(false)
	hard := time.AfterFunc(stopTimeout, g.server.Stop)
	defer hard.Stop()
	g.server.GracefulStop()

	return <-done
}

// addChecks serves /healthz and /readyz beside /metrics.
func (g *gateway) addChecks() error {
	ready := &healthz.Handler{Checks: map[string]healthz.Checker{"serving": func(*http.Request) error {
		if !g.serving.Load() {
			return errors.New("the objects of the clusters have not been read yet")
		}

		return nil
	}}}
	live := &healthz.Handler{Checks: map[string]healthz.Checker{"ping": healthz.Ping}}

	return errors.Join(
		g.manager.AddMetricsServerExtraHandler("/healthz", http.StripPrefix("/healthz", live)),
		g.manager.AddMetricsServerExtraHandler("/readyz", http.StripPrefix("/readyz", ready)),
	)
}

// everywhere is a runnable without leader election: all replicas give the same answers,
// and the API server orders the writes.
type everywhere func(context.Context) error

func (f everywhere) Start(ctx context.Context) error { return f(ctx) }

func (everywhere) NeedLeaderElection() bool { return false }
