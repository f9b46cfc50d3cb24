package embedded

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

const (
	// readyTimeout is how long a server may take until it takes clients,
	// recoverTimeout that of one with a store, which it reads before.
	readyTimeout, recoverTimeout = 10 * time.Second, 2 * time.Minute
	// recoverNotice is how often the log says that it still does.
	recoverNotice = 10 * time.Second
	pollInterval  = 5 * time.Millisecond
	// listenPoll is the least for which the server does not spin when it is asked.
	listenPoll = 26 * time.Millisecond
)

// A readying is the wait for a server.
type readying struct {
	ready  func() error
	limit  time.Duration
	broken <-chan string   // why it will never be
	quit   <-chan struct{} // nil for never
	log    *slog.Logger
}

// wait returns when the server is ready, will never be, or was given up.
func (r *readying) wait() error {
	started := time.Now()
	poll := time.NewTicker(pollInterval)
	defer poll.Stop()
	notice := time.NewTicker(recoverNotice)
	defer notice.Stop()
	for {
		err := r.ready()
		if err == nil {
			return nil
		}
		if time.Since(started) >= r.limit {
			return fmt.Errorf("the embedded nats-server was not ready within %s: %w; see its log", r.limit, err)
		}
		select {
		case why := <-r.broken:
			return fmt.Errorf("the embedded nats-server cannot run: %s", why)
		case <-r.quit:
			return fmt.Errorf("stopped before the embedded nats-server was ready: %w", err)
		case <-notice.C:
			r.log.Info("the embedded nats-server is not ready yet; a large store takes time to load",
				"err", err, "since", time.Since(started).Round(time.Second).String(), "limit", r.limit.String())
		case <-poll.C:
		}
	}
}

// readyError tells why a server is not ready; nil when it is.
func readyError(srv *server.Server) error {
	if !srv.ReadyForConnections(listenPoll) {
		return errors.New("it does not listen")
	}
	if !srv.JetStreamEnabled() {
		return nil
	}
	// Listening says nothing about the store, which may still recover.
	if h := srv.Healthz(&server.HealthzOptions{JSServerOnly: true}); h.Error != "" {
		return fmt.Errorf("JetStream: %s", h.Error)
	}

	return nil
}
