package caller

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	opCreate = driverv1.Operation_OPERATION_CREATE
	opStatus = driverv1.Operation_OPERATION_STATUS
	opDelete = driverv1.Operation_OPERATION_DELETE
)

func session(id string, sequence uint64, change ...func(*driverv1.Session)) *driverv1.Session {
	s := &driverv1.Session{
		Cluster: "c", Provider: "p", Replica: id, Sequence: sequence, Slots: 2,
		Capabilities:   []driverv1.Operation{opCreate, opDelete, opStatus},
		CreateIdentity: driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN,
	}
	for _, f := range change {
		f(s)
	}

	return s
}

func TestSweepAndExcuse(t *testing.T) {
	t.Parallel()
	start := time.Unix(1000, 0)
	r := newReplicas()
	r.onSession(session("a", 1), start)
	a := newAttempt("op", 1, bus.TreeDriver, "")
	gone, unbind := r.bind(a, "p", "a")
	defer unbind()
	if dead := r.sweep(start.Add(deathLimit)); len(dead) != 0 {
		t.Errorf("dead at the limit: %v, want none before it has passed", dead)
	}
	// Time in which no session could arrive does not count.
	r.extendLife(start.Add(deathLimit), deathLimit)
	if dead := r.sweep(start.Add(2 * deathLimit)); len(dead) != 0 {
		t.Errorf("dead after an excused silence: %v", dead)
	}
	// An excuse never gives more life than a session of this moment would.
	r.extendLife(start.Add(2*deathLimit), time.Hour)
	if diff := cmp.Diff([]string{"p/a"}, r.sweep(start.Add(3*deathLimit+1))); diff != "" {
		t.Errorf("dead (-want +got):\n%s", diff)
	}
	select {
	case <-gone:
	default:
		t.Error("a call that waits for the dead replica was not notified")
	}
}

func TestOldSessionChangesNothing(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	r := newReplicas()
	r.onSession(session("a", 2, func(s *driverv1.Session) { s.Running = 2 }), now)
	r.onSession(session("a", 1), now)
	if !r.allFull("p", opCreate) {
		t.Error("a session overtaken on its way freed slots")
	}
}

func TestPick(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	r := newReplicas()
	r.onSession(session("a", 1), now)
	for i, want := range []string{"a", "a", ""} {
		if got := r.pick("p", opCreate, now, nil); got != want {
			t.Errorf("pick %d = %q, want %q: what was sent counts until the next session", i, got, want)
		}
	}
	if !r.allFull("p", opCreate) {
		t.Error("not full, although both slots are spoken for")
	}
	if got := r.pick("p", opDelete, now, nil); got != "a" || r.allFull("p", opDelete) {
		t.Errorf("pick for a delete = %q, want a: deletes have slots of their own", got)
	}
	if got := r.pick("p", opStatus, now, nil); got != "a" {
		t.Errorf("pick for a read = %q, want a: reads have slots of their own", got)
	}
	room := r.room("p")
	r.onSession(session("a", 2), now)
	select {
	case <-room:
	default:
		t.Error("a session with room closed no channel")
	}
	cases := map[string]struct {
		reason string
		change func(*driverv1.Session)
		now    time.Time
		except []string
		op     driverv1.Operation
	}{
		"draining":   {"it takes no new work", func(s *driverv1.Session) { s.Draining = true }, now, nil, opCreate},
		"suspect":    {"two sessions are missing", func(*driverv1.Session) {}, now.Add(suspectAfter + 1), nil, opCreate},
		"excepted":   {"it refused a moment ago", func(*driverv1.Session) {}, now, []string{"a"}, opCreate},
		"incapable":  {"it does not implement it", func(*driverv1.Session) {}, now, nil, driverv1.Operation_OPERATION_LIST},
		"over-full":  {"its figures may be odd", func(s *driverv1.Session) { s.Running = 9 }, now, nil, opCreate},
		"deleting":   {"no slot for deletes is left", func(s *driverv1.Session) { s.Running, s.Deleting = 2, 2 }, now, nil, opDelete},
		"other name": {"only replicas of the provider count", func(s *driverv1.Session) { s.Provider = "q" }, now, nil, opCreate},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newReplicas()
			r.onSession(session("a", 1, tc.change), now)
			if got := r.pick("p", tc.op, tc.now, tc.except); got != "" {
				t.Errorf("picked %q: %s", got, tc.reason)
			}
		})
	}
}

func TestIdentityIsTheWeakest(t *testing.T) {
	t.Parallel()
	r, now := newReplicas(), time.Unix(1000, 0)
	if identified, _ := r.identity("p"); identified {
		t.Error("a provider whose replicas were never heard may have no identity")
	}
	r.onSession(session("a", 1), now)
	if identified, _ := r.identity("p"); !identified {
		t.Error("a token identifies a create")
	}
	r.onSession(session("b", 1, func(s *driverv1.Session) {
		s.CreateIdentity = driverv1.CreateIdentity_CREATE_IDENTITY_UNSPECIFIED
	}), now)
	if identified, _ := r.identity("p"); identified {
		t.Error("during an upgrade the weakest driver counts: the lost create may be its own")
	}
	r.onSession(session("b", 2, func(s *driverv1.Session) { s.Stopped = true }), now)
	if identified, _ := r.identity("p"); identified {
		t.Error("the weakest driver is gone, and the lost create may be its own")
	}
}

// TestResultBeatsDeath: when a result and the news of its sender's death wait
// side by side, the result counts.
func TestResultBeatsDeath(t *testing.T) {
	t.Parallel()
	for range 50 { // select chooses at random
		gone := make(chan struct{})
		close(gone)
		a := newAttempt("op", 1, bus.TreeDriver, "")
		k := &call{req: &Request{Timeout: time.Minute}, op: opCreate, number: 1}
		f := follow{k: k, a: a, timer: time.NewTimer(time.Hour), holderDied: gone}
		if why := a.onFrame(&driverv1.Envelope{
			OperationId: "op", Attempt: 1, Replica: "a", Body: &driverv1.Envelope_Result{Result: &driverv1.Result{}},
		}); why != "" {
			t.Fatal(why)
		}
		signal(a.notify)
		if v := f.run(t.Context()); v != gotResult {
			t.Fatalf("verdict = %v, want the result", v)
		}
		f.timer.Stop()
	}
}

// TestBelievedHolderOutOfReach: that nobody listens at the replica which holds
// an attempt does not mean that nothing runs there.
func TestBelievedHolderOutOfReach(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		of := func(s *driverv1.Session) { s.Provider = "virtual" }
		known := b.caller.replicas
		known.onSession(session("holder", 1, of), time.Now())
		known.onSession(session("other", 1, of), time.Now())
		req := benchCreate(time.Minute)
		k := newMutation(&call{c: b.caller, req: &req, op: opCreate, number: 1, history: history{lastRan: 1}, target: "holder"})
		done, err := k.handleVerdict(b.ctx, gotNoResponder, 0)
		if done || err != nil || k.target != "holder" || k.number != 1 {
			b.Errorf("after no responders at a live holder: done %v, %v, attempt %d at %q; want it asked again", done, err, k.number, k.target)
		}
		known.onSession(session("holder", 2, of, func(s *driverv1.Session) { s.Stopped = true }), time.Now())
		b.caller.streams.of("virtual")
		b.until("the operations stream", func() bool { return b.caller.Streams()[0].Ready })
		known.onSession(session("other", 2, of), time.Now())
		done, err = k.handleVerdict(b.ctx, gotNoResponder, 0)
		if done || err != nil || k.target != "other" || k.number != 2 || !k.recover {
			b.Errorf("after no responders at a dead holder: done %v, %v, attempt %d at %q; want attempt 2 at the other", done, err, k.number, k.target)
		}
	})
}

// TestBusyReplicaIsNotAskedTwice: a replica's sessions say only later that it
// is full.
func TestBusyReplicaIsNotAskedTwice(t *testing.T) {
	t.Parallel()
	for _, op := range []driverv1.Operation{opCreate, opStatus} {
		c := &Caller{replicas: newReplicas()}
		c.replicas.onSession(session("a", 1), time.Now())
		c.replicas.onSession(session("b", 1), time.Now())
		k := &call{c: c, req: &Request{Provider: "p"}, op: op, number: 1}
		for i, want := range []bool{false, true} {
			k.out.Replica = []string{"a", "b"}[i]
			if done, err := k.retryAtOtherReplica(); done != want || done != (err != nil) || !done && k.target != "b" {
				t.Errorf("%s: after %s was busy: done %v, %v, next %q", bus.Verb(op), k.out.Replica, done, err, k.target)
			}
		}
	}
}

// A session is easily sent; an answer is not.
func TestPickPrefersWhoAnswers(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	many := func(s *driverv1.Session) { s.Slots = 1 << 30 }
	for name, tc := range map[string]struct {
		trust  map[string]trust
		want   map[string]bool
		reason string
	}{
		"one answered":  {map[string]trust{"a": noAnswerLast, "b": answers}, map[string]bool{"b": true}, "whatever room the others say they have"},
		"one is mute":   {map[string]trust{"a": noAnswerLast}, map[string]bool{"b": true, "c": true}, "those that were not asked yet come first"},
		"all are mute":  {map[string]trust{"a": noAnswerLast, "b": noAnswerLast, "c": noAnswerLast}, map[string]bool{"a": true, "b": true, "c": true}, "there is nobody else"},
		"it is back":    {map[string]trust{"a": answers, "b": answers}, map[string]bool{"a": true, "b": true}, "of equals any"},
		"of a stranger": {map[string]trust{"x": answers}, map[string]bool{"a": true, "b": true, "c": true}, "no replica is made by what is noted of it"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newReplicas()
			r.onSession(session("a", 1, many), now)
			r.onSession(session("b", 1, func(s *driverv1.Session) { s.Slots = 1000 }), now)
			r.onSession(session("c", 1, func(s *driverv1.Session) { s.Slots = 1000 }), now)
			for id, trust := range tc.trust {
				r.noteTrust("p", id, trust)
			}
			for range 50 {
				if got := r.pick("p", opCreate, now, nil); !tc.want[got] {
					t.Fatalf("picked %q, want one of %v: %s", got, tc.want, tc.reason)
				}
			}
			if ids := r.live("p"); len(ids) != 3 || !tc.want[ids[0]] {
				t.Errorf("asked in the order %v, want one of %v first", ids, tc.want)
			}
		})
	}
}

func TestSettleTimeOf(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		said, want time.Duration
		reason     string
	}{
		"usual":    {time.Minute, time.Minute, "it is believed"},
		"none":     {0, 0, "lists show what is"},
		"negative": {-time.Minute, 0, "nonsense"},
		"endless":  {1 << 62, time.Hour, "else a lost create of the provider would never be tried again"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := session("a", 1, func(s *driverv1.Session) { s.SettleTime = durationpb.New(tc.said) })
			if got := SettleTimeOf(s); got != tc.want {
				t.Errorf("%s, want %s: %s", got, tc.want, tc.reason)
			}
		})
	}
}
