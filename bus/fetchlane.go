package bus

// A fetchLane queues the fetches of one provider's drivers, so that a provider that
// fetches all the time does not delay others.
type fetchLane struct {
	running int
	waiting []func()
	full    bool // which was logged
}

// admit has a fetch answered in its turn, or drops it.
func (s *FetchServer) admit(provider string, answer func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return
	}
	lane := s.lanes[provider]
	if lane == nil {
		lane = &fetchLane{}
		s.lanes[provider] = lane
	}
	switch {
	case lane.running < fetchesOfOne:
		lane.running++
		s.running.Go(func() {
			for answer != nil {
				s.take(answer)
				answer = s.next(provider, lane)
			}
		})
	case len(lane.waiting) < fetchesWaiting:
		lane.waiting = append(lane.waiting, answer)
	default:
		s.dropped.Add(1)
		if !lane.full {
			s.log.Warn("fetches dropped: too many fetches of the provider are waiting", "provider", provider, "waiting", len(lane.waiting))
		}
		lane.full = true
	}
}

// take answers a fetch when there is a slot.
func (s *FetchServer) take(answer func()) {
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
		answer()
	case <-s.halt:
	}
}

// next returns the fetch of a lane whose turn it is; nil when none is.
func (s *FetchServer) next(provider string, lane *fetchLane) func() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped || len(lane.waiting) == 0 {
		lane.running--
		if lane.running == 0 {
			delete(s.lanes, provider)
		}

		return nil
	}
	answer := lane.waiting[0]
	lane.waiting = lane.waiting[1:]
	lane.full = lane.full && len(lane.waiting) > fetchesWaiting/2

	return answer
}
