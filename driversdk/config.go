package driversdk

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/replica"
)

// A Config says what a driver is and where its replica runs. What the author
// knows (the first group) is set in code, the rest by flags and environment,
// see [Config.RegisterFlags]. Only Provider is needed.
type Config struct { //nolint:recvcheck // flags write into it, everything else reads
	// Provider is what MachineClass.provider says, in lower case.
	Provider string
	// Version is the driver's own, SemVer; empty means 0.0.0.
	Version string
	// CreateIdentity says what keeps Create from making a second instance; none
	// given means [IdentityNone].
	CreateIdentity CreateIdentity
	// SettleTime is how long the provider's list may lag behind its effects; 0
	// means not at all.
	SettleTime time.Duration
	// Kind and APIVersions are those that a providerSpec must have; empty takes
	// any, also none.
	Kind        string
	APIVersions []string

	// NATS says where the bus is.
	NATS NATSConfig
	// Clusters are the control planes to serve, each once; none means "default".
	Clusters []string
	// Slots is how many creates and initializes run at once. Deletes have as many of
	// their own, and so have reads. 0 means 512, or fewer where the memory limit is below
	// 128 MiB.
	Slots int
	// DrainTimeout is how long running operations may take to finish when the
	// program gets a stop signal, before they are cancelled; 0 means 10 minutes.
	DrainTimeout time.Duration
	// ControlPlaneKeys are the public curve keys that secrets are sealed with,
	// by cluster, of those in Clusters. A cluster without one is trusted at its first
	// answer and held to that key from then on.
	ControlPlaneKeys map[string]string
	// Listen is the address of /healthz, /readyz and /metrics, such as ":8081";
	// empty means none, so that replicas on one host do not clash.
	Listen string

	// Logger receives what the replica does; nil means one that writes to
	// standard error as LogFormat and LogLevel say.
	Logger *slog.Logger
	// LogFormat is text or json; empty means text.
	LogFormat string
	// LogLevel is the least level that is logged; the zero value is info.
	LogLevel slog.Level
	// Metrics is where the replica's figures are registered, beside a driver's
	// own; nil means a new registry with those of the process. Each Serve needs
	// one of its own.
	Metrics *prometheus.Registry
	// Traces makes the spans of operations that a manager traces; nil means
	// OpenTelemetry's global one, which makes none unless the program sets it.
	Traces trace.TracerProvider

	flags    *flag.FlagSet
	flagErrs []error       // of environment variables
	hardStop time.Duration // before operations are left behind, for tests; 0 means some seconds
	// stuckAfter is how long after its deadline a call is given up, for tests; 0 means
	// some seconds.
	stuckAfter time.Duration
}

// A NATSConfig says how to reach the bus.
type NATSConfig struct {
	// URLs are the servers; none means nats://127.0.0.1:4222.
	URLs []string
	// Creds is the path of a credentials file (user JWT and nkey seed).
	Creds string
	// CA, Cert and Key are PEM files for TLS and mutual TLS; they are read again
	// at each reconnect.
	CA, Cert, Key string
	// AllowInsecure permits a connection beyond loopback without TLS or without
	// credentials.
	AllowInsecure bool
}

// Complete fills in defaults, the Logger among them, and checks. [Serve] does so by itself: it
// is for a program that serves several replicas. The error lists everything that is
// wrong.
func (c Config) Complete() (Config, error) {
	errs := c.flagErrs
	if c.flags != nil && c.flags.NArg() > 0 {
		errs = append(errs, fmt.Errorf("unexpected argument %q: flags look like --slots=8", c.flags.Arg(0)))
	}
	if c.Provider == "" {
		errs = append(errs, errors.New("no provider: set Config.Provider to the provider of the MachineClasses"))
	}
	if c.Provider != strings.ToLower(c.Provider) {
		errs = append(errs, fmt.Errorf("provider %q: use lower case", c.Provider))
	}
	if c.Slots < 0 {
		errs = append(errs, fmt.Errorf("slots: %d is negative", c.Slots))
	}
	if c.DrainTimeout < 0 {
		errs = append(errs, fmt.Errorf("drain timeout: %s is negative", c.DrainTimeout))
	}
	if c.SettleTime < 0 {
		errs = append(errs, fmt.Errorf("settle time: %s is negative", c.SettleTime))
	}
	c.Version = cmp.Or(c.Version, "0.0.0")
	c.CreateIdentity = cmp.Or(c.CreateIdentity, IdentityNone)
	if len(c.NATS.URLs) == 0 {
		c.NATS.URLs = []string{"nats://127.0.0.1:4222"}
	}
	if len(c.Clusters) == 0 {
		c.Clusters = []string{"default"}
	}
	errs = append(errs, c.checkClusters()...)
	c.Slots = cmp.Or(c.Slots, replica.DefaultSlots())
	c.DrainTimeout = cmp.Or(c.DrainTimeout, 10*time.Minute)
	if c.Logger == nil {
		logger, err := newLogger(os.Stderr, c.LogFormat, c.LogLevel)
		errs = append(errs, err)
		c.Logger = logger
	}

	return c, errors.Join(errs...)
}

// checkClusters wants each cluster once, and of none but those a key that can be one.
func (c Config) checkClusters() []error {
	var errs []error
	served := map[string]int{}
	for _, cluster := range c.Clusters {
		served[cluster]++
		if served[cluster] == 2 { // each of its sessions would be sent twice
			errs = append(errs, fmt.Errorf("cluster %q is listed twice: name it once in --clusters (Config.Clusters)", cluster))
		}
	}
	for _, cluster := range slices.Sorted(maps.Keys(c.ControlPlaneKeys)) {
		const where = "--control-plane-key (Config.ControlPlaneKeys)"
		if served[cluster] == 0 {
			errs = append(errs, fmt.Errorf("%s: the key is for cluster %q, which this driver does not serve: "+
				"correct the name, or add it to --clusters (Config.Clusters)", where, cluster))
		}
		if err := bus.ValidPublicKey(c.ControlPlaneKeys[cluster]); err != nil {
			errs = append(errs, fmt.Errorf("%s: the key for cluster %q: %w", where, cluster, err))
		}
	}

	return errs
}

func newLogger(w io.Writer, format string, level slog.Level) (*slog.Logger, error) {
	opts := &slog.HandlerOptions{Level: level}
	switch format {
	case "", "text":
		return slog.New(slog.NewTextHandler(w, opts)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	default:
		return nil, fmt.Errorf("log format %q: want text or json", format)
	}
}
