// Package mtls sets up servers that admit only clients with a certificate. It does not say who
// those clients are: each of them may do what the server does.
package mtls

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"sync/atomic"
)

// Files are PEM files: the server's certificate and its key, and the authority that signs the
// certificates of clients.
type Files struct {
	Cert, Key, ClientCA string
	// ClientCAFlag is the flag of ClientCA, for errors. Those of the others are --tls-cert and
	// --tls-key.
	ClientCAFlag string
	// MinVersion is the least version of TLS.
	MinVersion uint16
}

// Config returns an error if the files cannot be used. It reads them again for each connection, so
// that a renewed certificate needs no restart. While they cannot be read, for example during a
// replacement, the last good ones stay in use, and failed is called from any goroutine.
func (f Files) Config(failed func(error)) (*tls.Config, error) {
	good, err := f.load()
	if err != nil {
		return nil, err
	}
	r := &reload{files: f, failed: failed}
	r.last.Store(good)

	return &tls.Config{MinVersion: f.MinVersion, GetConfigForClient: r.config}, nil
}

func (f Files) load() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert and --tls-key: %w", err)
	}
	pem, err := os.ReadFile(f.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.ClientCAFlag, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s: %s contains no PEM certificate", f.ClientCAFlag, f.ClientCA)
	}

	return &tls.Config{
		MinVersion: f.MinVersion, NextProtos: []string{"h2"},
		Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
	}, nil
}

type reload struct {
	files  Files
	failed func(error)
	last   atomic.Pointer[tls.Config]
}

func (r *reload) config(*tls.ClientHelloInfo) (*tls.Config, error) {
	cfg, err := r.files.load()
	if err == nil {
		r.last.Store(cfg)

		return cfg, nil
	}
	r.failed(err)

	return r.last.Load(), nil
}
