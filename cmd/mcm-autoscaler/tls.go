package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"
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
	good, err := o.load()
	if err != nil {
		return nil, err
	}
	r := &reload{options: o}
	r.last.Store(good)

	return credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: r.config}), nil
}

func (o *tlsOptions) load() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(o.cert, o.key)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert and --tls-key: %w", err)
	}
	pem, err := os.ReadFile(o.clientCA)
	if err != nil {
		return nil, fmt.Errorf("--client-ca: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("--client-ca: %s contains no PEM certificate", o.clientCA)
	}

	return &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"},
		Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
	}, nil
}

// A reload reads the files again for each of the few connections, so that a renewed
// certificate needs no restart. While they cannot be read, for example during a
// replacement, the last good ones are used.
type reload struct {
	options *tlsOptions
	last    atomic.Pointer[tls.Config]
}

func (r *reload) config(*tls.ClientHelloInfo) (*tls.Config, error) {
	cfg, err := r.options.load()
	if err == nil {
		r.last.Store(cfg)

		return cfg, nil
	}
	klog.Background().Error(err, "certificates cannot be reloaded; the previous ones stay in use")

	return r.last.Load(), nil
}
