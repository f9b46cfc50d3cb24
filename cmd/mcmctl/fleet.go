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
	// silentAfter is when the contract takes a replica for dead [SESSION-1].
	silentAfter = 3 * bus.SessionInterval
	// forgetAfter is how long a watcher still sees a replica that went without a
	// word.
	forgetAfter = 10 * time.Second
	// forgetOutcomes is how many outcomes a watcher collects at most.
	forgetOutcomes = 5000
	// forgetQueue is how long what a manager said of its queue counts: it is asked
	// more often.
	forgetQueue = 2500 * time.Millisecond
)

// A knownReplica is one that was heard of. One that serves several control planes is
// heard of in each.
type knownReplica struct {
	session *driverv1.Session
	at      time.Time
	plain   bool // it gives no sign of life, and only discovery knows of it
	figures bus.Figures
	counted bool // figures are known
}

// silent tells that the replica must be taken for dead.
func (r knownReplica) silent(now time.Time) bool { return !r.plain && now.Sub(r.at) > silentAfter }

// fleet collects sessions, and what replicas answer to discovery. It is safe for
// concurrent use.
type fleet struct {
	cluster string // the only one of interest; * for all

	mu       sync.Mutex
	heard    map[[3]string]knownReplica // by cluster, provider, replica
	services map[[2]string]service      // by provider, replica
	outcomes map[string]*driverv1.Audit // by operation id
	queues   map[string]queue           // by cluster
	led      map[string]struct{}        // clusters whose leading manager was heard of
}

// A queue is what a manager says that waits.
type queue struct {
	*driverv1.OpsResponse

	at time.Time
}

// A picture is what a fleet looks like at a moment.
type picture struct {
	replicas []knownReplica
	outcomes []*driverv1.Audit // the newest operations that ended, oldest first
	queues   map[string]queue  // what no driver has, by cluster
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

// onWaiting takes what a manager says that waits. One that has nothing, as all but
// the leader, says nothing.
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

// known returns the control planes that are of interest: those that were heard of,
// and the one that mcm is without a name of its own, which says a word every five
// seconds only.
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

// picture returns what is known at a moment.
func (f *fleet) picture(now time.Time) picture {
	p := picture{replicas: f.list(now)}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.outcomes) > forgetOutcomes { // those that mcm remembers come again
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

// list returns who was heard of in the last ten seconds, in a stable order.
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
	all = append(all, f.plain(now)...)
	slices.SortFunc(all, func(a, b knownReplica) int {
		return cmp.Or(
			cmp.Compare(a.session.GetCluster(), b.session.GetCluster()),
			cmp.Compare(a.session.GetProvider(), b.session.GetProvider()),
			cmp.Compare(a.session.GetReplica(), b.session.GetReplica()),
		)
	})

	return all
}

// plain returns the drivers that answer discovery and give no sign of life: one
// row for each control plane, as for others. f.mu is held.
func (f *fleet) plain(now time.Time) []knownReplica {
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
