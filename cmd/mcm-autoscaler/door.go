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

// A door is who may connect, and how.
type door struct {
	cert, key, clientCA string
	plaintext           bool
}

func (d *door) validate() error {
	switch {
	case d.plaintext && (d.cert != "" || d.key != "" || d.clientCA != ""):
		return errors.New("--allow-plaintext and --tls-cert, --tls-key or --client-ca contradict each other: choose one")
	case !d.plaintext && (d.cert == "" || d.key == "" || d.clientCA == ""):
		return errors.New("--tls-cert, --tls-key and --client-ca are needed (or --allow-plaintext, for development)")
	default:
		return nil
	}
}

// listen is where to listen unless somebody says so: without TLS no other machine
// gets in.
func (d *door) listen() string {
	if d.plaintext {
		return "127.0.0.1:8086"
	}

	return ":8086"
}

// credentials fail when the files cannot be used; later on the last good ones stay
// in use.
func (d *door) credentials() (credentials.TransportCredentials, error) {
	if d.plaintext {
		return insecure.NewCredentials(), nil
	}
	good, err := d.load()
	if err != nil {
		return nil, err
	}
	r := &reload{door: d}
	r.last.Store(good)

	return credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: r.config}), nil
}

func (d *door) load() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(d.cert, d.key)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert and --tls-key: %w", err)
	}
	pem, err := os.ReadFile(d.clientCA)
	if err != nil {
		return nil, fmt.Errorf("--client-ca: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("--client-ca: %s holds no PEM certificate", d.clientCA)
	}

	return &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"},
		Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
	}, nil
}

// A reload reads the files again for each connection, of which there are few: a
// renewed certificate needs no restart. While they cannot be read, as in the middle
// of being replaced, the last good ones are used.
type reload struct {
	door *door
	last atomic.Pointer[tls.Config]
}

func (r *reload) config(*tls.ClientHelloInfo) (*tls.Config, error) {
	cfg, err := r.door.load()
	if err == nil {
		r.last.Store(cfg)

		return cfg, nil
	}
	klog.Background().Error(err, "certificates cannot be read again; those before stay in use")

	return r.last.Load(), nil
}
