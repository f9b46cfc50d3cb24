package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/cluster"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/cmd/internal/tracing"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/bootstrap"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/drain"
	"github.com/machinebus/machinebus/mcm/fetch"
	"github.com/machinebus/machinebus/mcm/machine"
	"github.com/machinebus/machinebus/mcm/machineclass"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// run wires everything together. It returns when ctx ends and everything has stopped.
func run(ctx context.Context, o *options) error {
	if err := o.probePort(ctx); err != nil {
		return err
	}
	stopTraces, err := tracing.Start(ctx, "mcm", version(), func(err error) {
		klog.Background().WithName("traces").Error(err, "spans not sent")
	})
	if err != nil {
		return err
	}
	defer stopTraces()
	control, target, err := o.restConfigs()
	if err != nil {
		return err
	}
	scheme, err := newScheme()
	if err != nil {
		return err
	}
	if err := awaitServed(ctx, control, servedPatience); err != nil {
		return err
	}
	lock, err := newLeaderLock(ctx, control, o)
	if err != nil {
		return err
	}
	mgr, err := o.newManager(control, scheme, lock)
	if err != nil {
		return err
	}
	events, stopEvents, err := newEvents(mgr)
	if err != nil {
		return err
	}
	defer stopEvents()
	lock.lease.LockConfig.EventRecorder = events
	conn, streams, closeBus, err := o.nats.connect(ctx)
	if err != nil {
		return err
	}
	defer closeBus()
	running, cancelParts := context.WithCancel(ctx) // not ctx, which shows whether mcm was asked to stop
	defer cancelParts()

	m := &mcm{
		options: o, manager: mgr, lock: lock, conn: conn, streams: streams, events: events,
		log: slog.New(logr.ToSlogHandler(klog.Background().WithName("bus"))),
	}
	if err := m.addTarget(running, target); err != nil {
		return err
	}
	if err := m.setUp(running, client.Options{Scheme: scheme}); err != nil {
		return err
	}
	defer m.caller.Close()
	if err := m.addControllers(running); err != nil {
		return err
	}
	klog.Background().Info("starting", "version", version(), "cluster", o.clusterName, "bus", conn.URL())

	return m.runManager(ctx, cancelParts)
}

// exitError returns mcm's error for the manager's; ctx has ended if mcm was asked to stop.
func exitError(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil && errors.Is(err, context.DeadlineExceeded):
		klog.Background().Info("exiting although some goroutines did not stop in time", "reason", err.Error())

		return nil
	case errors.Is(err, syscall.EADDRINUSE):
		return portTaken(err) // another process took it after probePort
	default:
		return fmt.Errorf("run: %w", err)
	}
}

// mcm holds the parts of the program.
type mcm struct {
	options    *options
	manager    ctrl.Manager
	lock       *leaderLock
	conn       *bus.Conn
	streams    *caller.StreamConfig
	events     record.EventRecorder
	log        *slog.Logger
	caller     *caller.Caller
	announcer  *bus.Announcer
	dispatcher *dispatch.Dispatcher
	reconciler *machine.Reconciler
	removed    *machineclass.Removed
	owner      string // uid of the control cluster
	namesake   *dispatch.Namesake
	epochs     *dispatch.Epochs
	validator  *machineclass.Validator // nil if it is switched off
	target     cluster.Cluster         // nil if there is none
	tokens     *bootstrap.Tokens       // nil if there is none
	drainer    *drain.Drainer          // nil if there is none
}

// runManager runs until ctx or the manager ends, then cancels the parts and waits for them.
func (m *mcm) runManager(ctx context.Context, cancelParts context.CancelFunc) error {
	err := m.manager.Start(ctx)
	cancelParts() // after losing the lead, mcm must not go on for as long as an operation takes
	m.wait()

	return exitError(ctx, err)
}

// wait returns when everything that the parts have started has ended.
func (m *mcm) wait() {
	m.dispatcher.Wait()
	if m.validator != nil {
		m.validator.Wait()
	}
	if m.drainer != nil {
		m.drainer.Wait()
	}
}

// setUp creates the parts between the bus and the control cluster.
func (m *mcm) setUp(ctx context.Context, opts client.Options) error {
	direct, err := client.New(m.manager.GetConfig(), opts)
	if err != nil {
		return fmt.Errorf("connect to the control cluster: %w", err)
	}
	key, err := fetch.ControlPlaneKey(ctx, direct, m.options.keyName())
	if err != nil {
		return err
	}
	uid, err := clusterUID(ctx, direct, m.manager.GetConfig().Host, m.options.keyName())
	if err != nil {
		return err
	}
	m.owner = string(uid)
	if m.announcer, err = bus.NewAnnouncer(m.conn, m.options.clusterName); err != nil {
		return err
	}
	m.caller, err = caller.New(m.conn, caller.Config{
		Cluster: m.options.clusterName, Owner: m.owner, Epoch: m.lock.Epoch, Operations: m.streams, Key: key, Logger: m.log,
	})
	if err != nil {
		return err
	}
	m.dispatcher = dispatch.New(logr.NewContext(ctx, klog.Background().WithName("dispatch")), m.caller, m.announcer)
	m.dispatcher.Limit(m.options.limits)
	if err := register(append(m.dispatcher.Collectors(),
		dispatch.StreamCollector(m.caller.Streams), dispatch.RefusedCollector(m.caller.Replicas),
		dropped("mcm_dispatch_replies_dropped_total",
			"Reply frames of no operation in flight.", m.caller.Dropped))); err != nil {
		return err
	}
	m.removed = machineclass.NewRemoved(m.manager.GetClient())
	m.reconciler = &machine.Reconciler{
		Control: m.manager.GetClient(), Dispatcher: m.dispatcher, Settings: m.options.settings, Removed: m.removed,
		Events: m.events,
	}
	if _, err := bus.ServeOutcomes(m.conn, m.options.clusterName, m.dispatcher.Newest, m.dispatcher.Waiting); err != nil {
		return err
	}
	m.namesake = dispatch.NewNamesake(m.owner, m.options.scope(), klog.Background().WithName("namesake"))
	m.dispatcher.Bar(m.namesake.Heard)
	if _, err := bus.WatchHello(m.conn, m.options.clusterName, m.namesake.OnHello); err != nil {
		return err
	}

	m.epochs = dispatch.NewEpochs(m.lock, identity(), m.caller.Replicas, m.caller.Ahead(), klog.Background().WithName("epoch"))
	if _, err := bus.WatchHello(m.conn, m.options.clusterName, m.epochs.OnHello); err != nil {
		return err
	}
	if err := register(m.epochs.Collectors()); err != nil {
		return err
	}

	return errors.Join(
		m.manager.Add(m.epochs),
		m.manager.Add(&dispatch.Hello{Greeter: m.announcer, Epoch: m.lock.Epoch, Behind: m.caller.Behind(), Message: &driverv1.Hello{
			ClusterUid: m.owner, Key: key.Public(), Mcm: identity(), Version: version(), Scope: m.options.scope(),
		}}),
		m.manager.Add(m.fetches(key)),
		m.addChecks(),
	)
}

// addTarget adds the cluster that nodes join unless target is nil.
func (m *mcm) addTarget(ctx context.Context, target *rest.Config) error {
	if target == nil {
		return nil
	}
	var err error
	if m.target, err = newTarget(m.manager, target, m.manager.GetScheme()); err != nil {
		return err
	}
	if m.options.tokens {
		// Not the cached client, which would hold every Secret of the cluster.
		direct, err := client.New(target, client.Options{Scheme: m.manager.GetScheme()})
		if err != nil {
			return fmt.Errorf("connect to the target cluster at %s: %w", target.Host, err)
		}
		m.tokens = &bootstrap.Tokens{Target: direct, ExtraGroups: m.options.tokenGroups}
	}
	clientset, err := kubernetes.NewForConfigAndClient(m.target.GetConfig(), m.target.GetHTTPClient())
	if err != nil {
		return fmt.Errorf("connect to the target cluster at %s: %w", target.Host, err)
	}
	m.drainer = drain.New(logr.NewContext(ctx, klog.Background().WithName("drain")), clientset, m.options.drain)

	return register(m.drainer.Collectors())
}

func register(collectors []prometheus.Collector) error {
	for _, c := range collectors {
		if err := ctrlmetrics.Registry.Register(c); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}

	return nil
}

// dropped returns a counter that the bus maintains.
func dropped(name, help string, count func() uint64) prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 { return float64(count()) })
}

// fetches serves drivers on every replica of mcm, not only on the leader.
func (m *mcm) fetches(key *bus.SealKey) manager.Runnable {
	standard := m.options.settings.CreationTimeout
	handler := &fetch.Handler{
		Reader: m.manager.GetClient(), Live: m.manager.GetAPIReader(), Operations: m.dispatcher, Removed: m.removed,
		Reserved: m.options.keyName(), DefaultProvider: m.options.settings.DefaultProvider, UnderWay: machine.UnderWay,
		CreationTimeout: func(m *v1alpha1.Machine) time.Duration { return machine.CreationTimeout(m, standard) },
	}
	if m.tokens != nil {
		handler.Tokens = m.tokens
	}

	if len(m.options.unsealed) > 0 {
		klog.Background().Info("drivers of these providers may get secrets unsealed: "+
			"NATS users who can read their inboxes can read the secrets (--unsealed-providers)",
			"providers", m.options.unsealed)
	}

	return everywhere(func(ctx context.Context) error {
		if err := m.removed.Watch(ctx, m.manager.GetCache()); err != nil {
			return err
		}
		if err := handler.AnnounceChanges(ctx, m.manager.GetCache(), m.announcer); err != nil {
			return err
		}
		server, err := bus.ServeFetches(m.conn, m.options.clusterName, key, handler, m.log, m.options.unsealed...)
		if err != nil {
			return err
		}
		if err := register([]prometheus.Collector{
			dropped("mcm_fetch_dropped_total",
				"Fetches not answered: unreadable, with a reply subject of another provider, or beyond the limit of waiting ones.", server.Dropped),
		}); err != nil {
			return err
		}
		<-ctx.Done()
		server.Stop()

		return nil
	})
}

// everywhere is a runnable for leading and standby replicas.
type everywhere func(context.Context) error

func (f everywhere) Start(ctx context.Context) error { return f(ctx) }

func (everywhere) NeedLeaderElection() bool { return false }
