package bus

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
)

// renewNow asks for a session to every cluster without waiting for the next
// beat. It never blocks.
func (s *Server) renewNow() {
	for _, cluster := range s.cfg.Clusters {
		signal(s.renew[cluster])
	}
}

// signal leaves a word on a channel of one place. It never blocks.
func signal(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// heartbeat publishes a session to a cluster at every beat, and sooner when
// something changed [SESSION-1]. It does so whether or not the operations stream
// acknowledges them: mcm is to see a replica live that the stream has forgotten.
func (s *Server) heartbeat(ctx context.Context, cluster string) {
	tick := time.NewTicker(SessionInterval)
	defer tick.Stop()
	// A burst of settled operations must not become a burst of sessions.
	const pause = SessionInterval / 10
	for {
		s.publishSession(cluster, false)
		hold := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			hold.Stop()

			return
		case <-hold.C:
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.storeOutcomes(cluster)
		case <-s.renew[cluster]:
		}
	}
}

// stop gives up the leases, so that nothing is begun any more, and says so.
func (s *Server) stop() {
	s.mu.Lock()
	for _, l := range s.leases {
		l.end()
	}
	s.mu.Unlock()
	for _, cluster := range s.cfg.Clusters {
		s.publishSession(cluster, true)
	}
}

// onRenewal takes the operations stream's word on a session.
func (s *Server) onRenewal(cluster string, sequence uint64, answer *nats.Msg) {
	at, err := ackOf(answer)
	there, known := conflictOf(err)
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.leases[cluster]
	switch {
	case err == nil:
		before := l.holds(time.Now())
		l.stored(sequence, at)
		if !before && l.holds(time.Now()) {
			signal(s.renew[cluster]) // mcm may send what is to be claimed
		}
	case known:
		if l.refused(sequence, there) {
			s.log.Warn("the session is gone: mcm may have taken this replica for dead; what runs here may begin nothing more, "+
				"and new operations are taken under a new session", "cluster", cluster)
			signal(s.renew[cluster])
		}
	case errors.Is(err, errNoStream): // none is made, and nobody listens either
	default:
		s.log.Debug("session not stored", "err", err)
	}
}

func (s *Server) ledger(cluster string) ledger {
	return ledger{inquirer: s.inquirer, stream: StreamName(cluster, s.cfg.Provider)}
}

// fenced tells that a held operation may begin nothing more at the provider: mcm
// may have given it to another replica [FENCE-1] [FENCE-2]. Server.mu is held.
func (s *Server) fenced(h *held, now time.Time) bool {
	if !h.claimed || s.unfenced {
		return false
	}
	l := s.leases[h.cluster]
	h.fenced = h.fenced || l.generation != h.generation || !l.holds(now)

	return h.fenced
}
