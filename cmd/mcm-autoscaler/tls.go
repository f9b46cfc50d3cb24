package main

import (
	"crypto/tls"
	"errors"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"

	"github.com/machinebus/machinebus/cmd/internal/mtls"
)

// tlsOptions holds the flags for TLS and client certificates.
type tlsOptions struct {
	cert, key, clientCA string
	plaintext           bool
}

func (o *tlsOptions) validate() error {
	switch {
	case o.plaintext && (o.cert != "" || o.key != "" || o.clientCA != ""):
		return errors.New("--allow-plaintext cannot be combined with --tls-cert, --tls-key and --client-ca")
	case !o.plaintext && (o.cert == "" || o.key == "" || o.clientCA == ""):
		return errors.New("--tls-cert, --tls-key and --client-ca are needed (or --allow-plaintext, for development)")
	default:
		return nil
	}
}

// listen returns the default of --listen. Without TLS only this host may connect.
func (o *tlsOptions) listen() string {
	if o.plaintext {
		return "127.0.0.1:8086"
	}

	return ":8086"
}

// credentials returns an error if the files cannot be used. If that happens later, the
// last good ones stay in use.
func (o *tlsOptions) credentials() (credentials.TransportCredentials, error) {
	if o.plaintext {
		return insecure.NewCredentials(), nil
	}
	files := mtls.Files{Cert: o.cert, Key: o.key, ClientCA: o.clientCA, ClientCAFlag: "--client-ca", MinVersion: tls.VersionTLS13}
	cfg, err := files.Config(func(err error) {
		klog.Background().Error(err, "certificates cannot be reloaded; the previous ones stay in use")
	})
	if err != nil {
		return nil, err
	}

	return credentials.NewTLS(cfg), nil
}
