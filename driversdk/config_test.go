package driversdk

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/bus/replica"
)

func TestConfig_RegisterFlags(t *testing.T) { // not parallel: the environment is the process's
	defaults := Config{
		Provider: "acme", Version: "0.0.0", CreateIdentity: IdentityNone, Clusters: []string{"default"},
		NATS: NATSConfig{URLs: []string{"nats://127.0.0.1:4222"}}, Slots: replica.DefaultSlots(), DrainTimeout: 10 * time.Minute,
	}
	with := func(change func(*Config)) Config {
		c := defaults
		change(&c)

		return c
	}
	east, west := optest.NewKey(t), optest.NewKey(t)
	seed, err := east.Seed()
	if err != nil {
		t.Fatal(err)
	}
	cases := map[string]struct {
		reason string
		env    map[string]string
		args   []string
		want   Config
		err    string
	}{
		"nothing": {"the documented defaults", nil, nil, defaults, ""},
		"environment": {
			"stands in for flags",
			map[string]string{"NATS_URL": "nats://a:1, nats://b:2", "MACHINEBUS_SLOTS": "7", "MACHINEBUS_CLUSTERS": "east,west"},
			nil,
			with(func(c *Config) {
				c.NATS.URLs, c.Slots, c.Clusters = []string{"nats://a:1", "nats://b:2"}, 7, []string{"east", "west"}
			}), "",
		},
		"both": {
			"the command line wins",
			map[string]string{"NATS_URL": "nats://a:1", "MACHINEBUS_SLOTS": "7"},
			[]string{"--nats-url=nats://c:3", "--slots=8"},
			with(func(c *Config) { c.NATS.URLs, c.Slots = []string{"nats://c:3"}, 8 }), "",
		},
		"keys": {
			"one for each cluster", nil,
			[]string{"--clusters=east,west", "--control-plane-key=east=" + east.Public() + ",west=" + west.Public()},
			with(func(c *Config) {
				c.Clusters = []string{"east", "west"}
				c.ControlPlaneKeys = map[string]string{"east": east.Public(), "west": west.Public()}
			}), "",
		},
		"the rest": {
			"every other flag", nil,
			[]string{
				"--nats-creds=f", "--nats-ca=ca", "--nats-cert=c", "--nats-key=k", "--nats-allow-insecure",
				"--drain-timeout=3s", "--listen=:1", "--log-format=json", "--log-level=debug",
			},
			with(func(c *Config) {
				c.NATS.Creds, c.NATS.CA, c.NATS.Cert, c.NATS.Key, c.NATS.AllowInsecure = "f", "ca", "c", "k", true
				c.DrainTimeout, c.Listen, c.LogFormat, c.LogLevel = 3*time.Second, ":1", "json", slog.LevelDebug
			}), "",
		},
		"bad variable":   {"is named", map[string]string{"MACHINEBUS_SLOTS": "many"}, nil, Config{}, "environment variable MACHINEBUS_SLOTS is not a valid value for --slots"},
		"unknown flag":   {"is named", nil, []string{"--slost=8"}, Config{}, "flag provided but not defined: -slost"},
		"argument":       {"is no flag", nil, []string{"slots=8"}, Config{}, `unexpected argument "slots=8"`},
		"negative slots": {"make no sense", nil, []string{"--slots=-1"}, Config{}, "slots: -1 is negative"},
		"log format":     {"says what there is", nil, []string{"--log-format=xml"}, Config{}, `log format "xml": want text or json`},
		"key":            {"says how it looks", nil, []string{"--control-plane-key=XA"}, Config{}, "want cluster=key"},
		"key of no cluster": {
			"would be used for nothing", nil,
			[]string{"--control-plane-key=old=" + east.Public()},
			Config{},
			`--control-plane-key (Config.ControlPlaneKeys): the key is for cluster "old", which this driver does not serve: correct the name, or add it to --clusters`,
		},
		"no key": {
			"would refuse every secret", nil,
			[]string{"--control-plane-key=default=XA"},
			Config{},
			`--control-plane-key (Config.ControlPlaneKeys): the key for cluster "default": want a public curve key`,
		},
		"seed": {
			"is the other half", nil,
			[]string{"--control-plane-key=default=" + string(seed)},
			Config{},
			`the key for cluster "default": it is a seed, which is secret; want a public curve key`,
		},
		"cluster twice": {
			"would have two heartbeats", nil,
			[]string{"--clusters=east,west,east,east"},
			Config{},
			`cluster "east" is listed twice: name it once in --clusters (Config.Clusters)`,
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			for _, variable := range flagVariables {
				t.Setenv(variable, tc.env[variable])
			}
			cfg := Config{Provider: "acme"}
			fs := flag.NewFlagSet("driver", flag.ContinueOnError)
			fs.SetOutput(io.Discard)
			cfg.RegisterFlags(fs)
			err := fs.Parse(tc.args)
			if err == nil {
				cfg, err = cfg.Complete()
			}
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Errorf("%s: want %q, have %v", tc.reason, tc.err, err)
				}

				return
			}
			if err != nil {
				t.Fatalf("%s: %v", tc.reason, err)
			}
			if diff := cmp.Diff(tc.want, cfg, cmpopts.IgnoreUnexported(Config{}), cmpopts.IgnoreFields(Config{}, "Logger")); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tc.reason, diff)
			}
		})
	}
}

func TestParseFlags(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason string
		args   []string
		says   string
		err    string
	}{
		"right":   {"nothing is said", []string{"--slots=3"}, "", ""},
		"unknown": {"one line, without the list", []string{"--slost=3"}, "", "flag provided but not defined: -slost (-h lists the flags)"},
		"value":   {"one line, without the list", []string{"--slots=x"}, "", `invalid value "x" for flag -slots: parse error (-h lists the flags)`},
		"help":    {"the list was asked for", []string{"-h"}, "-drain-timeout", flag.ErrHelp.Error()},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var cfg Config
			var said bytes.Buffer
			fs := flag.NewFlagSet("driver", flag.ExitOnError)
			fs.SetOutput(&said)
			cfg.RegisterFlags(fs)
			text := ""
			if err := parseFlags(fs, tc.args); err != nil {
				text = err.Error()
			}
			if text != tc.err || (said.Len() > 0) != (tc.says != "") || !strings.Contains(said.String(), tc.says) {
				t.Errorf("%s: error %q, want %q; said %q, want %q", tc.reason, text, tc.err, said.String(), tc.says)
			}
		})
	}
}

// Every flag has a variable, and its help names it.
func TestConfig_FlagVariables(t *testing.T) {
	t.Parallel()
	var cfg Config
	fs := flag.NewFlagSet("driver", flag.ContinueOnError)
	cfg.RegisterFlags(fs)
	fs.VisitAll(func(f *flag.Flag) {
		if v := flagVariables[f.Name]; v == "" || !strings.HasSuffix(f.Usage, "["+v+"]") {
			t.Errorf("--%s: usage %q does not end with its variable %q", f.Name, f.Usage, v)
		}
	})
	var help bytes.Buffer
	fs.SetOutput(&help)
	fs.PrintDefaults() // calls String on zero values of flags
	if strings.Contains(help.String(), "panic") {
		t.Errorf("help:\n%s", help.String())
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	base := errors.New("base")
	cases := map[string]struct {
		reason string
		err    error
		code   Code
	}{
		"nil":         {"no error", nil, OK},
		"nil coded":   {"stays nil", NewError(NotFound, nil), OK},
		"nil delayed": {"stays nil", WithRetryAfter(nil, time.Second), OK},
		"uncoded":     {"is unknown", base, Unknown},
		"coded":       {"has its code", NewError(NotFound, base), NotFound},
		"ok":          {"an error is never a success", NewError(OK, base), Internal},
		"delayed":     {"keeps its code", WithRetryAfter(Errorf(Unavailable, "x: %w", base), time.Second), Unavailable},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := CodeOf(tc.err); got != tc.code {
				t.Errorf("%s: want %v, have %v", tc.reason, tc.code, got)
			}
			if tc.err != nil && !errors.Is(tc.err, base) {
				t.Errorf("%s: the cause is lost", tc.reason)
			}
		})
	}
}
