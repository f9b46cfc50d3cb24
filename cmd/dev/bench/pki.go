package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// A pki holds the files of one certificate, which all servers and clients use for mutual
// TLS.
type pki struct {
	ca, cert, key string
	config        string // of nats-server, which requires it
}

// client returns the TLS configuration of a client with that certificate.
func (p *pki) client() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(p.cert, p.key)
	if err != nil {
		return nil, err
	}
	roots, err := rootsOf(pair)
	if err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, RootCAs: roots}, nil
}

// rootsOf returns a pool with a self-signed certificate.
func rootsOf(pair tls.Certificate) (*x509.CertPool, error) {
	roots := x509.NewCertPool()
	for _, der := range pair.Certificate {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, err
		}
		roots.AddCert(cert)
	}
	return roots, nil
}

// writePKI creates a self-signed certificate that is valid for an hour.
func writePKI(dir string) (*pki, error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "bench"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		return nil, err
	}
	secret, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		return nil, err
	}
	dir, err = filepath.Abs(filepath.Join(dir, "pki"))
	if err != nil {
		return nil, err
	}
	p := &pki{
		ca: filepath.Join(dir, "cert.pem"), cert: filepath.Join(dir, "cert.pem"),
		key: filepath.Join(dir, "key.pem"), config: filepath.Join(dir, "nats.conf"),
	}
	const dirMode, fileMode = 0o700, 0o600
	config := fmt.Sprintf("tls { cert_file: %q, key_file: %q, ca_file: %q, verify: true }\n", p.cert, p.key, p.ca)
	return p, errors.Join(
		os.MkdirAll(dir, dirMode),
		os.WriteFile(p.cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), fileMode),
		os.WriteFile(p.key, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: secret}), fileMode),
		os.WriteFile(p.config, []byte(config), fileMode),
	)
}
