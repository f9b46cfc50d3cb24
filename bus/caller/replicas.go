package caller

import (
	"iter"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A replica is suspect and gets no new work after two missed sessions. It is dead after
// three.
const (
	suspectAfter = 2 * bus.SessionInterval
	deathLimit   = 3 * bus.SessionInterval
	sweepEvery   = 100 * time.Millisecond
	// starved is how late a sweep may be before the delay counts as this process's, not as
	// the replicas' silence.
	starved = 3 * sweepEvery
)

// A Replica is what is known of one driver replica.
type Replica struct {
	// Session is the newest; it must not be changed.
	Session *driverv1.Session
	// Seen is when it arrived.
	Seen time.Time
}

// replicas are the replicas that the Caller knows. It is safe for concurrent use.
type replicas struct {
	protocols bus.Protocols // that the Caller speaks

	mu              sync.Mutex
	refusalLoggedAt time.Time // when a refused replica was last logged
	byKey           map[string]*peer
	waiter          map[string]chan struct{} // by provider; closed when a replica may have room
	longestSettle   map[string]time.Duration // longest settle time of any replica so far, by provider
	// withoutIdentity are the providers with a replica whose creates had no identity.
	withoutIdentity map[string]bool
}

type peer struct {
	provider, id  string
	session       *driverv1.Session
	seen          time.Time
	refused       error  // why it gets no work: it speaks another protocol version
	refusalLogged bool   // refused was logged
	sent          [2]int // requests sent to it since that session, by slotsOf
	trust         trust
	gone          chan struct{} // closed once it is dead or has stopped
	attempts      map[*attempt]struct{}
}

// trust says whether a replica has answered. Sessions alone prove little: a process that
// hangs may send them, and they may be forged.
type trust int

const (
	noAnswerLast trust = iota - 1 // it did not answer the last question
	unproven                      // it has not been asked yet
	answers
)

func newReplicas() *replicas {
	return &replicas{
		protocols: bus.Spoken,
		byKey:     map[string]*peer{}, waiter: map[string]chan struct{}{},
		longestSettle: map[string]time.Duration{}, withoutIdentity: map[string]bool{},
	}
}

func replicaKey(provider, id string) string { return provider + "/" + id }

// onSession handles a session and passes the operations in it to their attempts.
func (r *replicas) onSession(s *driverv1.Session, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rep := r.peerOf(s.GetProvider(), s.GetReplica(), now)
	if rep.session.GetSequence() > s.GetSequence() {
		return // a newer session arrived first
	}
	rep.session, rep.seen, rep.sent, rep.refused = s, now, [2]int{}, r.protocols.Refuses(s)
	r.longestSettle[rep.provider] = max(r.longestSettle[rep.provider], SettleTimeOf(s))
	r.withoutIdentity[rep.provider] = r.withoutIdentity[rep.provider] || !identifies(s)
	if s.GetStopped() {
		r.remove(rep)

		return
	}
	if rep.free(driverv1.Operation_OPERATION_CREATE) > 0 || rep.free(driverv1.Operation_OPERATION_DELETE) > 0 {
		r.signal(rep.provider)
	}
	if len(rep.attempts) == 0 {
		return
	}
	states := make(map[string]*driverv1.OperationState, len(s.GetOperations()))
	for _, st := range s.GetOperations() {
		if !st.GetStuck() {
			states[st.GetOperationId()] = st
		}
	}
	for a := range rep.attempts {
		if st := states[a.id]; st != nil || s.GetOmitted() == 0 {
			a.onState(st)
		}
	}
}

// refusalToLog returns why the replica of a session gets no work, and whether to log it.
// It is logged once for each replica and at most once a second, as anyone who may send
// sessions can invent thousands.
func (r *replicas) refusalToLog(s *driverv1.Session) (why error, first bool) { //nolint:revive // the error is a result, not a failure
	r.mu.Lock()
	defer r.mu.Unlock()
	rep, ok := r.byKey[replicaKey(s.GetProvider(), s.GetReplica())]
	if !ok || rep.refused == nil {
		return nil, false
	}
	if now := time.Now(); !rep.refusalLogged && now.Sub(r.refusalLoggedAt) > time.Second {
		first, rep.refusalLogged, r.refusalLoggedAt = true, true, now
	}

	return rep.refused, first
}

// refusal returns why one of the provider's replicas gets no work; nil if there is none.
// While there is one, requests must name their replica, or it could take them.
func (r *replicas) refusal(provider string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for rep := range r.of(provider) {
		if rep.refused != nil {
			return rep.refused
		}
	}

	return nil
}

// of passes on the provider's replicas. Its user holds mu.
func (r *replicas) of(provider string) iter.Seq[*peer] {
	return func(yield func(*peer) bool) {
		for _, rep := range r.byKey {
			if rep.provider == provider && !yield(rep) {
				return
			}
		}
	}
}

// peerOf returns the replica's entry and makes it if it is new.
func (r *replicas) peerOf(provider, id string, now time.Time) *peer {
	key := replicaKey(provider, id)
	rep, ok := r.byKey[key]
	if !ok {
		rep = &peer{
			provider: provider, id: id, seen: now,
			gone: make(chan struct{}), attempts: map[*attempt]struct{}{},
		}
		r.byKey[key] = rep
	}

	return rep
}

func (r *replicas) remove(rep *peer) {
	delete(r.byKey, replicaKey(rep.provider, rep.id))
	close(rep.gone)
}

// lives reports whether a replica sends sessions.
func (r *replicas) lives(provider, id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	rep, ok := r.byKey[replicaKey(provider, id)]

	return ok && rep.session != nil
}

// bind notes that a replica has an attempt. The returned channel is closed once that
// replica is dead.
func (r *replicas) bind(a *attempt, provider, id string) (gone <-chan struct{}, unbind func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rep := r.peerOf(provider, id, time.Now())
	rep.attempts[a] = struct{}{}

	return rep.gone, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(rep.attempts, a)
	}
}

// sweep declares replicas dead that were silent for too long.
func (r *replicas) sweep(now time.Time) (dead []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rep := range r.byKey {
		if now.Sub(rep.seen) > deathLimit {
			r.remove(rep)
			dead = append(dead, replicaKey(rep.provider, rep.id))
		}
	}

	return dead
}

// extendLife extends each replica's life by a time in which no session could arrive.
func (r *replicas) extendLife(now time.Time, silence time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rep := range r.byKey {
		rep.seen = rep.seen.Add(silence)
		if rep.seen.After(now) {
			rep.seen = now
		}
	}
}

// slotsOf returns the index of the slots that a mutation takes: 1 for deletes, else 0.
func slotsOf(op driverv1.Operation) int {
	if op == driverv1.Operation_OPERATION_DELETE {
		return 1
	}

	return 0
}

// SlotsFree returns how many mutations of a kind a replica can take, by its session.
func SlotsFree(s *driverv1.Session, op driverv1.Operation) int {
	if s == nil || s.GetDraining() || s.GetStopped() {
		return 0
	}
	if op == driverv1.Operation_OPERATION_DELETE {
		return int(s.GetSlots()) - int(s.GetDeleting())
	}

	return int(s.GetSlots()) - int(s.GetRunning()) + int(s.GetDeleting())
}

// free returns how many mutations of a kind the replica can take, less those sent since.
func (rep *peer) free(op driverv1.Operation) int {
	if rep.refused != nil {
		return 0
	}

	return SlotsFree(rep.session, op) - rep.sent[slotsOf(op)]
}

// noteTrust notes whether a replica has answered a question.
func (r *replicas) noteTrust(provider, id string, t trust) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if rep, ok := r.byKey[replicaKey(provider, id)]; ok {
		rep.trust = t
	}
}

// fits reports whether a replica can take an operation now.
func (rep *peer) fits(op driverv1.Operation, now time.Time) bool {
	s := rep.session
	switch {
	case rep.refused != nil, now.Sub(rep.seen) > suspectAfter, s.GetDraining(), !slices.Contains(s.GetCapabilities(), op):
		return false
	default: // sessions do not list the slots of reads
		return !bus.Mutates(op) || rep.free(op) > 0
	}
}

// pick returns the less loaded of two random replicas with room among the most trusted,
// and counts a request as sent to it. It returns "" if there is none.
func (r *replicas) pick(provider string, op driverv1.Operation, now time.Time, except []string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var fit []*peer
	for rep := range r.of(provider) {
		if slices.Contains(except, rep.id) || !rep.fits(op, now) {
			continue
		}
		if len(fit) > 0 && rep.trust > fit[0].trust {
			fit = fit[:0]
		}
		if len(fit) == 0 || rep.trust == fit[0].trust {
			fit = append(fit, rep)
		}
	}
	if len(fit) == 0 {
		return ""
	}
	best := fit[rand.IntN(len(fit))]
	if other := fit[rand.IntN(len(fit))]; other.free(op) > best.free(op) {
		best = other
	}
	if bus.Mutates(op) {
		best.sent[slotsOf(op)]++
	}

	return best.id
}

// live returns the ids of a provider's replicas, the most trusted first.
func (r *replicas) live(provider string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var ids []string
	for _, rep := range slices.SortedFunc(r.of(provider), func(a, b *peer) int { return int(b.trust - a.trust) }) {
		ids = append(ids, rep.id)
	}

	return ids
}

// allFull reports whether the provider has known replicas and none has room.
func (r *replicas) allFull(provider string, op driverv1.Operation) bool {
	return r.allLack(provider, func(rep *peer) bool { return rep.free(op) > 0 })
}

// noneImplements reports whether the provider has known replicas and none implements op.
func (r *replicas) noneImplements(provider string, op driverv1.Operation) bool {
	return r.allLack(provider, func(rep *peer) bool { return slices.Contains(rep.session.GetCapabilities(), op) })
}

// allLack reports whether the provider has known replicas and none is as wanted.
func (r *replicas) allLack(provider string, wanted func(*peer) bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := false
	for rep := range r.of(provider) {
		if rep.session != nil {
			if wanted(rep) {
				return false
			}
			known = true
		}
	}

	return known
}

// An operationHolder is a replica that has an operation.
type operationHolder struct {
	replica string
	attempt uint32
	fenced  bool // its claim was replaced, so it begins nothing more
	failed  bool // the operation failed
}

func (h operationHolder) preferredTo(other operationHolder) bool {
	switch {
	case h.fenced != other.fenced:
		return other.fenced
	case h.failed != other.failed:
		return other.failed
	default:
		return h.attempt > other.attempt
	}
}

// holderOf returns the replica that lists an operation in its session or has accepted it
// since. Of several it prefers one that is not fenced, then one that has not failed, then
// that of the latest attempt.
func (r *replicas) holderOf(provider, operationID string) (best operationHolder, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	consider := func(h operationHolder) {
		if !ok || h.preferredTo(best) {
			best, ok = h, true
		}
	}
	for rep := range r.of(provider) {
		for _, st := range rep.session.GetOperations() {
			if st.GetOperationId() == operationID && !st.GetStuck() {
				consider(operationHolder{
					replica: rep.id, attempt: st.GetAttempt(), fenced: st.GetFenced(),
					failed: st.GetSettled() && st.GetCode() != driverv1.Code_CODE_OK,
				})
			}
		}
		for a := range rep.attempts {
			if a.id == operationID {
				consider(operationHolder{replica: rep.id, attempt: a.number})
			}
		}
	}

	return best, ok
}

// stuckAt returns the live replica that lists an operation as stuck; empty for none.
func (r *replicas) stuckAt(provider, operationID string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	for rep := range r.of(provider) {
		for _, st := range rep.session.GetOperations() {
			if st.GetStuck() && st.GetOperationId() == operationID {
				return rep.id
			}
		}
	}

	return ""
}

// identity reports whether the creates of all drivers of a provider have an identity, by
// which the cloud recognizes a second one. It returns their longest settle time. Drivers
// that are gone count, as a lost create may be theirs. It is false without any driver.
func (r *replicas) identity(provider string) (identified bool, settle time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	settle, heard := r.longestSettle[provider]

	return heard && !r.withoutIdentity[provider], settle
}

// identifies reports whether a driver's creates have an identity.
func identifies(s *driverv1.Session) bool {
	switch s.GetCreateIdentity() {
	case driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN, driverv1.CreateIdentity_CREATE_IDENTITY_UNIQUE_NAME:
		return true
	default:
		return false
	}
}

// SettleTimeOf returns how long the provider's lists may lag behind changes, by a
// session; an hour at most.
func SettleTimeOf(s *driverv1.Session) time.Duration {
	return max(0, min(s.GetSettleTime().AsDuration(), time.Hour))
}

// room returns a channel that is closed when a replica of the provider may have room.
func (r *replicas) room(provider string) <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	ch, ok := r.waiter[provider]
	if !ok {
		ch = make(chan struct{})
		r.waiter[provider] = ch
	}

	return ch
}

func (r *replicas) signal(provider string) {
	if ch, ok := r.waiter[provider]; ok {
		close(ch)
		delete(r.waiter, provider)
	}
}

func (r *replicas) list() []Replica {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := make([]Replica, 0, len(r.byKey))
	for _, rep := range r.byKey {
		if rep.session != nil {
			list = append(list, Replica{Session: rep.session, Seen: rep.seen})
		}
	}
	slices.SortFunc(list, func(a, b Replica) int {
		return strings.Compare(a.Session.GetProvider()+a.Session.GetReplica(), b.Session.GetProvider()+b.Session.GetReplica())
	})

	return list
}
