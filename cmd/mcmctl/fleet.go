package main

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// silentAfter is when the contract takes a replica for dead [SESSION-1].
	silentAfter = 3 * bus.SessionInterval
	// forgetAfter is how long a watcher still sees a replica that went without a
	// word.
	forgetAfter = 10 * time.Second
)

// A replica is one that was heard of. One that serves several control planes is
// heard of in each.
type replica struct {
	session *driverv1.Session
	at      time.Time
}

// silent tells that the replica must be taken for dead.
func (r replica) silent(now time.Time) bool { return now.Sub(r.at) > silentAfter }

// fleet collects sessions. It is safe for concurrent use.
type fleet struct {
	mu    sync.Mutex
	heard map[[3]string]replica // by cluster, provider, replica
}

func newFleet() *fleet { return &fleet{heard: map[[3]string]replica{}} }

func (f *fleet) onSession(s *driverv1.Session) {
	key := [3]string{s.GetCluster(), s.GetProvider(), s.GetReplica()}
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.GetStopped() {
		delete(f.heard, key)

		return
	}
	f.heard[key] = replica{session: s, at: time.Now()}
}

// list returns who was heard of in the last ten seconds, in a stable order.
func (f *fleet) list(now time.Time) []replica {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []replica
	for key, r := range f.heard {
		if now.Sub(r.at) > forgetAfter {
			delete(f.heard, key)

			continue
		}
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b replica) int {
		return cmp.Or(
			cmp.Compare(a.session.GetCluster(), b.session.GetCluster()),
			cmp.Compare(a.session.GetProvider(), b.session.GetProvider()),
			cmp.Compare(a.session.GetReplica(), b.session.GetReplica()),
		)
	})

	return all
}
