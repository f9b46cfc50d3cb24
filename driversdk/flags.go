package driversdk

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// RegisterFlags adds the flags that every driver has. What c holds becomes their
// default, an environment variable replaces that, and the command line wins; an
// empty variable counts as none. A variable that does not parse is an error of
// [Serve].
func (c *Config) RegisterFlags(fs *flag.FlagSet) {
	c.flags = fs
	fs.Var(&listFlag{&c.NATS.URLs}, "nats-url",
		"`URLs` of the NATS servers, with commas; empty means nats://127.0.0.1:4222 [NATS_URL]")
	fs.StringVar(&c.NATS.Creds, "nats-creds", c.NATS.Creds,
		"credentials `file` for NATS (user JWT and nkey seed) [NATS_CREDS]")
	fs.StringVar(&c.NATS.CA, "nats-ca", c.NATS.CA,
		"PEM `file` of the authority that signed the server's certificate; empty means the system's [NATS_CA]")
	fs.StringVar(&c.NATS.Cert, "nats-cert", c.NATS.Cert,
		"PEM `file` of the client certificate; needs --nats-key [NATS_CERT]")
	fs.StringVar(&c.NATS.Key, "nats-key", c.NATS.Key,
		"PEM `file` of the client certificate's key [NATS_KEY]")
	fs.BoolVar(&c.NATS.AllowInsecure, "nats-allow-insecure", c.NATS.AllowInsecure,
		"connect beyond loopback without TLS or without credentials [MACHINEBUS_NATS_ALLOW_INSECURE]")
	fs.Var(&listFlag{&c.Clusters}, "clusters",
		"`names` of the control planes to serve, with commas; empty means default [MACHINEBUS_CLUSTERS]")
	fs.Var(&pinsFlag{&c.ControlPlaneKeys}, "control-plane-key",
		"public curve key of a control plane, as `cluster=key`, with commas; a control plane without one is trusted "+
			"at its first answer [MACHINEBUS_CONTROL_PLANE_KEYS]")
	fs.IntVar(&c.Slots, "slots", c.Slots,
		"`number` of creates and initializes that run at once, and of deletes beside them; 0 means 512, or fewer "+
			"where the memory limit is below 128 MiB [MACHINEBUS_SLOTS]")
	fs.DurationVar(&c.DrainTimeout, "drain-timeout", c.DrainTimeout,
		"how long running operations may take to finish after a stop signal, before they are cancelled; "+
			"0 means 10m [MACHINEBUS_DRAIN_TIMEOUT]")
	fs.StringVar(&c.Listen, "listen", c.Listen,
		"`address` of /healthz, /readyz and /metrics, such as :8081; empty means no endpoint [MACHINEBUS_LISTEN]")
	fs.StringVar(&c.LogFormat, "log-format", c.LogFormat,
		"`format`: text or json; empty means text [MACHINEBUS_LOG_FORMAT]")
	fs.TextVar(&c.LogLevel, "log-level", c.LogLevel,
		"least `level` that is logged: debug, info, warn or error [MACHINEBUS_LOG_LEVEL]")

	c.flagErrs = fromEnvironment(fs)
}

// ParseFlags parses the command line as [flag.Parse] does and ends the program
// like it, with 0 after -h and 2 after a wrong flag; but it says what is wrong in
// one line, without the list of all flags.
func ParseFlags() {
	switch err := parseFlags(flag.CommandLine, os.Args[1:]); {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(0) //nolint:forbidigo // as flag.Parse does, so that a main stays short
	case err != nil:
		fmt.Fprintf(flag.CommandLine.Output(), "%s: %v\n", filepath.Base(os.Args[0]), err)
		os.Exit(2) //nolint:forbidigo // see above
	}
}

// parseFlags leaves it to its caller to show the error, except for the help
// that was asked for.
func parseFlags(fs *flag.FlagSet, args []string) error {
	fs.Init(fs.Name(), flag.ContinueOnError)
	var said bytes.Buffer
	out := fs.Output()
	fs.SetOutput(&said)
	err := fs.Parse(args)
	fs.SetOutput(out)
	if errors.Is(err, flag.ErrHelp) {
		_, _ = said.WriteTo(out) // nobody could be told
	} else if err != nil {
		err = fmt.Errorf("%w (-h lists the flags)", err)
	}

	return err
}

// flagVariables are the environment variables that stand in for flags.
var flagVariables = map[string]string{ //nolint:gosec // names, not values
	"nats-url":            "NATS_URL",
	"nats-creds":          "NATS_CREDS",
	"nats-ca":             "NATS_CA",
	"nats-cert":           "NATS_CERT",
	"nats-key":            "NATS_KEY",
	"nats-allow-insecure": "MACHINEBUS_NATS_ALLOW_INSECURE",
	"clusters":            "MACHINEBUS_CLUSTERS",
	"control-plane-key":   "MACHINEBUS_CONTROL_PLANE_KEYS",
	"slots":               "MACHINEBUS_SLOTS",
	"drain-timeout":       "MACHINEBUS_DRAIN_TIMEOUT",
	"listen":              "MACHINEBUS_LISTEN",
	"log-format":          "MACHINEBUS_LOG_FORMAT",
	"log-level":           "MACHINEBUS_LOG_LEVEL",
}

func fromEnvironment(fs *flag.FlagSet) []error {
	var errs []error
	fs.VisitAll(func(f *flag.Flag) {
		variable := flagVariables[f.Name]
		value := os.Getenv(variable)
		if variable == "" || value == "" {
			return
		}
		if err := f.Value.Set(value); err != nil {
			// Not the value: a URL may hold a password.
			errs = append(errs, fmt.Errorf("environment variable %s is not a valid value for --%s: %w", variable, f.Name, err))
		}
	})

	return errs
}

// A listFlag is a list with commas. Each Set replaces the list, so that the
// command line wins over the environment.
type listFlag struct{ list *[]string }

func (l *listFlag) String() string {
	if l.list == nil {
		return ""
	}

	return strings.Join(*l.list, ",")
}

func (l *listFlag) Set(text string) error {
	var list []string
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			list = append(list, part)
		}
	}
	*l.list = list

	return nil
}

// A pinsFlag is a list of cluster=key.
type pinsFlag struct{ pins *map[string]string }

func (p *pinsFlag) String() string {
	if p.pins == nil {
		return ""
	}
	var parts []string
	for cluster, key := range *p.pins {
		parts = append(parts, cluster+"="+key)
	}
	slices.Sort(parts)

	return strings.Join(parts, ",")
}

func (p *pinsFlag) Set(text string) error {
	pins := map[string]string{}
	for part := range strings.SplitSeq(text, ",") {
		cluster, key, ok := strings.Cut(strings.TrimSpace(part), "=")
		if !ok || cluster == "" || key == "" {
			return fmt.Errorf("%q: want cluster=key", part)
		}
		pins[cluster] = key
	}
	*p.pins = pins

	return nil
}
