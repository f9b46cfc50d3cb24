package replica

import (
	"fmt"
	"time"

	"github.com/machinebus/machinebus/bus"
)

// drain takes no more work and waits for what runs; it fails when some of it was left
// behind.
func (s *Server) drain(requests []bus.Subscription) error {
	s.log.Info("draining: taking no new operations", "running", s.ops.startDraining(), "timeout", s.cfg.DrainTimeout)
	s.beat.renewNow()
	for _, sub := range requests {
		// What has come already is answered busy; Unsubscribe would lose it.
		if sub.Drain() != nil {
			_ = sub.Unsubscribe() // not connected: nothing comes either
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

// awaitAcks gives mcm a moment to store the last results that are gone with this
// process: those that the operations stream does not have.
func (s *Server) awaitAcks() {
	limit := time.NewTimer(ackWait)
	defer limit.Stop()
	for {
		left := s.ops.unstoredResults()
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
