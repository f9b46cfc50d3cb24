package main

import (
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/machinebus/machinebus/cmd/internal/mtls"
	"github.com/machinebus/machinebus/cmd/mcm-grpc-bridge/bridge"
	"github.com/machinebus/machinebus/driversdk"
)

const version = "0.1.0"

// options holds the flags.
type options struct {
	replica driversdk.Config
	listen  string
	kinds   bridge.Kinds
	tls     mtls.Files
}

func newOptions(fs *flag.FlagSet) *options {
	o := &options{
		// A driver of 2018 makes one call at a time.
		replica: driversdk.Config{Version: version, Slots: 1},
		kinds:   bridge.DefaultKinds(),
		// Go had no TLS 1.3 in 2018.
		tls: mtls.Files{ClientCAFlag: "--tls-client-ca", MinVersion: tls.VersionTLS12},
	}
	o.replica.RegisterFlags(fs)
	fs.StringVar(&o.listen, "grpc-listen", "127.0.0.1:5000",
		"`address` for drivers; beyond loopback it needs --tls-cert, --tls-key and --tls-client-ca")
	var given bool
	fs.Func("kind", "a kind of class that drivers may register, as `Kind=provider`, with commas; may be repeated; the first one replaces the table",
		func(text string) error {
			if !given {
				clear(o.kinds)
				given = true
			}

			return o.kinds.Set(text)
		})
	fs.DurationVar(&o.replica.SettleTime, "settle-time", 0, "how long the clouds' lists may lag behind; 0 if they never do")
	fs.StringVar(&o.tls.Cert, "tls-cert", "", "PEM `file` with the server's certificate for drivers")
	fs.StringVar(&o.tls.Key, "tls-key", "", "PEM `file` with the key of --tls-cert")
	fs.StringVar(&o.tls.ClientCA, "tls-client-ca", "",
		"PEM `file` with the authority that signs drivers' certificates; a driver with one can serve each --kind and gets its secrets")

	return o
}

// complete sets defaults, and returns an error that names all that is wrong.
func (o *options) complete() error {
	var err error
	o.replica.Provider = "bridged" // each replica has its own
	o.replica, err = o.replica.Complete()

	return errors.Join(err, o.checkListen())
}

func (o *options) checkListen() error {
	host, _, err := net.SplitHostPort(o.listen)
	if err != nil {
		return fmt.Errorf("--grpc-listen: %w", err)
	}
	ip := net.ParseIP(host)
	local := host == "localhost" || ip != nil && ip.IsLoopback()
	given := 0
	for _, file := range []string{o.tls.Cert, o.tls.Key, o.tls.ClientCA} {
		if file != "" {
			given++
		}
	}
	switch {
	case given == 3, given == 0 && local:
		return nil
	case given > 0:
		return errors.New("--tls-cert, --tls-key and --tls-client-ca belong together: set all three, or none to listen on loopback")
	default:
		return fmt.Errorf("--grpc-listen=%s is beyond loopback, where drivers must have certificates, as they get secrets: "+
			"set --tls-cert, --tls-key and --tls-client-ca, or listen on 127.0.0.1", o.listen)
	}
}

// grpc returns the gRPC server's options.
func (o *options) grpc() ([]grpc.ServerOption, error) {
	if o.tls.Cert == "" {
		return nil, nil
	}
	cfg, err := o.tls.Config(func(err error) {
		o.replica.Logger.Error("certificates cannot be reloaded; the previous ones stay in use", "err", err)
	})
	if err != nil {
		return nil, err
	}

	return []grpc.ServerOption{grpc.Creds(credentials.NewTLS(cfg))}, nil
}
