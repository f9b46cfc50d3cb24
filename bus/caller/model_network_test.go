package caller

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
)

// This file is NATS as the protocol sees it, under a fake clock: subjects, queue
// groups, "no responders", connections. It is worse than NATS where the protocol
// must not care: frames come late, twice, or in another order.

// A network carries messages between ports. Its clock is the bubble's.
type network struct {
	mu  sync.Mutex
	rng *rand.Rand
	weather
	ports  []*port
	subs   []*simSub
	server *simStreams // JetStream
	queue  events
	count  uint64
	wake   chan struct{}
	apart  map[*port]bool // their messages and those of ports that lead do not reach each other
}

// A weather is what happens to single frames, in cases per thousand.
type weather struct{ Loss, Twice, Late, Overtake int }

type event struct {
	at    time.Time
	order uint64
	f     func()
}

type events []event

func (e *events) Len() int { return len(*e) }
func (e *events) Less(i, j int) bool {
	a, b := (*e)[i], (*e)[j]

	return a.at.Before(b.at) || a.at.Equal(b.at) && a.order < b.order
}
func (e *events) Swap(i, j int) { (*e)[i], (*e)[j] = (*e)[j], (*e)[i] }
func (e *events) Push(x any)    { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]

	return last
}

func newNetwork(seed uint64) *network {
	return &network{
		rng: rand.New(rand.NewPCG(seed, 1)), server: newSimStreams(),
		wake: make(chan struct{}, 1), apart: map[*port]bool{},
	}
}

// run makes events happen, one by one, until ctx ends.
func (n *network) run(ctx context.Context) {
	for {
		n.mu.Lock()
		wait := time.Hour
		if len(n.queue) > 0 {
			wait = time.Until(n.queue[0].at)
		}
		if wait <= 0 {
			f := heap.Pop(&n.queue).(event).f
			f()
			n.mu.Unlock()

			continue
		}
		n.mu.Unlock()
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-n.wake:
		case <-ctx.Done():
			timer.Stop()

			return
		}
		timer.Stop()
	}
}

// after has f called, with n.mu held. n.mu is held.
func (n *network) after(at time.Time, f func()) {
	n.count++
	heap.Push(&n.queue, event{at: at, order: n.count, f: f})
	signal(n.wake)
}

// first is where the sequences of a new stream begin: they may well be lower than
// those of the one before.
func (n *network) first() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()

	return 1 + n.rng.Uint64N(1<<52)
}

// orderOf tells records of the operations stream apart by their age.
func (n *network) orderOf(sequence uint64) uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()

	return n.server.order[sequence]
}

// begunAt is when a record was stored that a call begins; zero for one that says nothing
// of that.
func (n *network) begunAt(order uint64) time.Time {
	n.mu.Lock()
	defer n.mu.Unlock()

	return n.server.begun[order]
}

// records is how many the operations stream has ever had.
func (n *network) records() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()

	return uint64(len(n.server.order))
}

func (n *network) chance(perMille int) bool { return n.rng.IntN(1000) < perMille }

// travel has f called once for each copy of a frame that arrives, behind those
// that left before it unless the weather is bad. n.mu is held.
func (n *network) travel(behind *time.Time, f func()) {
	copies := 1
	if n.chance(n.Loss) {
		copies = 0
	}
	if n.chance(n.Twice) {
		copies++
	}
	for range copies {
		at := time.Now().Add(100*time.Microsecond + time.Duration(n.rng.Int64N(int64(2*time.Millisecond))))
		switch {
		case n.chance(n.Late):
			at = at.Add(time.Duration(n.rng.Int64N(int64(4 * time.Second))))
		case n.chance(n.Overtake):
			at = at.Add(time.Duration(n.rng.Int64N(int64(20 * time.Millisecond))))
		default:
			if at.Before(*behind) {
				at = behind.Add(1)
			}
			*behind = at
		}
		n.after(at, f)
	}
}

// A port is one process's connection.
type port struct {
	n     *network
	name  string
	leads bool // of a manager

	// Guarded by n.mu.
	up            bool
	cutIn, cutOut bool // frames vanish unnoticed
	frozen        chan struct{}
	dead          chan struct{} // closed by a crash
	onUp          []func()
	sent          time.Time // the last frame arrives at the server
	inboxes       int
	ahead         time.Duration // its wall clock
	most          int64         // bytes of a message; 0 means a MiB
}

func (n *network) port(name string, leads bool) *port {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := &port{n: n, name: name, leads: leads, up: true, dead: make(chan struct{})}
	n.ports = append(n.ports, p)

	return p
}

var (
	errSimDown = errors.New("not connected")
	errCrashed = errors.New("crashed")
)

// pass blocks while the process is frozen.
func (p *port) pass() error {
	for {
		p.n.mu.Lock()
		frozen := p.frozen
		p.n.mu.Unlock()
		select {
		case <-p.dead:
			return errCrashed
		default:
		}
		if frozen == nil {
			return nil
		}
		select {
		case <-frozen:
		case <-p.dead:
		}
	}
}

// nap sleeps as a driver does that waits for its cloud: a crash ends it, and a
// freeze lasts.
func (p *port) nap(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	case <-p.dead:
	}
	if err := p.pass(); err != nil {
		return err
	}

	return ctx.Err()
}

func (p *port) freeze() {
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	if p.frozen == nil {
		p.frozen = make(chan struct{})
	}
}

func (p *port) thaw() {
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	if p.frozen != nil {
		close(p.frozen)
		p.frozen = nil
	}
}

func (p *port) crash() {
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	if !p.crashed() {
		close(p.dead)
	}
	p.up = false
}

func (p *port) crashed() bool {
	select {
	case <-p.dead:
		return true
	default:
		return false
	}
}

// disconnect is an outage that both sides know of. What is on its way is lost.
func (p *port) disconnect() {
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	p.up = false
}

func (p *port) reconnect() {
	p.n.mu.Lock()
	if p.up || p.crashed() {
		p.n.mu.Unlock()

		return
	}
	p.up = true
	hooks := append([]func(){}, p.onUp...)
	p.n.mu.Unlock()
	go func() {
		if p.pass() != nil {
			return
		}
		for _, f := range hooks {
			f()
		}
	}()
}

func (p *port) Up() bool {
	p.n.mu.Lock()
	defer p.n.mu.Unlock()

	return p.up
}

// ServerID is the same at all times: the model's never ends.
func (p *port) ServerID() string { return "server" }

func (p *port) OnUp(f func()) {
	p.n.mu.Lock()
	p.onUp = append(p.onUp, f)
	p.n.mu.Unlock()
	if p.Up() {
		f()
	}
}

func (p *port) Inbox() string {
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	p.inboxes++

	return "_INBOX." + p.name + "." + strconv.Itoa(p.inboxes)
}

func (p *port) MaxPayload() int64 {
	p.n.mu.Lock()
	defer p.n.mu.Unlock()

	return cmp.Or(p.most, 1<<20)
}

func (p *port) Publish(m *nats.Msg) error {
	if err := p.pass(); err != nil {
		return err
	}
	if most := p.MaxPayload(); int64(m.Size()) > most {
		return fmt.Errorf("%w: the server takes %d", bus.ErrTooLarge, most)
	}
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	if !p.up {
		return errSimDown
	}
	if p.cutOut {
		return nil
	}
	sent := &nats.Msg{Subject: m.Subject, Reply: m.Reply, Data: m.Data, Header: m.Header}
	p.n.travel(&p.sent, func() { p.n.arrive(p, sent) })

	return nil
}

// arrive is a message at the server. n.mu is held.
func (n *network) arrive(from *port, m *nats.Msg) {
	if !from.up && !from.crashed() {
		return // lost with its connection
	}
	taken := false
	groups := map[string][]*simSub{}
	for _, sub := range n.subs {
		switch {
		case !sub.port.up || !subjectMatches(sub.subject, m.Subject):
		case sub.queue != "":
			groups[sub.queue] = append(groups[sub.queue], sub)
			taken = true
		default:
			taken = true
			n.deliver(from, sub, m)
		}
	}
	for _, group := range groups {
		n.deliver(from, group[n.rng.IntN(len(group))], m)
	}
	answer, stored := n.server.take(m)
	if answer != nil && m.Reply != "" {
		n.arrive(from, answer)
	}
	if !taken && !stored && m.Reply != "" {
		n.arrive(from, &nats.Msg{Subject: m.Reply, Header: nats.Header{bus.HeaderStatus: {"503"}}})
	}
}

// deliver is a message on its way to a subscriber. n.mu is held.
func (n *network) deliver(from *port, sub *simSub, m *nats.Msg) {
	parted := from.leads != sub.port.leads && (n.apart[from] || n.apart[sub.port])
	if sub.port.cutIn || parted {
		return
	}
	n.travel(&sub.came, func() {
		if sub.port.up && !sub.closed {
			sub.backlog = append(sub.backlog, m)
			signal(sub.news)
		}
	})
}

// A simSub calls its handler for one message after the other.
type simSub struct {
	port           *port
	subject, queue string
	f              nats.MsgHandler
	news           chan struct{}
	done           chan struct{}

	// Guarded by the network's mu.
	backlog []*nats.Msg
	came    time.Time
	closed  bool
}

func (p *port) Subscribe(subject, queue string, f nats.MsgHandler) (bus.Subscription, error) {
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	s := &simSub{port: p, subject: subject, queue: queue, f: f, news: make(chan struct{}, 1), done: make(chan struct{})}
	p.n.subs = append(p.n.subs, s)
	go s.run()

	return s, nil
}

func (s *simSub) run() {
	for {
		select {
		case <-s.news:
		case <-s.done:
			return
		}
		for m := s.next(); m != nil; m = s.next() {
			s.f(m)
		}
	}
}

func (s *simSub) next() *nats.Msg {
	if s.port.pass() != nil {
		return nil
	}
	s.port.n.mu.Lock()
	defer s.port.n.mu.Unlock()
	if len(s.backlog) == 0 || s.closed {
		return nil
	}
	m := s.backlog[0]
	s.backlog = s.backlog[1:]
	// A header is the receiver's own.
	return &nats.Msg{Subject: m.Subject, Reply: m.Reply, Data: asSeenFrom(s.port.ahead, m.Data), Header: m.Header}
}

// asSeenFrom is what a message says to a process whose clock is ahead: of all that is
// compared with the wall clock, accept_by alone is another one's.
func asSeenFrom(ahead time.Duration, data []byte) []byte {
	env, err := bus.Decode(data, "")
	if ahead == 0 || err != nil || !env.GetAcceptBy().IsValid() {
		return data
	}
	env.AcceptBy = timestamppb.New(env.GetAcceptBy().AsTime().Add(-ahead))
	if data, err = bus.Encode(env, ""); err != nil {
		panic(err) //nolint:forbidigo // of a message that was decoded
	}

	return data
}

func (s *simSub) Unsubscribe() error {
	n := s.port.n
	n.mu.Lock()
	defer n.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	close(s.done)
	for i, other := range n.subs {
		if other == s {
			n.subs = append(n.subs[:i:i], n.subs[i+1:]...)

			break
		}
	}

	return nil
}

// Drain forgets what has come and was not handled: NATS would deliver it, and the
// protocol must not need it.
func (s *simSub) Drain() error { return s.Unsubscribe() }

// subjectMatches reports whether a subject fits a pattern with wildcards.
func subjectMatches(pattern, subject string) bool {
	for {
		p, restP, moreP := strings.Cut(pattern, ".")
		s, restS, moreS := strings.Cut(subject, ".")
		switch {
		case p == ">":
			return s != ""
		case p != "*" && p != s:
			return false
		case !moreP || !moreS:
			return moreP == moreS
		}
		pattern, subject = restP, restS
	}
}
