// Package natsflags has the flags for credentials and TLS that programs share for NATS.
// The flag for the servers is their own, as it means something else in each of them.
// Drivers have the flags of the SDK.
package natsflags

import (
	"github.com/spf13/pflag"

	"github.com/machinebus/machinebus/bus"
)

// Add adds the flags that fill in c.
func Add(fs *pflag.FlagSet, c *bus.Config) {
	fs.StringVar(&c.Creds, "nats-creds", "", "credentials `file` for NATS (user JWT and nkey seed)")
	fs.StringVar(&c.CA, "nats-ca", "", "PEM `file` of the authority that signed the NATS servers' certificates; empty for the system's")
	fs.StringVar(&c.Cert, "nats-cert", "", "PEM `file` of the client certificate for NATS")
	fs.StringVar(&c.Key, "nats-key", "", "PEM `file` of the key of --nats-cert")
	fs.BoolVar(&c.AllowInsecure, "nats-allow-insecure", false, "allow NATS beyond loopback without TLS or without authentication")
}
