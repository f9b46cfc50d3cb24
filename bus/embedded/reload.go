package embedded

import (
	"crypto/tls"
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
// it names for any listener are others than before: new connections see them. Those that
// stand stay, but for clients of a single user and those that an auth callout let in, which
// reconnect. On an error the server goes on as it was. A running server does this itself
// every minute.
func (s *Server) Reload() error {
	s.reloading.Lock()
	defer s.reloading.Unlock()
	s.mu.Lock()
	srv, before, required, dir := s.srv, s.certificates, s.tls, s.store
	s.mu.Unlock()
	if srv == nil || s.opts.ConfigFile == "" {
		return nil
	}
	o, err := s.serverOptions(s.opts.Listen, dir)
	if err != nil {
		return err
	}
	if requiresTLS(o) != required { // unsealed answers rely on TLS
		discard(o)

		return fmt.Errorf("NATS configuration (%s) switches TLS on or off: restart mcm to apply it", s.opts.ConfigFile)
	}
	now := certificatesOf(o)
	if slices.EqualFunc(before, now, sameCertificates) {
		discard(o)

		return nil
	}
	if err := srv.ReloadOptions(o); err != nil {
		discard(o)

		return fmt.Errorf("NATS configuration (%s) has new certificates and a change that needs a restart: %w", s.opts.ConfigFile, err)
	}
	s.mu.Lock()
	s.certificates = now
	s.mu.Unlock()
	s.opts.Logger.Info("took over renewed certificates", "configuration", s.opts.ConfigFile)

	return nil
}

// discard ends what options that no server took over have started: a resolver of accounts
// looks after its directory by itself.
func discard(o *server.Options) {
	if o.AccountResolver != nil {
		o.AccountResolver.Close()
	}
}

// keepReloading calls Reload until done is closed, and logs an error when it changes.
func (s *Server) keepReloading(done <-chan struct{}) {
	tick := time.NewTicker(reloadEvery)
	defer tick.Stop()
	logged := ""
	for {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		err := s.Reload()
		if err == nil {
			logged = ""

			continue
		}
		if logged != err.Error() {
			logged = err.Error()
			s.opts.Logger.Error("cannot load renewed certificates; the old ones stay in use", "err", logged)
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

// certificatesOf returns what the listeners show, as they are before a server adds to them;
// nil for those without TLS.
func certificatesOf(o *server.Options) []*tls.Config {
	var all []*tls.Config
	for _, l := range listenersOf(o) {
		all = append(all, l.tls.Clone()) // of nil, too
	}

	return all
}

// sameCertificates reports whether two configurations show a peer the same certificates.
func sameCertificates(a, b *tls.Config) bool {
	if a == nil || b == nil {
		return a == b
	}
	der := func(x, y tls.Certificate) bool {
		return slices.EqualFunc(x.Certificate, y.Certificate, slices.Equal)
	}

	return slices.EqualFunc(a.Certificates, b.Certificates, der) && a.ClientCAs.Equal(b.ClientCAs)
}
