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
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// pki holds the paths of the cluster's keys and certificates. One CA signs the API server's certificate, and client
// certificates of kubelets that join by CertificateSigningRequest.
type pki struct {
	caCert, caKey         string
	serverCert, serverKey string
	serviceAccountKey     string
}

func newPKI(dir string) pki {
	return pki{
		caCert:            filepath.Join(dir, "ca.crt"),
		caKey:             filepath.Join(dir, "ca.key"),
		serverCert:        filepath.Join(dir, "apiserver.crt"),
		serverKey:         filepath.Join(dir, "apiserver.key"),
		serviceAccountKey: filepath.Join(dir, "sa.key"),
	}
}

// ensure creates all keys and certificates unless they exist: kubeconfigs and tokens of a kept cluster must stay valid.
func (p pki) ensure(now time.Time) error {
	_, err := os.Stat(p.serviceAccountKey) // written last
	if err == nil {
		return nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(p.caCert), 0o700); err != nil {
		return err
	}
	ca := template(now, "devcluster-ca")
	ca.IsCA, ca.BasicConstraintsValid = true, true
	ca.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	if err := writeSigned(p.caCert, p.caKey, ca, nil); err != nil {
		return err
	}
	signer, err := tls.LoadX509KeyPair(p.caCert, p.caKey)
	if err != nil {
		return fmt.Errorf("load the new CA: %w", err)
	}
	server := template(now, apiServerName)
	server.KeyUsage = x509.KeyUsageDigitalSignature
	server.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	server.IPAddresses = []net.IP{net.ParseIP(loopback), net.ParseIP(serviceIP)}
	server.DNSNames = []string{
		"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc",
		"kubernetes.default.svc.cluster.local",
	}
	if err := writeSigned(p.serverCert, p.serverKey, server, &signer); err != nil {
		return err
	}
	_, err = writeKey(p.serviceAccountKey)
	return err
}

func template(now time.Time, commonName string) *x509.Certificate {
	const validity = 10 * 365 * 24 * time.Hour
	return &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()),
		Subject:      pkix.Name{CommonName: commonName},
		NotBefore:    now.Add(-time.Hour), // clocks of containers and virtual machines lag
		NotAfter:     now.Add(validity),
	}
}

// writeSigned writes a new key and its certificate, signed by signer, or by itself if signer is nil.
func writeSigned(certPath, keyPath string, cert *x509.Certificate, signer *tls.Certificate) error {
	key, err := writeKey(keyPath)
	if err != nil {
		return err
	}
	parent, parentKey := cert, any(key)
	if signer != nil {
		parent, parentKey = signer.Leaf, signer.PrivateKey
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, parent, key.Public(), parentKey)
	if err != nil {
		return fmt.Errorf("sign %s: %w", cert.Subject.CommonName, err)
	}
	return writePEM(certPath, "CERTIFICATE", der)
}

func writeKey(path string) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("generate %s: %w", path, err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", path, err)
	}
	return key, writePEM(path, "EC PRIVATE KEY", der)
}

func writePEM(path, kind string, der []byte) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}
