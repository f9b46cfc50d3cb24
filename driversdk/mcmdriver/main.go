package mcmdriver

import (
	"flag"
	"fmt"
	"log/slog"
	"os"

	"github.com/gardener/machine-controller-manager/pkg/util/provider/driver"

	"github.com/machinebus/machinebus/driversdk"
)

// Main is the whole main of a driver. It parses the flags that all drivers have, --provider
// and --create-identity, serves d until an interrupt or SIGTERM, and ends the program.
//
// cfg.Provider is the provider as d spells it, such as AWS. cfg.CreateIdentity may be
// [driversdk.IdentityUniqueName] if the cloud refuses a second instance of a name. Flags
// and the environment win over cfg.
func Main(d driver.Driver, cfg driversdk.Config) {
	err := registerFlags(flag.CommandLine, &cfg)
	driversdk.ParseFlags()
	if err == nil {
		err = serveUntilSignal(d, cfg)
	}
	if err != nil {
		slog.Error("driver stopped", "err", err)
		os.Exit(1) //nolint:forbidigo // it is a main
	}
}

// ServeFromEnvironment is Main for a program whose flags are another's: all settings come
// from the environment variables that -h prints with the flags of Main. It returns why
// the driver stopped, nil after an interrupt or SIGTERM.
func ServeFromEnvironment(d driver.Driver) error {
	var cfg driversdk.Config
	if err := registerFlags(flag.NewFlagSet("", flag.ContinueOnError), &cfg); err != nil {
		return err
	}

	return serveUntilSignal(d, cfg)
}

// Environment variables of the flags that only these drivers have.
const (
	providerVariable = "MACHINEBUS_PROVIDER"
	identityVariable = "MACHINEBUS_CREATE_IDENTITY"
)

// registerFlags adds the flags, and sets what the environment says. The error names the
// variable that it cannot take.
func registerFlags(fs *flag.FlagSet, cfg *driversdk.Config) error {
	fs.StringVar(&cfg.Provider, "provider", cfg.Provider,
		"`name` of the provider as the driver spells it, such as AWS ["+providerVariable+"]")
	fs.Var(identityFlag{&cfg.CreateIdentity}, "create-identity",
		"unique_name if the cloud refuses a second instance of a `name`; empty means none ["+identityVariable+"]")
	for name, variable := range map[string]string{"provider": providerVariable, "create-identity": identityVariable} {
		if value := os.Getenv(variable); value != "" {
			if err := fs.Set(name, value); err != nil {
				return fmt.Errorf("environment variable %s: %w", variable, err)
			}
		}
	}
	cfg.RegisterFlags(fs)

	return nil
}

// An identityFlag is a create identity that such a driver can have: none passes an
// idempotency token to its cloud by itself.
type identityFlag struct{ identity *driversdk.CreateIdentity }

func (f identityFlag) String() string {
	if f.identity != nil && *f.identity == driversdk.IdentityUniqueName {
		return "unique_name"
	}

	return ""
}

func (f identityFlag) Set(text string) error {
	switch text {
	case "", "none":
		*f.identity = driversdk.IdentityNone
	case "unique_name":
		*f.identity = driversdk.IdentityUniqueName
	default:
		return fmt.Errorf("%q: want none or unique_name", text)
	}

	return nil
}
