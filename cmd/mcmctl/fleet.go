package main

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// silentAfter is when the contract considers a replica dead [SESSION-1].
	silentAfter = 3 * bus.SessionInterval
	// forgetAfter is how long a silent replica stays listed.
	forgetAfter = 10 * time.Second
	// maxOutcomes is how many outcomes a watcher collects at most.
	maxOutcomes = 5000
	// forgetQueue is how long mcm's answer about its queue counts. mcm is asked
	// more often.
	forgetQueue = 2500 * time.Millisecond
)

// A knownReplica is a replica that was heard, once for each control plane it serves.
type knownReplica struct {
	session *driverv1.Session
	at      time.Time
	plain   bool // sends no heartbeats; known from service discovery only
	figures bus.Figures
	counted bool // figures are known
}

// silent reports whether the replica must be considered dead.
func (r knownReplica) silent(now time.Time) bool { return !r.plain && now.Sub(r.at) > silentAfter }

// fleet collects sessions and the answers to service discovery. It is safe for
// concurrent use.
type fleet struct {
	cluster string // the only one of interest; * for all

	mu       sync.Mutex
	heard    map[[3]string]knownReplica // by cluster, provider, replica
	services map[[2]string]service      // by provider, replica
	outcomes map[string]*driverv1.Audit // by operation id
	queues   map[string]queue           // by cluster
	led      map[string]struct{}        // clusters whose leading mcm was heard
}

// A queue holds the operations that wait at an mcm.
type queue struct {
	*driverv1.OpsResponse

	at time.Time
}

// A picture is a snapshot of a fleet.
type picture struct {
	replicas []knownReplica
	outcomes []*driverv1.Audit // the newest operations that ended, oldest first
	queues   map[string]queue  // operations that wait at mcm, by cluster
}

// A service is a replica's answer to discovery.
type service struct {
	bus.Service

	at time.Time
}

func newFleet(cluster string) *fleet {
	return &fleet{
		cluster: cluster, heard: map[[3]string]knownReplica{}, services: map[[2]string]service{},
		outcomes: map[string]*driverv1.Audit{}, queues: map[string]queue{}, led: map[string]struct{}{},
	}
}

func (f *fleet) onOutcome(a *driverv1.Audit) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.outcomes[a.GetCluster()+"/"+a.GetOperationId()] = a
}

// onWaiting stores the operations that wait at an mcm. An mcm without any, such as
// one that does not lead, does not answer.
func (f *fleet) onWaiting(cluster string, w *driverv1.OpsResponse) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queues[cluster] = queue{w, time.Now()}
}

func (f *fleet) onHello(h *driverv1.Hello) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.led[h.GetCluster()] = struct{}{}
}

// known returns the control planes to ask: the one of --cluster, or those that were
// heard and the default one, which announces itself only every five seconds.
func (f *fleet) known() []string {
	if f.cluster != anyCluster {
		return []string{f.cluster}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	clusters := slices.AppendSeq([]string{defaultCluster}, maps.Keys(f.led))
	for key := range f.heard {
		clusters = append(clusters, key[0])
	}
	slices.Sort(clusters)

	return slices.Compact(clusters)
}

// picture returns what is known at a time.
func (f *fleet) picture(now time.Time) picture {
	p := picture{replicas: f.list(now)}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.outcomes) > maxOutcomes { // mcm sends those it remembers again
		clear(f.outcomes)
	}
	maps.DeleteFunc(f.queues, func(_ string, q queue) bool { return now.Sub(q.at) > forgetQueue })
	p.queues = maps.Clone(f.queues)
	p.outcomes = slices.SortedFunc(maps.Values(f.outcomes), func(a, b *driverv1.Audit) int { return endOf(a).Compare(endOf(b)) })

	return p
}

// endOf is when an operation ended, by mcm's clock.
func endOf(a *driverv1.Audit) time.Time {
	return a.GetStartedAt().AsTime().Add(a.GetWaited().AsDuration() + a.GetTook().AsDuration())
}

func (f *fleet) onService(s bus.Service) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.services[[2]string{s.Provider, s.Replica}] = service{s, time.Now()}
}

func (f *fleet) onSession(s *driverv1.Session) {
	key := [3]string{s.GetCluster(), s.GetProvider(), s.GetReplica()}
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.GetStopped() {
		delete(f.heard, key)

		return
	}
	f.heard[key] = knownReplica{session: s, at: time.Now()}
}

// list returns the replicas heard in the last ten seconds, sorted.
func (f *fleet) list(now time.Time) []knownReplica {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []knownReplica
	for key, r := range f.heard {
		if now.Sub(r.at) > forgetAfter {
			delete(f.heard, key)

			continue
		}
		if s, ok := f.services[[2]string{key[1], key[2]}]; ok {
			r.figures, r.counted = s.Figures[key[0]], true
		}
		all = append(all, r)
	}
	all = append(all, f.plainLocked(now)...)
	slices.SortFunc(all, func(a, b knownReplica) int {
		return cmp.Or(
			cmp.Compare(a.session.GetCluster(), b.session.GetCluster()),
			cmp.Compare(a.session.GetProvider(), b.session.GetProvider()),
			cmp.Compare(a.session.GetReplica(), b.session.GetReplica()),
		)
	})

	return all
}

// plainLocked returns the drivers that answer service discovery and send no
// heartbeats, once for each control plane. f.mu is held.
func (f *fleet) plainLocked(now time.Time) []knownReplica {
	sessions := map[[2]string]bool{}
	for key := range f.heard {
		sessions[[2]string{key[1], key[2]}] = true
	}
	var all []knownReplica
	for key, s := range f.services {
		if now.Sub(s.at) > forgetAfter {
			delete(f.services, key)

			continue
		}
		for cluster, figures := range s.Figures {
			if sessions[key] || f.cluster != anyCluster && cluster != f.cluster {
				continue
			}
			all = append(all, knownReplica{
				at: s.at, plain: true, figures: figures, counted: true,
				session: &driverv1.Session{
					Cluster: cluster, Provider: s.Provider, Replica: s.Replica, Version: s.Version, Hostname: s.Hostname,
					StartedAt: timestamppb.New(s.Started),
				},
			})
		}
	}

	return all
}
