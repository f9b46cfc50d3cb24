package replica

import (
	"fmt"
	"time"

	"github.com/machinebus/machinebus/bus"
)

// drain stops taking work and waits for running operations. It returns an error if some
// still run at the end.
func (s *Server) drain(requests []bus.Subscription) error {
	s.log.Info("draining: taking no new operations", "running", s.ops.startDraining(), "timeout", s.cfg.DrainTimeout)
	s.beat.renewNow()
	for _, sub := range requests {
		// Requests that have arrived are answered busy; Unsubscribe would lose them.
		if sub.Drain() != nil {
			_ = sub.Unsubscribe() // not connected: no requests arrive
		}
	}

	done := make(chan struct{})
	go func() {
		s.ops.tasks.Wait()
		close(done)
	}()
	var left error
	soft := time.NewTimer(s.cfg.DrainTimeout)
	defer soft.Stop()
	select {
	case <-done:
	case <-soft.C:
		s.log.Warn("drain timeout: cancelling the running operations", "operations", s.ops.cancelAll())
		hard := time.NewTimer(s.cfg.HardStop)
		defer hard.Stop()
		select {
		case <-done:
		case <-hard.C:
			left = fmt.Errorf("%w: they ignored their cancelled contexts for %s", ErrLeft, s.cfg.HardStop)
		}
	}
	s.awaitAcks()
	if stuck := s.ops.stuckCalls(); left == nil && len(stuck) > 0 {
		left = fmt.Errorf("%w: calls ignored their deadlines", ErrLeft)
	}

	return left
}

// awaitAcks gives mcm a moment to acknowledge results that the operations stream does not
// have: they end with this process.
func (s *Server) awaitAcks() {
	limit := time.NewTimer(ackWait)
	defer limit.Stop()
	for {
		left := len(s.ops.unstored(func(*operation) bool { return true }))
		if left == 0 || !s.conn.Up() {
			return
		}
		select {
		case <-s.ops.acked:
		case <-limit.C:
			s.log.Info("stopping with results that mcm has not acknowledged; mcm will ask another replica", "results", left)

			return
		}
	}
}
