package embedded

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// reloadEvery is how often the certificates' files are looked at: what renews them does
// so long before they expire.
const reloadEvery = time.Minute

// Reload has the server use the configuration file as it is now, if the certificates that
// it names are others than before: new connections see them, those that stand stay. On an
// error the server goes on as it was. A running server does this itself every minute.
func (s *Server) Reload() error {
	s.reloading.Lock()
	defer s.reloading.Unlock()
	s.mu.Lock()
	srv, before := s.srv, s.tlsConfig
	s.mu.Unlock()
	if srv == nil || before == nil {
		return nil
	}
	o, err := s.serverOptions(s.opts.Listen)
	if err != nil {
		return err
	}
	if sameCertificates(before, o.TLSConfig) {
		return nil
	}
	now := o.TLSConfig.Clone()
	if err := srv.ReloadOptions(o); err != nil {
		return fmt.Errorf("NATS configuration (%s) has other certificates, and something that needs a restart: %w",
			orNone(s.opts.ConfigFile), err)
	}
	s.mu.Lock()
	s.tlsConfig = now
	s.mu.Unlock()
	s.opts.Logger.Info("took over renewed certificates", "configuration", s.opts.ConfigFile)

	return nil
}

// keepReloading calls Reload until done is closed, and tells each way to fail once.
func (s *Server) keepReloading(done <-chan struct{}) {
	tick := time.NewTicker(reloadEvery)
	defer tick.Stop()
	told := ""
	for {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		err := s.Reload()
		if err == nil {
			told = ""

			continue
		}
		if told != err.Error() {
			told = err.Error()
			s.opts.Logger.Error("cannot look for renewed certificates, the old ones stay", "err", told)
		}
	}
}

// lookAfterCertificates starts keepReloading; the function that it returns ends it, and waits
// for that.
func (s *Server) lookAfterCertificates() (stop func()) {
	done := make(chan struct{})
	var running sync.WaitGroup
	running.Go(func() { s.keepReloading(done) })

	return func() {
		close(done)
		running.Wait()
	}
}

// requiresTLS tells whether clients from outside of the process must use it.
func requiresTLS(o *server.Options) bool { return o.TLSConfig != nil && !o.AllowNonTLS }

// sameCertificates tells whether a peer could tell two configurations apart by their certificates.
func sameCertificates(a, b *tls.Config) bool {
	if a == nil || b == nil {
		return a == b
	}
	der := func(x, y tls.Certificate) bool {
		return slices.EqualFunc(x.Certificate, y.Certificate, slices.Equal)
	}

	return slices.EqualFunc(a.Certificates, b.Certificates, der) && samePool(a.ClientCAs, b.ClientCAs)
}

func samePool(a, b *x509.CertPool) bool {
	if a == nil || b == nil {
		return a == b
	}

	return a.Equal(b)
}
