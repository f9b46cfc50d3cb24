package bus

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestAcknowledgement(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		msg    *nats.Msg
		seq    uint64
		is     error
		text   string
		reason string
	}{
		"stored": {msg: &nats.Msg{Data: []byte(`{"stream":"S","seq":7}`)}, seq: 7, reason: "as JetStream says it"},
		"conflict": {
			msg: &nats.Msg{Data: []byte(`{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 12"},"stream":"S","seq":0}`)},
			is:  errConflict, text: "wrong last sequence", reason: "somebody else was there first",
		},
		"conflict in flight": {
			msg: &nats.Msg{Data: []byte(`{"error":{"code":400,"err_code":10164,"description":"wrong last sequence"}}`)},
			is:  errConflict, text: "wrong last sequence", reason: "a cluster's word for a write still under way",
		},
		"nobody":     {msg: &nats.Msg{Header: nats.Header{"Status": {"503"}}}, is: errNoStream, text: "not there", reason: "nothing captures the subject"},
		"no stream":  {msg: &nats.Msg{Data: []byte(`{"error":{"err_code":10059,"description":"stream not found"}}`)}, is: errNoStream, text: "stream not found", reason: "the stream is gone"},
		"no account": {msg: &nats.Msg{Data: []byte(`{"error":{"err_code":10039,"description":"not enabled"}}`)}, is: errNoJetStream, text: "not enabled", reason: "JetStream is off"},
		"nonsense":   {msg: &nats.Msg{Data: []byte(`what?`)}, text: "acknowledgement", reason: "no JSON"},
		"no number":  {msg: &nats.Msg{Data: []byte(`{"stream":"S"}`)}, text: "without a stream or sequence", reason: "an acknowledgement of nothing"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seq, err := ackOf(tc.msg)
			if seq != tc.seq || (err == nil) != (tc.text == "") {
				t.Fatalf("ackOf = %d, %v, want %d: %s", seq, err, tc.seq, tc.reason)
			}
			if err != nil && (!strings.Contains(err.Error(), tc.text) || tc.is != nil && !errors.Is(err, tc.is)) {
				t.Errorf("error = %v, want %v with %q: %s", err, tc.is, tc.text, tc.reason)
			}
		})
	}
	if seq, known := conflictOf(&apiError{ErrCode: codeWrongLast, Description: "wrong last sequence: 12"}); !known || seq != 12 {
		t.Errorf("conflictOf = %d, %t, want 12", seq, known)
	}
	if _, known := conflictOf(&apiError{ErrCode: codeWrongLastConstant, Description: "wrong last sequence"}); known {
		t.Error("a conflict without a sequence has one")
	}
}

func TestStreamNamesDiffer(t *testing.T) {
	t.Parallel()
	if got := StreamName("default", "virtual"); got != "MCM_OPS_default_virtual" {
		t.Errorf("name = %s", got)
	}
	if a, b := StreamName("x_y", "z"), StreamName("x", "y_z"); a == b {
		t.Errorf("two control planes share stream %s", a)
	}
}

func TestRecord(t *testing.T) {
	t.Parallel()
	header := func(kv ...string) nats.Header {
		h := nats.Header{}
		for i := 0; i < len(kv); i += 2 {
			h[kv[i]] = []string{kv[i+1]}
		}

		return h
	}
	if r, err := recordOf(&nats.Msg{Header: header("Status", "404")}, "a"); r != nil || err != nil {
		t.Errorf("no record = %v, %v", r, err)
	}
	for name, m := range map[string]*nats.Msg{
		"nobody":          {Header: header("Status", "503")},
		"another status":  {Header: header("Status", "408", "Description", "Empty Request"), Data: []byte("x")},
		"another subject": {Header: header("Nats-Subject", "b", "Nats-Sequence", "1"), Data: []byte("x")},
		"no sequence":     {Header: header("Nats-Subject", "a"), Data: []byte("x")},
		"no header":       {Data: []byte("x")},
	} {
		if r, err := recordOf(m, "a"); err == nil {
			t.Errorf("%s: record %v, want an error", name, r)
		}
	}
	r, err := recordOf(&nats.Msg{Header: header("Nats-Subject", "a", "Nats-Sequence", "9"), Data: []byte{0xff}}, "a")
	if err != nil || r.sequence != 9 || r.envelope.GetClaim() != nil {
		t.Errorf("nonsense = %v, %v, want a record that can be replaced", r, err)
	}
}

func FuzzLedger(f *testing.F) {
	f.Add([]byte(`{"stream":"S","seq":7}`), "", "a", "7")
	f.Add([]byte(`{"error":{"err_code":10071,"description":"wrong last sequence: 12"}}`), "", "a", "7")
	f.Add([]byte{}, "503", "a", "7")
	f.Fuzz(func(t *testing.T, data []byte, status, subject, sequence string) {
		m := &nats.Msg{Data: data, Header: nats.Header{"Nats-Subject": {subject}, "Nats-Sequence": {sequence}}}
		if status != "" {
			m.Header["Status"] = []string{status}
		}
		if seq, err := ackOf(m); (seq == 0) == (err == nil) {
			t.Errorf("ackOf = %d, %v", seq, err)
		} else if at, known := conflictOf(err); known && !errors.Is(err, errConflict) {
			t.Errorf("conflict at %d of %v", at, err)
		}
		r, err := recordOf(m, "a")
		if r != nil && (err != nil || r.sequence == 0 || r.envelope == nil) {
			t.Errorf("record = %v, %v", r, err)
		}
		if r != nil {
			c := r.envelope.GetClaim()
			judgeClaim(c, "u.create.0", standing{})
			resultOf(c, nil)
			new(autopsy).judge(r, glimpse{}, time.Time{})
		}
	})
}

func TestLease(t *testing.T) {
	t.Parallel()
	start := time.Now()
	at := start.Add
	const ms = time.Millisecond
	newHeld := func() *lease { // acknowledged when sent at 0
		l := newLease()
		l.send(1, start)
		l.stored(1, 100)

		return l
	}
	for name, tc := range map[string]struct {
		run      func(l *lease)
		at       time.Duration
		holds    bool
		same     bool // generation
		id       bool // the same session id
		expected uint64
		reason   string
	}{
		"fresh":      {run: func(*lease) {}, at: fenceBound, holds: true, same: true, id: true, expected: 100, reason: "within the bound"},
		"old":        {run: func(*lease) {}, at: fenceBound + ms, same: true, id: true, expected: 100, reason: "the send time counts"},
		"late ack":   {run: func(l *lease) { l.send(2, at(500*ms)); l.stored(2, 101) }, at: 1701 * ms, same: true, id: true, expected: 101, reason: "it counts from when it was sent"},
		"renewed":    {run: func(l *lease) { l.send(2, at(1200*ms)); l.stored(2, 101) }, at: 2 * time.Second, holds: true, same: true, id: true, expected: 101, reason: "without a gap"},
		"gap":        {run: func(l *lease) { l.send(2, at(1201*ms)); l.stored(2, 101) }, at: 2 * time.Second, holds: true, id: true, expected: 101, reason: "there was a moment when nothing held"},
		"superseded": {run: func(l *lease) { l.send(2, at(500*ms)); l.refused(2, 105) }, at: 600 * ms, expected: 105, reason: "a tombstone is there"},
		"expired":    {run: func(l *lease) { l.send(2, at(500*ms)); l.refused(2, 0) }, at: 600 * ms, expected: 0, reason: "nothing is there"},
		"overtaken": {run: func(l *lease) {
			l.send(2, at(100*ms))
			l.send(3, at(150*ms))
			l.stored(2, 101)
			l.refused(3, 101)
		}, at: 600 * ms, holds: true, same: true, id: true, expected: 101, reason: "the third expected what the second has replaced"},
		"unknown ack": {run: func(l *lease) { l.stored(77, 300) }, at: 100 * ms, holds: true, same: true, id: true, expected: 100, reason: "of a session never sent"},
		"ended":       {run: func(l *lease) { l.end(); l.send(2, at(500*ms)); l.stored(2, 101) }, at: 600 * ms, id: true, expected: 101, reason: "a stopped replica begins nothing"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newHeld()
			id, generation := l.id, l.generation
			tc.run(l)
			if got := l.holds(at(tc.at)); got != tc.holds {
				t.Errorf("holds = %t, want %t: %s", got, tc.holds, tc.reason)
			}
			if got := l.generation == generation; got != tc.same {
				t.Errorf("same generation = %t, want %t: %s", got, tc.same, tc.reason)
			}
			if got := l.id == id; got != tc.id {
				t.Errorf("same session = %t, want %t: %s", got, tc.id, tc.reason)
			}
			if got := l.send(9, at(tc.at)); got != tc.expected {
				t.Errorf("next session replaces %d, want %d: %s", got, tc.expected, tc.reason)
			}
		})
	}
}

// Where there is no operations stream no session is ever acknowledged, and what
// waits for that must not grow for ever.
func TestUnansweredSessionsAreForgotten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(1)
		n.server.off = true
		ctx, cancel := context.WithCancel(t.Context())
		go n.run(ctx)
		// Somebody listens, or the server would answer that nobody does.
		listener, err := n.port("mcm", true).subscribe("mcm.v1.*.session.>", "", func(*nats.Msg) {})
		if err != nil {
			t.Fatal(err)
		}
		s, err := newServer(n.port("replica", false), ServerConfig{
			Provider: "virtual", Clusters: []string{"a", "b", "c"}, Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_CREATE},
			Logger: slog.New(slog.DiscardHandler),
		}, nil)
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error)
		go func() { ended <- s.Run(ctx) }()
		if err := sleep(ctx, 10*time.Minute); err != nil {
			t.Fatal(err)
		}
		most := 4 * int(answerKept/SessionInterval)
		s.inquirer.mu.Lock()
		if waiting, sent := len(s.inquirer.waiting), len(s.inquirer.sent); waiting > most || sent > most {
			t.Errorf("%d answers are waited for, and %d messages remembered, after ten minutes without an answer; want at most %d", waiting, sent, most)
		}
		s.inquirer.mu.Unlock()
		s.mu.Lock()
		for cluster, l := range s.leases {
			if len(l.sends) > most || len(l.expects) > most {
				t.Errorf("cluster %s: %d sessions and %d expectations are remembered, want at most %d", cluster, len(l.sends), len(l.expects), most)
			}
		}
		s.mu.Unlock()
		cancel()
		if err := errors.Join(<-ended, listener.Unsubscribe()); err != nil {
			t.Error(err)
		}
	})
}

// A manager that takes over wants to know the stream's age for each operation without
// a claim, all at once.
func TestAgeIsAskedForOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(1)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go n.run(ctx)
		p := n.port("mcm", true)
		var asked atomic.Int32
		tap, err := p.subscribe("$JS.API.STREAM.INFO.*", "", func(*nats.Msg) { asked.Add(1) })
		if err != nil {
			t.Fatal(err)
		}
		c, err := newCaller(p, CallerConfig{Cluster: "default", Operations: &StreamConfig{}, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		if claimed, err := c.claims(ctx, "virtual"); err != nil || !claimed {
			t.Fatalf("claims: %t, %v", claimed, err)
		}
		asked.Store(0)
		const many = 1000
		errs := make(chan error, many)
		for range many {
			go func() {
				_, err := c.streams.ageOf(ctx, "virtual")
				errs <- err
			}()
		}
		for range many {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
		if n := asked.Load(); n == 0 || n > 3 {
			t.Errorf("%d wanted to know the stream's age at a time, and it was asked for %d times", many, n)
		}
		c.Close()
		if err := tap.Unsubscribe(); err != nil {
			t.Error(err)
		}
	})
}

// A machine that was suspended does not know by its monotonic clock.
func TestElapsedByEitherClock(t *testing.T) {
	t.Parallel()
	from := time.Now()
	if got := elapsed(from, from.Add(time.Second)); got != time.Second {
		t.Errorf("elapsed = %s, want 1s", got)
	}
	// Only the wall clock has moved: Round strips the monotonic reading.
	if got := elapsed(from.Round(0), from.Add(time.Minute).Round(0)); got != time.Minute {
		t.Errorf("elapsed = %s, want 1m", got)
	}
	if got := elapsed(from, from.Add(time.Second).Round(0).Add(-time.Hour)); got > 0 {
		t.Errorf("elapsed = %s with the clock set back and no monotonic reading", got)
	}
}

func TestJudgeClaim(t *testing.T) {
	t.Parallel()
	const id = "u.create.2"
	claim := func(id string, state driverv1.Claim_State) *driverv1.Claim {
		return &driverv1.Claim{OperationId: id, State: state, Replica: "r", SessionId: "s", Attempt: 1}
	}
	const running, settled, released = driverv1.Claim_STATE_RUNNING, driverv1.Claim_STATE_SETTLED, driverv1.Claim_STATE_RELEASED
	for name, tc := range map[string]struct {
		claim  *driverv1.Claim
		who    standing
		want   finding
		reason string
	}{
		"none":              {want: isFree, reason: "nobody ever claimed the machine"},
		"own outcome":       {claim: claim(id, settled), want: isOurs, reason: "it ended while nobody listened"},
		"own, released":     {claim: claim(id, released), want: isFree, reason: "it ended, and is to be recovered"},
		"own, live":         {claim: claim(id, running), who: standing{live: true, session: "s"}, want: isHeld, reason: "it runs"},
		"own, new session":  {claim: claim(id, running), who: standing{live: true, session: "s2"}, want: isDoubtful, reason: "that session may be its last or its next"},
		"own, denied":       {claim: claim(id, running), who: standing{live: true, session: "s", denied: true}, want: isFree, reason: "the replica says so"},
		"own, silent":       {claim: claim(id, running), want: isSilence, reason: "silence proves nothing"},
		"own, buried":       {claim: claim(id, running), who: standing{buried: true}, want: isFree, reason: "a tombstone does"},
		"earlier outcome":   {claim: claim("u.create.0", settled), want: isFree, reason: "an old outcome is never replayed"},
		"earlier, live":     {claim: claim("u.create.0", running), who: standing{live: true, session: "s"}, want: isBusy, reason: "one mutation at a time"},
		"earlier, silent":   {claim: claim("u.create.0", running), want: isSilence, reason: "it may run"},
		"later":             {claim: claim("u.delete.3", settled), want: isStale, reason: "another manager is ahead"},
		"nonsense, running": {claim: claim("what?", running), want: isSilence, reason: "whoever wrote it has to be fenced"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := judgeClaim(tc.claim, id, tc.who); got != tc.want {
				t.Errorf("judgeClaim = %d, want %d: %s", got, tc.want, tc.reason)
			}
		})
	}
}

func TestAutopsy(t *testing.T) {
	t.Parallel()
	now := time.Now()
	heard := glimpse{session: "s", sequence: 5, seen: now}
	session := func(at uint64, id string, sequence uint64) *record {
		return &record{sequence: at, envelope: &driverv1.Envelope{Body: &driverv1.Envelope_Session{
			Session: &driverv1.Session{SessionId: id, Sequence: sequence},
		}}}
	}
	stone := &record{sequence: 9, envelope: &driverv1.Envelope{Body: &driverv1.Envelope_Tombstone{Tombstone: &driverv1.Tombstone{}}}}
	stopped := session(9, "s", 6)
	stopped.envelope.GetSession().Stopped = true
	type look struct {
		found *record
		after time.Duration
		want  condition
	}
	for name, tc := range map[string]struct {
		looks  []look
		reason string
	}{
		"silent": {[]look{{session(8, "s", 5), deathLimit, isSilent}}, "the session last heard is the last"},
		"heard later than stored": {
			[]look{{session(8, "s", 4), deathLimit, isSilent}}, "a refused session was heard after it",
		},
		"too early":      {[]look{{session(8, "s", 5), deathLimit - 1, isUncertain}, {session(8, "s", 5), deathLimit, isSilent}}, "its fence is not passed"},
		"never heard":    {[]look{{session(8, "s", 6), deathLimit, isUncertain}, {session(8, "s", 6), 2 * deathLimit, isSilent}}, "it may have been sent just now"},
		"renews unheard": {[]look{{session(8, "s", 6), deathLimit, isUncertain}, {session(9, "s", 7), deathLimit + 1, isAlive}}, "it lives"},
		"expired":        {[]look{{nil, deathLimit, isUncertain}, {nil, 2 * deathLimit, isSilent}}, "a lost stream looks the same"},
		"expires":        {[]look{{session(8, "s", 6), 0, isUncertain}, {nil, 1, isUncertain}}, "nothing is no renewal"},
		"buried":         {[]look{{stone, 0, isBuried}}, "another call was faster"},
		"stopped":        {[]look{{stopped, 0, isBuried}}, "its own word"},
		"new session":    {[]look{{session(8, "s2", 1), deathLimit, isUncertain}}, "it came back"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var a autopsy
			for i, l := range tc.looks {
				if got, _ := a.judge(l.found, heard, now.Add(l.after)); got != l.want {
					t.Errorf("look %d = %d, want %d: %s", i+1, got, l.want, tc.reason)
				}
			}
		})
	}
}

// That a replica has ended an operation says nothing of the next one that it has
// accepted, under the same session.
func TestAnEndedOperationBuriesNoSession(t *testing.T) {
	t.Parallel()
	c := &Caller{replicas: newReplicas()}
	c.replicas.onSession(session("r", 1, func(s *driverv1.Session) { s.SessionId = "s" }), time.Now())
	k := &call{c: c, req: &Request{Provider: "p", OperationID: "u.delete.2"}}
	claim := func(id string) *driverv1.Claim {
		return &driverv1.Claim{OperationId: id, Attempt: 1, Replica: "r", SessionId: "s", State: driverv1.Claim_STATE_RUNNING}
	}
	earlier, own := claim("u.initialize.1"), claim(k.req.OperationID)
	if got := judgeClaim(earlier, k.req.OperationID, k.standing(earlier)); got != isBusy {
		t.Fatalf("the earlier operation's claim is %v, want %v", got, isBusy)
	}
	k.over = earlier.GetOperationId()
	if got := judgeClaim(earlier, k.req.OperationID, k.standing(earlier)); got != isFree {
		t.Errorf("the earlier operation's claim is %v once that has ended, want %v", got, isFree)
	}
	if got := judgeClaim(own, k.req.OperationID, k.standing(own)); got != isHeld {
		t.Errorf("the claim of this operation is %v, want %v: it runs there", got, isHeld)
	}
}

func TestTextsAreShort(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		text, want, reason string
	}{
		"usual":  {"no capacity", "no capacity", "it is a cloud's own word"},
		"most":   {strings.Repeat("x", maxText), strings.Repeat("x", maxText), "that still fits"},
		"larger": {strings.Repeat("x", maxText+1), strings.Repeat("x", maxText) + "…", "the API server would not store any size"},
		"inside": {strings.Repeat("x", maxText-1) + "éé", strings.Repeat("x", maxText-1) + "…", "no half letters"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := ErrorOf(&driverv1.Status{Code: driverv1.Code_CODE_UNAVAILABLE, Message: tc.text}).Error(); got != tc.want {
				t.Errorf("%d bytes, want %d: %s", len(got), len(tc.want), tc.reason)
			}
		})
	}
}
