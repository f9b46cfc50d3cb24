package caller

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/fencing"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	modelReplicas = 3
	modelMachines = 4
	// chaos is how long things go wrong, healing how long everything may take to
	// end afterwards, both by the model's clock.
	chaos   = 15 * time.Second
	healing = 5 * time.Minute
	// operationTime is the timeout of each attempt.
	operationTime = 8 * time.Second
)

// A schedule is what goes wrong in one run.
type schedule struct {
	Seed     uint64
	Identity driverv1.CreateIdentity // of the drivers' creates
	Weather  weather
	Faults   []fault
}

// A fault begins At some time and lasts For some.
type fault struct {
	At, For time.Duration
	What    string
	Replica int // of those that have one
}

func (s schedule) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d, %s, weather %+v", s.Seed, s.Identity, s.Weather)
	for _, f := range s.Faults {
		fmt.Fprintf(&b, "\n  at %-6s for %-6s %s %d", f.At, f.For, f.What, f.Replica)
	}

	return b.String()
}

// faults are what can go wrong, by name. Each returns how it is mended.
var faults = map[string]func(m *model, f fault) (mend func()){
	"replica freezes":         func(m *model, f fault) func() { p := m.replica(f).port; p.freeze(); return p.thaw },
	"replica is cut off":      func(m *model, f fault) func() { return m.cut(m.replica(f).port, true, true) },
	"replica is not heard":    func(m *model, f fault) func() { return m.cut(m.replica(f).port, false, true) },
	"replica does not hear":   func(m *model, f fault) func() { return m.cut(m.replica(f).port, true, false) },
	"replica is disconnected": func(m *model, f fault) func() { p := m.replica(f).port; p.disconnect(); return p.reconnect },
	"replica and mcm are apart, NATS is not": func(m *model, f fault) func() {
		p := m.replica(f).port
		m.network.mu.Lock()
		defer m.network.mu.Unlock()
		m.network.apart[p] = true

		return func() {
			m.network.mu.Lock()
			defer m.network.mu.Unlock()
			delete(m.network.apart, p)
		}
	},
	"replica's clock is ahead": func(m *model, f fault) func() {
		p := m.replica(f).port
		set := func(ahead time.Duration) {
			m.network.mu.Lock()
			defer m.network.mu.Unlock()
			p.ahead = ahead
		}
		set(bus.AcceptBy + time.Second)

		return func() { set(0) }
	},
	"replica crashes":     func(m *model, f fault) func() { return m.replace(f, true) },
	"replica is replaced": func(m *model, f fault) func() { return m.replace(f, false) },
	"plain driver takes over": func(m *model, _ fault) func() {
		for i := range m.replicas {
			m.replicas[i].port.crash()
			m.replicas[i].stop()
		}

		return func() {
			for i, r := range m.replicas {
				if r.port.crashed() {
					m.startReplica(i)
				}
			}
		}
	},
	"plain driver freezes":            func(m *model, _ fault) func() { p := m.plain.port; p.freeze(); return p.thaw },
	"plain driver is cut off":         func(m *model, _ fault) func() { return m.cut(m.plain.port, true, true) },
	"mcm freezes":                     func(m *model, _ fault) func() { p := m.manager.port; p.freeze(); return p.thaw },
	"mcm is cut off":                  func(m *model, _ fault) func() { return m.cut(m.manager.port, true, true) },
	"mcm does not hear":               func(m *model, _ fault) func() { return m.cut(m.manager.port, true, false) },
	"mcm is not heard":                func(m *model, _ fault) func() { return m.cut(m.manager.port, false, true) },
	"mcm is disconnected":             func(m *model, _ fault) func() { p := m.manager.port; p.disconnect(); return p.reconnect },
	"mcm crashes":                     func(m *model, _ fault) func() { return m.failover(true) },
	"mcm freezes, another one leads":  func(m *model, _ fault) func() { return m.failover(false) },
	"NATS restarts":                   func(m *model, _ fault) func() { return m.restart(false) },
	"NATS restarts without its store": func(m *model, _ fault) func() { return m.restart(true) },
	"the operations stream is lost": func(m *model, _ fault) func() {
		m.network.mu.Lock()
		defer m.network.mu.Unlock()
		clear(m.network.server.byName)

		return func() {}
	},
	"NATS restarts with an older store": func(m *model, _ fault) func() {
		m.network.mu.Lock()
		old := map[string]simStore{}
		for name, store := range m.network.server.byName {
			copied := *store
			copied.records = maps.Clone(store.records)
			old[name] = copied
		}
		m.network.mu.Unlock()

		return func() { // the store is put back to what it was when the fault began
			up := m.restart(false)
			m.network.mu.Lock()
			for name, store := range old {
				m.network.server.byName[name] = &store
			}
			m.network.mu.Unlock()
			up()
		}
	},
	"JetStream does not answer": func(m *model, _ fault) func() {
		set := func(away bool) {
			m.network.mu.Lock()
			defer m.network.mu.Unlock()
			m.network.server.away = away
		}
		set(true)

		return func() { set(false) }
	},
}

// modelIdentities are those that schedules have in turn.
var modelIdentities = []driverv1.CreateIdentity{
	driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN,
	driverv1.CreateIdentity_CREATE_IDENTITY_UNIQUE_NAME,
	driverv1.CreateIdentity_CREATE_IDENTITY_NONE,
}

// scheduleOf makes a schedule of a seed.
func scheduleOf(seed uint64, only *regexp.Regexp) schedule {
	rng := rand.New(rand.NewPCG(seed, 3))
	span := func(from, to time.Duration) time.Duration {
		return (from + time.Duration(rng.Int64N(int64(to-from)))).Truncate(time.Millisecond)
	}
	s := schedule{Seed: seed, Identity: modelIdentities[seed%uint64(len(modelIdentities))]}
	if rng.IntN(3) > 0 { // else every frame arrives, in order
		s.Weather = weather{Loss: rng.IntN(40), Twice: rng.IntN(60), Late: rng.IntN(30), Overtake: rng.IntN(100)}
	}
	names := slices.DeleteFunc(slices.Sorted(maps.Keys(faults)), func(name string) bool { return !only.MatchString(name) })
	for range 1 + rng.IntN(7) {
		f := fault{What: names[rng.IntN(len(names))], Replica: rng.IntN(modelReplicas), At: span(0, chaos), For: span(time.Millisecond, 3*time.Second)}
		if rng.IntN(2) == 0 {
			f.For = span(time.Second, 8*time.Second)
		}
		if before := len(s.Faults) - 1; before >= 0 && rng.IntN(2) == 0 { // trouble seldom comes alone
			f.Replica = s.Faults[before].Replica
			f.At = s.Faults[before].At + span(0, 2*time.Second)
		}
		s.Faults = append(s.Faults, f)
	}
	if slices.ContainsFunc(s.Faults, func(f fault) bool { return strings.HasPrefix(f.What, "plain") }) {
		s.Faults = slices.DeleteFunc(s.Faults, func(f fault) bool { return slices.Contains(markLosses, f.What) })
	}

	return s
}

// markLosses are the faults by which the claim of a plain driver is forgotten.
// A full replica that comes at such a time is taken for proof that none is.
var markLosses = []string{"the operations stream is lost", "NATS restarts without its store", "NATS restarts with an older store"}

// shrink returns the smallest schedule it can find that is still bad.
func shrink(s schedule, bad func(schedule) bool) schedule {
	for range 3 {
		for i := 0; i < len(s.Faults); i++ {
			less := s
			less.Faults = slices.Delete(slices.Clone(s.Faults), i, i+1)
			if bad(less) {
				s, i = less, i-1
			}
		}
		for _, drop := range []func(*weather) *int{
			func(w *weather) *int { return &w.Loss }, func(w *weather) *int { return &w.Twice },
			func(w *weather) *int { return &w.Late }, func(w *weather) *int { return &w.Overtake },
		} {
			less := s
			*drop(&less.Weather) = 0
			if less.Weather != s.Weather && bad(less) {
				s = less
			}
		}
	}

	return s
}

// A model is one run of real managers and replicas on a bad bus.
type model struct {
	ctx      context.Context
	log      *slog.Logger
	network  *network
	cloud    *modelCloud
	journal  *journal
	machines int
	fence    fencing.Mode
	identity driverv1.CreateIdentity
	settle   time.Duration // of the cloud's lists

	// Of the goroutine that runs the schedule.
	manager  *modelManager
	managers []*modelManager
	replicas []*modelReplica
	all      []*modelReplica
	epoch    uint64
	plain    *modelPlain
}

func (m *model) replica(f fault) *modelReplica { return m.replicas[f.Replica] }

func (m *model) cut(p *port, in, out bool) func() {
	set := func(yes bool) {
		m.network.mu.Lock()
		defer m.network.mu.Unlock()
		p.cutIn, p.cutOut = in && yes, out && yes
	}
	set(true)

	return func() { set(false) }
}

// replace ends a replica, at once or with good manners, and starts another.
func (m *model) replace(f fault, crash bool) func() {
	old := m.replica(f)
	if crash {
		old.port.crash()
	}
	old.stop()

	return func() {
		if m.replicas[f.Replica] == old {
			m.startReplica(f.Replica)
		}
	}
}

func (m *model) startReplica(i int) {
	r := m.newReplica(fmt.Sprintf("r%d-%d", i, len(m.all)))
	m.replicas[i] = r
	m.all = append(m.all, r)
}

// failover has another manager lead.
func (m *model) failover(crash bool) func() {
	old := m.manager
	if crash {
		old.port.crash()
		old.stop()
		m.lead()

		return func() {}
	}
	old.port.freeze()
	m.lead()

	return func() {
		old.port.thaw()
		// It sees that its lease is over, but not before it has sent something.
		time.AfterFunc(time.Second, old.stop)
	}
}

func (m *model) lead() {
	m.epoch++
	m.manager = m.newManager(m.epoch)
	m.managers = append(m.managers, m.manager)
}

func (m *model) restart(lose bool) func() {
	m.network.mu.Lock()
	ports := append([]*port{}, m.network.ports...)
	if lose {
		m.network.server.byName = map[string]*simStore{}
	}
	m.network.mu.Unlock()
	for _, p := range ports {
		p.disconnect()
	}

	return func() {
		for _, p := range ports {
			p.reconnect()
		}
	}
}

// play runs a schedule and returns what was wrong with it.
func (m *model) play(s schedule) {
	start := time.Now()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	m.ctx = ctx
	m.machines = modelMachines
	m.identity = s.Identity
	m.network, m.cloud = newNetwork(s.Seed), newModelCloud(s.Seed, s.Identity)
	m.network.server.onPut = m.cloud.onPut
	m.journal = &journal{}
	for i := range m.machines {
		m.journal.machines = append(m.journal.machines, &machineJournal{uid: fmt.Sprintf("uid-%d", i)})
	}
	var net sync.WaitGroup
	netCtx, stopNet := context.WithCancel(context.Background())
	net.Go(func() { m.network.run(netCtx) })
	for i := range modelReplicas {
		m.replicas = append(m.replicas, nil)
		m.startReplica(i)
	}
	m.plain = m.newPlain()
	m.lead()
	m.setWeather(s.Weather)
	m.provoke(s.Faults, start)
	m.setWeather(weather{})
	m.journal.mu.Lock()
	m.journal.last = true
	m.journal.mu.Unlock()
	for limit := time.Now().Add(healing); !m.journal.done(); {
		if time.Now().After(limit) {
			m.cloud.mu.Lock()
			m.cloud.violatef("not everything ended within %s", healing)
			m.cloud.mu.Unlock()

			break
		}
		m.pass(time.Second)
	}
	m.pass(operationTime) // what is at the cloud comes to an end
	if m.journal.done() {
		m.cloud.left()
	}
	for _, mgr := range m.managers {
		mgr.port.thaw()
		mgr.close()
	}
	for _, r := range m.all {
		r.port.thaw()
		r.stop()
	}
	m.plain.port.thaw()
	cancel()
	m.plain.close()
	for _, r := range m.all {
		<-r.ended
	}
	stopNet()
	net.Wait()
}

// pass lets the model's time pass.
func (m *model) pass(d time.Duration) { _ = sleep(m.ctx, d) } // ended by play alone

func (m *model) setWeather(w weather) {
	m.network.mu.Lock()
	defer m.network.mu.Unlock()
	m.network.weather = w
}

// provoke has the faults happen, and sees to it that all of them are mended.
func (m *model) provoke(list []fault, start time.Time) {
	type change struct {
		at time.Duration
		f  func()
	}
	var changes []change
	for _, f := range list {
		var mend func()
		changes = append(changes,
			change{f.At, func() { m.log.Info("FAULT "+f.What, "replica", f.Replica, "for", f.For); mend = faults[f.What](m, f) }},
			change{f.At + f.For, func() { m.log.Info("MENDED "+f.What, "replica", f.Replica); mend() }},
		)
	}
	slices.SortStableFunc(changes, func(a, b change) int { return int(a.at - b.at) })
	for _, c := range changes {
		m.pass(time.Until(start.Add(c.at)))
		c.f()
	}
	m.pass(time.Until(start.Add(chaos)))
}

// playOut runs a schedule in a bubble of its own.
func playOut(t *testing.T, s schedule, unfenced bool) (o outcome) {
	t.Helper()
	log := &strings.Builder{}
	synctest.Test(t, func(*testing.T) {
		m := &model{log: modelLog(log)}
		if unfenced {
			m.fence = fencing.Disobeyed
		}
		m.play(s)
		o = outcome{violations: m.cloud.violations, begun: m.cloud.begun}
	})
	o.log = log.String()

	return o
}

// An outcome is what came of a run.
type outcome struct {
	violations []string
	begun      int
	log        string
}

var (
	modelRuns   = flag.Int("model.runs", 150, "how many schedules the model of the protocol is run with")
	modelFaults = flag.String("model.faults", "", "regular expression of the faults that may happen; empty for all")
	modelSeed   = flag.Uint64("model.seed", 1, "seed of the first of them; 0 for one at random")
)

func TestModel(t *testing.T) {
	first, only := *modelSeed, regexp.MustCompile(*modelFaults)
	if first == 0 {
		first = rand.Uint64N(1 << 40)
	}
	for seed := first; seed < first+uint64(*modelRuns); seed++ {
		s := scheduleOf(seed, only)
		run := playOut(t, s, false)
		if len(run.violations) == 0 && run.begun > 0 {
			continue
		}
		s = shrink(s, func(s schedule) bool {
			again := playOut(t, s, false)
			if len(again.violations) > 0 {
				run = again
			}

			return len(again.violations) > 0
		})
		t.Fatalf("%d mutations, and this is wrong:\n%s\n%s\nrepeat with -run TestModel -model.seed=%d -model.runs=1; what happened:\n%s",
			run.begun, strings.Join(run.violations, "\n"), s, seed, run.log)
	}
}

// The model would see it if replicas were not fenced: calls that begin after a
// later attempt has, or after their outcome was stored.
func TestModelFindsWhatFencingPrevents(t *testing.T) {
	const within = 300 // about one schedule in twenty shows it
	for seed := range uint64(within) {
		run := playOut(t, scheduleOf(seed+1, regexp.MustCompile("freezes|cut off|crashes")), true)
		for _, v := range run.violations {
			if strings.Contains(v, "after") {
				return
			}
		}
	}
	t.Errorf("without fencing nothing went wrong in %d schedules: the model is blind", within)
}
