package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // --logging-format=json
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/cmd/internal/natsflags"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/bootstrap"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/drain"
	"github.com/machinebus/machinebus/mcm/machine"
	"github.com/machinebus/machinebus/mcm/machinedeployment"
	"github.com/machinebus/machinebus/mcm/orphans"
	"github.com/machinebus/machinebus/mcm/overshoot"
)

// options holds the flags. Flags that the machine controller manager has, too, have
// the same name and meaning.
type options struct {
	controlKubeconfig, targetKubeconfig string
	namespace                           string
	allNamespaces                       bool
	clusterName                         string
	keySecret                           string
	tokens                              bool
	tokenGroups                         string
	controllers                         []string
	unsealed                            []string

	address    string
	port       int
	profiling  bool
	kubeQPS    float32
	kubeBurst  int
	workers    int
	setWorkers int
	settings   machine.Settings
	drain      drain.Settings
	limits     dispatch.Limits
	orphans    orphans.Settings
	overshoot  overshoot.Settings
	outage     machine.OutageSettings

	deployments machinedeployment.Settings
	lease       leaseOptions
	nats        natsOptions
	logging     *logsapi.LoggingConfiguration
	syncPeriod  time.Duration
}

type leaseOptions struct {
	elect                                     bool
	leaseDuration, renewDeadline, retryPeriod time.Duration
}

type natsOptions struct {
	config                       bus.Config // of an external NATS
	listen, storeDir, configFile string
	monitorPort                  int
	streamReplicas               int
	streamStorage                string
}

// Limits of requests to an API server. The client library would take 0 for 5 per second.
const (
	defaultQPS   = 500
	defaultBurst = 1000
)

const (
	defaultDetachTimeout = 2 * time.Minute
	defaultSyncPeriod    = 12 * time.Hour
)

// Values of --nats-stream-storage.
const (
	storageFile   = "file"
	storageMemory = "memory"
)

func newCommand() *cobra.Command { return newCommandOf(&options{}) }

// newCommandOf returns the command whose flags set o.
func newCommandOf(o *options) *cobra.Command {
	o.settings, o.outage, o.limits = machine.DefaultSettings(), machine.DefaultOutageSettings(), dispatch.DefaultLimits()
	o.overshoot, o.orphans, o.logging = overshoot.DefaultSettings(), orphans.DefaultSettings(), logsapi.NewLoggingConfiguration()
	cmd := &cobra.Command{
		Use:   "mcm",
		Short: "Turns Machine objects into instances and nodes through drivers on NATS",
		Long: `mcm is the machine controller manager of machinebus.

It watches Machine objects in a control cluster, asks the drivers on the bus to create
and delete their instances, and follows the nodes that join a target cluster. Without
--nats-url it runs an embedded NATS server, to which drivers connect.`,
		Example: `  # one cluster is control and target cluster, drivers connect to nats://127.0.0.1:4222
  mcm --target-kubeconfig=$HOME/.kube/config

  # two replicas of mcm with an external NATS
  mcm --target-kubeconfig=target.yaml --control-kubeconfig=control.yaml \
      --nats-url=tls://nats.example.org:4222 --nats-creds=mcm.creds --nats-ca=ca.pem`,
		Version:       version(),
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.validate(); err != nil {
				return err
			}
			if err := logsapi.ValidateAndApply(o.logging, nil); err != nil {
				return fmt.Errorf("logging flags: %w", err)
			}
			ctrl.SetLogger(klog.Background())
			warnOfFlagsWithoutEffect(cmd.Flags())

			return run(cmd.Context(), o)
		},
	}
	o.addFlags(cmd.Flags())
	addFlagsWithoutEffect(cmd.Flags())
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		return fmt.Errorf("%w (mcm --help lists the flags)", err)
	})

	return cmd
}

func (o *options) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.controlKubeconfig, "control-kubeconfig", "",
		"kubeconfig of the cluster that holds the Machines; empty means the target cluster, inClusterConfig the cluster mcm runs in")
	fs.StringVar(&o.targetKubeconfig, "target-kubeconfig", "",
		"kubeconfig of the cluster that the nodes join; empty means the cluster mcm runs in, none that there is no target cluster")
	fs.StringVar(&o.namespace, "namespace", "default", "namespace of the Machines, and of the leader election lease")
	fs.BoolVar(&o.allNamespaces, "all-namespaces", false, "serve the Machines of all namespaces; --namespace then holds only the lease")
	fs.StringVar(&o.clusterName, "cluster-name", "default", "name of this control plane on the bus; must be unique on the bus")
	fs.StringVar(&o.keySecret, "key-secret", "machinebus-control-plane-key",
		"Secret in --namespace with the key that encrypts data for drivers; created if missing")
	fs.StringSliceVar(&o.unsealed, "unsealed-providers", nil,
		"providers whose drivers cannot decrypt and get secrets and bootstrap values in plain text; use only if NATS requires TLS")
	fs.BoolVar(&o.tokens, "bootstrap-tokens", true,
		"create bootstrap tokens for user data that contains the placeholder "+bootstrap.Placeholder+
			"; if false, such user data is refused, and mcm needs no access to Secrets in kube-system of the target cluster")
	fs.StringVar(&o.tokenGroups, "bootstrap-token-auth-extra-groups", "",
		"groups of bootstrap tokens besides system:bootstrappers, separated by commas")
	fs.StringVar(&o.settings.DefaultProvider, "default-provider", "", "provider of classes that name none")

	fs.StringVar(&o.address, "address", "0.0.0.0", "address for /metrics, /healthz and /readyz")
	fs.IntVar(&o.port, "port", 10258, "port for /metrics, /healthz and /readyz")
	fs.BoolVar(&o.profiling, "profiling", false, "serve profiles of this program at /debug/pprof/ on --port, without authentication")
	fs.StringSliceVar(&o.controllers, "controllers", []string{"*"},
		"controllers to run: * for all, foo for the one named foo, -foo to exclude it, as in '*,-machine'; names are "+
			strings.Join(controllerNames(), ", "))
	fs.Float32Var(&o.kubeQPS, "kube-api-qps", defaultQPS, "most requests per second to each API server; 0 for the default, negative for no limit")
	fs.IntVar(&o.kubeBurst, "kube-api-burst", defaultBurst, "most requests at once to each API server; 0 for the default")
	fs.IntVar(&o.workers, "concurrent-syncs", 50, "machines reconciled in parallel; none of them waits for a driver")
	fs.IntVar(&o.setWorkers, "concurrent-set-syncs", 10, "machine sets, and machine deployments, reconciled in parallel")
	fs.DurationVar(&o.syncPeriod, "min-resync-period", defaultSyncPeriod, "time after which every machine is reconciled although nothing changed")

	fs.DurationVar(&o.settings.CreationTimeout, "machine-creation-timeout", o.settings.CreationTimeout,
		"time a machine may take to join the cluster before it is Failed, and its set replaces it")
	fs.DurationVar(&o.settings.HealthTimeout, "machine-health-timeout", o.settings.HealthTimeout,
		"time a machine may be unhealthy before it is Failed, and its set replaces it")
	fs.DurationVar(&o.settings.InPlaceUpdateTimeout, "machine-inplace-update-timeout", o.settings.InPlaceUpdateTimeout,
		"time an update in place may take that the machine controller manager has started; mcm starts none")
	fs.IntVar(&o.settings.MaxReplacements, "machine-max-replacements", o.settings.MaxReplacements,
		"most unhealthy machines of one machine deployment that are replaced at a time")
	fs.DurationVar(&o.settings.PreserveTimeout, "machine-preserve-timeout", o.settings.PreserveTimeout,
		"time for which the annotation "+v1alpha1.AnnotationKeyPreserve+" preserves a machine")
	fs.DurationVar(&o.settings.DrainPolicy.Timeout, "machine-drain-timeout", o.settings.DrainPolicy.Timeout,
		"time a drain of a node may take before it is forced")
	fs.IntVar(&o.settings.DrainPolicy.MaxEvictRetries, "machine-max-evict-retries", o.settings.DrainPolicy.MaxEvictRetries,
		"refused evictions of a pod after which mcm deletes it, whatever its disruption budgets say; at most one for each 20s of the drain timeout")
	fs.DurationVar(&o.drain.DetachTimeout, "machine-pv-detach-timeout", defaultDetachTimeout,
		"time after the end of its pod within which a volume must be detached from a drained node, or the drain fails and is tried again")
	fs.DurationVar(&o.drain.ReattachTimeout, "machine-pv-reattach-timeout", 90*time.Second,
		"time that a drain waits for a volume to be attached to another node before it goes on with the next pod; 0 for none")
	fs.DurationVar(&o.settings.OperationTimeout, "machine-operation-timeout", o.settings.OperationTimeout,
		"time one attempt at a create, initialize or delete may take, unless its class has the annotation "+
			v1alpha1.AnnotationKeyOperationTimeout)
	fs.StringSliceVar(&o.settings.NodeConditions, "node-conditions", o.settings.NodeConditions,
		"node conditions that make a machine unhealthy when they are not False")
	fs.DurationVar(&o.settings.Retry.ResourceExhausted, "resource-exhausted-retry", o.settings.Retry.ResourceExhausted,
		"time before a create that found no capacity is retried; 0 for --retry-long")
	fs.DurationVar(&o.settings.Retry.Short, "retry-short", o.settings.Retry.Short,
		"time before an operation is retried after a transient error")
	fs.DurationVar(&o.settings.Retry.Medium, "retry-medium", o.settings.Retry.Medium, "time before a create is retried after any other error")
	fs.DurationVar(&o.settings.Retry.Long, "retry-long", o.settings.Retry.Long,
		"time before a delete is retried after any other error, and before an invalid object is checked again")

	addLimitFlags(fs, &o.limits)
	addOrphanFlags(fs, &o.orphans)
	fs.DurationVar(&o.outage.Timeout, "machine-safety-apiserver-statuscheck-timeout", o.outage.Timeout,
		"time after which mcm leaves machines alone while it cannot read an API server")
	fs.DurationVar(&o.outage.Period, "machine-safety-apiserver-statuscheck-period", o.outage.Period,
		"time between checks whether the API servers can be read; not less than the timeout")
	fs.BoolVar(&o.deployments.AnnotateNodes, "autoscaler-scaledown-annotation-during-rollout", true,
		"keep the cluster-autoscaler from removing nodes of a machine deployment that is being rolled out")
	fs.IntVar(&o.overshoot.Up, "safety-up", o.overshoot.Up,
		"machines beyond replicas and surge (beyond twice its replicas, without a deployment) at which a machine set is frozen: it makes no more")
	fs.IntVar(&o.overshoot.Down, "safety-down", o.overshoot.Down,
		"how many machines below the number that starts a freeze end it")
	fs.BoolVar(&o.overshoot.CountDeleted, "safety-count-deleted", false,
		"count machines in deletion, too, as the machine controller manager does: a set that is scaled in fast is frozen until they are gone")
	fs.DurationVar(&o.overshoot.Period, "machine-safety-overshooting-period", o.overshoot.Period,
		"time after which the machines of each set are counted although nothing changed")

	o.lease.addFlags(fs)
	o.nats.addFlags(fs)
	logsapi.AddFlags(o.logging, fs)
}

func addLimitFlags(fs *pflag.FlagSet, l *dispatch.Limits) {
	fs.IntVar(&l.Provider.InFlight, "provider-max-in-flight", l.Provider.InFlight,
		"most creates that run at one provider, and likewise initializes and deletes; 0 for no limit")
	fs.Float64Var(&l.Provider.PerSecond, "provider-max-per-second", l.Provider.PerSecond,
		"most creates, initializes and deletes together that begin per second at one provider; 0 for no limit")
	fs.IntVar(&l.Secret.InFlight, "secret-max-in-flight", l.Secret.InFlight,
		"as --provider-max-in-flight, for the classes that share credentials")
	fs.Float64Var(&l.Secret.PerSecond, "secret-max-per-second", l.Secret.PerSecond,
		"as --provider-max-per-second, for the classes that share credentials")
}

func addOrphanFlags(fs *pflag.FlagSet, s *orphans.Settings) {
	fs.DurationVar(&s.Period, "machine-safety-orphan-vms-period", s.Period, "time between two looks for instances without a machine")
	fs.DurationVar(&s.Grace, "machine-safety-orphan-vms-grace", s.Grace,
		"how long an instance must have been seen without a machine before it is deleted")
	fs.IntVar(&s.MaxPerPass, "machine-safety-orphan-vms-max-per-pass", s.MaxPerPass,
		"most instances without a machine that one search deletes at each provider")
	fs.StringSliceVar(&s.AdoptOwners, "adopt-owner", nil, "uid of the kube-system namespace of a former control cluster whose instances this "+
		"control plane has taken over: those without a machine are deleted; "+orphans.NoOwner+" means instances without an owner; may be repeated")
	fs.BoolVar(&s.DryRun, "machine-safety-orphan-vms-dry-run", s.DryRun,
		"report instances without a machine by Event and metric, and delete none")
}

func (l *leaseOptions) addFlags(fs *pflag.FlagSet) {
	fs.BoolVar(&l.elect, "leader-elect", true, "let only one replica of mcm work at a time")
	fs.DurationVar(&l.leaseDuration, "leader-elect-lease-duration", 15*time.Second,
		"time after which a leader that does not renew its lease is replaced")
	fs.DurationVar(&l.renewDeadline, "leader-elect-renew-deadline", 10*time.Second,
		"time after which a leader that cannot renew its lease exits")
	fs.DurationVar(&l.retryPeriod, "leader-elect-retry-period", 2*time.Second, "time between attempts to acquire or renew the lease")
}

func (n *natsOptions) addFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&n.config.URLs, "nats-url", nil, "external NATS servers; without, mcm runs an embedded one")
	natsflags.Add(fs, &n.config)
	fs.StringVar(&n.listen, "nats-listen", "127.0.0.1:4222", "address of the embedded NATS for drivers; port 0 picks a free one")
	fs.StringVar(&n.storeDir, "nats-store-dir", "",
		"JetStream directory of the embedded NATS; empty keeps its streams in memory until mcm exits")
	fs.StringVar(&n.configFile, "nats-config", "", "nats-server configuration file that overrides the settings of the embedded NATS")
	fs.IntVar(&n.streamReplicas, "nats-stream-replicas", 1, "NATS servers that store each operations stream: 3 with a cluster of three")
	fs.StringVar(&n.streamStorage, "nats-stream-storage", storageFile,
		"storage of operations streams: file or memory; an embedded NATS without --nats-store-dir uses memory")
	fs.IntVar(&n.monitorPort, "nats-monitor-port", 0, "port on 127.0.0.1 for the embedded NATS's monitoring endpoints; 0 for none")
}

// replaceZeros gives flags of the machine controller manager a value where 0 is theirs, as old
// command lines have it: the default, but for the two for which 0 meant something there.
func (o *options) replaceZeros() {
	settings, outage, orphan, freezes := machine.DefaultSettings(), machine.DefaultOutageSettings(), orphans.DefaultSettings(), overshoot.DefaultSettings()
	if o.settings.Retry.ResourceExhausted == 0 {
		o.settings.Retry.ResourceExhausted = o.settings.Retry.Long
	}
	if o.drain.ReattachTimeout == 0 {
		o.drain.ReattachTimeout = time.Nanosecond // do not wait
	}
	for flag, byDefault := range map[*time.Duration]time.Duration{
		&o.drain.DetachTimeout: defaultDetachTimeout, &o.syncPeriod: defaultSyncPeriod,
		&o.settings.CreationTimeout: settings.CreationTimeout, &o.settings.HealthTimeout: settings.HealthTimeout,
		&o.settings.PreserveTimeout: settings.PreserveTimeout, &o.settings.InPlaceUpdateTimeout: settings.InPlaceUpdateTimeout,
		&o.outage.Timeout: outage.Timeout, &o.outage.Period: outage.Period,
		&o.orphans.Period: orphan.Period, &o.overshoot.Period: freezes.Period,
	} {
		*flag = cmp.Or(*flag, byDefault)
	}
}

// validate returns an error that names all invalid flags.
func (o *options) validate() error {
	o.replaceZeros()
	errs := []error{o.nats.validate()}
	positive := func(name string, d time.Duration) {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("--%s must be positive, not %s", name, d))
		}
	}
	positive("machine-creation-timeout", o.settings.CreationTimeout)
	positive("machine-health-timeout", o.settings.HealthTimeout)
	positive("machine-preserve-timeout", o.settings.PreserveTimeout)
	positive("machine-inplace-update-timeout", o.settings.InPlaceUpdateTimeout)
	positive("machine-pv-detach-timeout", o.drain.DetachTimeout)
	positive("machine-pv-reattach-timeout", o.drain.ReattachTimeout)
	positive("machine-operation-timeout", o.settings.OperationTimeout)
	positive("resource-exhausted-retry", o.settings.Retry.ResourceExhausted)
	positive("retry-short", o.settings.Retry.Short)
	positive("retry-medium", o.settings.Retry.Medium)
	positive("retry-long", o.settings.Retry.Long)
	positive("min-resync-period", o.syncPeriod)
	positive("machine-safety-apiserver-statuscheck-timeout", o.outage.Timeout)
	positive("machine-safety-orphan-vms-period", o.orphans.Period)
	positive("machine-safety-orphan-vms-grace", o.orphans.Grace)
	errs = append(errs, o.validateNumbers()...)
	if net.ParseIP(o.address) == nil {
		errs = append(errs, fmt.Errorf("--address %q is not an IP address", o.address))
	}
	if o.targetKubeconfig == noTarget && o.controlKubeconfig == "" {
		errs = append(errs, errors.New("--target-kubeconfig=none needs a --control-kubeconfig"))
	}
	errs = append(errs, o.overshoot.Validate(), validateControllers(o.controllers))
	if err := bootstrap.ValidateGroups(o.tokenGroups); err != nil {
		errs = append(errs, fmt.Errorf("--bootstrap-token-auth-extra-groups: %w", err))
	}
	if err := bus.ValidToken("--cluster-name", o.clusterName); err != nil {
		errs = append(errs, err)
	}
	if slices.Contains(o.orphans.AdoptOwners, "") {
		errs = append(errs, fmt.Errorf("--adopt-owner must be a uid or the word %s, not empty", orphans.NoOwner))
	}
	for _, provider := range o.unsealed {
		if err := bus.ValidToken("--unsealed-providers", provider); err != nil {
			errs = append(errs, err)
		}
	}

	return errors.Join(errs...)
}

func (n *natsOptions) validate() error {
	var errs []error
	if r := n.streamReplicas; r != 1 && r != 3 && r != 5 {
		errs = append(errs, fmt.Errorf("--nats-stream-replicas must be 1, 3 or 5, not %d", r))
	}
	if s := n.streamStorage; s != storageFile && s != storageMemory {
		errs = append(errs, fmt.Errorf("--nats-stream-storage must be file or memory, not %q", s))
	}

	return errors.Join(errs...)
}

// keyName returns the Secret with the control plane's key.
func (o *options) keyName() client.ObjectKey {
	return client.ObjectKey{Namespace: o.namespace, Name: o.keySecret}
}

// requestLimits returns how many requests mcm may send to an API server per second, and at once.
func (o *options) requestLimits() (qps float32, burst int) {
	return cmp.Or(o.kubeQPS, defaultQPS), cmp.Or(o.kubeBurst, defaultBurst)
}

// scope returns the namespace whose machines are served; empty means all.
func (o *options) scope() string {
	if o.allNamespaces {
		return ""
	}

	return o.namespace
}

func (o *options) listenAddress() string { return net.JoinHostPort(o.address, strconv.Itoa(o.port)) }

// probePort returns an error if --port is in use. The manager listens only later, when
// the bus has started and other replicas have heard of this one.
func (o *options) probePort(ctx context.Context) error {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", o.listenAddress())
	if errors.Is(err, syscall.EADDRINUSE) {
		return portTaken(err)
	}
	if err != nil {
		return fmt.Errorf("--address and --port: %w", err)
	}
	if err := l.Close(); err != nil {
		return fmt.Errorf("--address and --port: %w", err)
	}

	return nil
}

func portTaken(err error) error {
	return fmt.Errorf("%w: is another mcm running? choose another --port", err)
}

func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}

	return "unknown"
}

// identity names this process on the bus for people.
func identity() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown-host"
	}

	return fmt.Sprintf("%s/%d", host, os.Getpid())
}

func (o *options) validateNumbers() []error {
	var errs []error
	if n := o.settings.MaxReplacements; n < 1 {
		errs = append(errs, fmt.Errorf("--machine-max-replacements must be at least 1, not %d "+
			"(disableHealthTimeout of a Machine switches its replacement off)", n))
	}
	if o.outage.Period < o.outage.Timeout {
		errs = append(errs, fmt.Errorf("--machine-safety-apiserver-statuscheck-period must not be less than the timeout: %s and %s",
			o.outage.Period, o.outage.Timeout))
	}
	if o.orphans.MaxPerPass < 1 {
		errs = append(errs, fmt.Errorf("--machine-safety-orphan-vms-max-per-pass must be at least 1, not %d "+
			"(--machine-safety-orphan-vms-dry-run deletes none)", o.orphans.MaxPerPass))
	}
	for name, n := range map[string]float64{
		"provider-max-in-flight": float64(o.limits.Provider.InFlight), "provider-max-per-second": o.limits.Provider.PerSecond,
		"secret-max-in-flight": float64(o.limits.Secret.InFlight), "secret-max-per-second": o.limits.Secret.PerSecond,
	} {
		if n < 0 {
			errs = append(errs, fmt.Errorf("--%s must not be negative: %g (0 for no limit)", name, n))
		}
	}
	if o.workers < 1 {
		errs = append(errs, fmt.Errorf("--concurrent-syncs must be at least 1, not %d", o.workers))
	}
	if o.setWorkers < 1 {
		errs = append(errs, fmt.Errorf("--concurrent-set-syncs must be at least 1, not %d", o.setWorkers))
	}
	if o.port < 1 || o.port > 65535 {
		errs = append(errs, fmt.Errorf("--port must be in 1..65535, not %d", o.port))
	}

	return errs
}
