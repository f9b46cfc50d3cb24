package replica

import (
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// managers holds what a replica knows of the leading managers, by cluster. It is safe for
// concurrent use.
type managers struct {
	protocols bus.Protocols // that this replica speaks
	log       *slog.Logger

	mu       sync.Mutex
	epochs   map[string]uint64 // highest epoch seen
	leaders  map[string]string // last hello's sender
	refusals map[string]error  // why no work of a cluster is taken: the protocol version
}

func newManagers(log *slog.Logger) *managers {
	return &managers{protocols: bus.Spoken, log: log, epochs: map[string]uint64{}, leaders: map[string]string{}, refusals: map[string]error{}}
}

// noteHello handles a hello and reports whether a new manager leads.
func (m *managers) noteHello(cluster string, hello *driverv1.Hello) (news bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	news = m.leaders[cluster] != hello.GetMcm()
	m.leaders[cluster] = hello.GetMcm()
	if hello.GetEpoch() >= m.epochs[cluster] { // otherwise the sender no longer leads
		m.checkProtocolLocked(cluster, hello)
	}
	m.epochs[cluster] = max(m.epochs[cluster], hello.GetEpoch())

	return news
}

// checkProtocolLocked notes whether a leading manager shares a protocol version with this
// replica.
func (m *managers) checkProtocolLocked(cluster string, hello *driverv1.Hello) {
	before, now := m.refusals[cluster], m.protocols.RefusesHello(hello)
	switch {
	case now == nil && before != nil:
		delete(m.refusals, cluster)
		m.log.Info("taking work again: the leading manager speaks a supported protocol version", "cluster", cluster, "mcm", hello.GetMcm())
	case now != nil:
		m.refusals[cluster] = now
		if before == nil || before.Error() != now.Error() {
			m.log.Error("taking no work", "cluster", cluster, "err", now)
		}
	}
}

// mayLead reports whether the sender of an epoch may lead: no epoch seen is higher. It
// returns the highest.
func (m *managers) mayLead(cluster string, epoch uint64) (highest uint64, leads bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if highest = m.epochs[cluster]; epoch < highest {
		return highest, false
	}
	m.epochs[cluster] = epoch

	return epoch, true
}

// epoch returns the highest epoch seen.
func (m *managers) epoch(cluster string) uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()

	return m.epochs[cluster]
}

// refuses reports whether a cluster's managers share no protocol version.
func (m *managers) refuses(cluster string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()

	return m.refusals[cluster] != nil
}

// refusal returns why the replica takes no work of some managers; nil if it takes all.
func (m *managers) refusal() error {
	m.mu.Lock()
	defer m.mu.Unlock()

	return errors.Join(slices.Collect(maps.Values(m.refusals))...)
}
