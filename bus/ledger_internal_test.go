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
		if err := c.awaitStream(ctx, "virtual"); err != nil {
			t.Fatal(err)
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
		return &driverv1.Claim{OperationId: id, State: state, Replica: "r", Attempt: 1}
	}
	const (
		running, begun    = driverv1.Claim_STATE_RUNNING, driverv1.Claim_STATE_BEGUN
		settled, released = driverv1.Claim_STATE_SETTLED, driverv1.Claim_STATE_RELEASED
	)
	plain := claim(id, begun)
	plain.Replica = plainReplica
	for name, tc := range map[string]struct {
		claim  *driverv1.Claim
		who    standing
		want   finding
		reason string
	}{
		"none":              {want: isFree, reason: "nobody ever claimed the machine"},
		"own outcome":       {claim: claim(id, settled), want: isOurs, reason: "it ended while nobody listened"},
		"own, released":     {claim: claim(id, released), want: isFree, reason: "it ended, and is to be recovered"},
		"own, live":         {claim: claim(id, running), who: standing{live: true}, want: isHeld, reason: "it runs"},
		"own, begun":        {claim: claim(id, begun), who: standing{live: true}, want: isHeld, reason: "it runs"},
		"own, denied":       {claim: claim(id, running), who: standing{live: true, denied: true}, want: isFree, reason: "the replica says so"},
		"own, not heard":    {claim: claim(id, begun), who: standing{unheard: true}, want: isUnheard, reason: "it had no time to be heard"},
		"own, silent":       {claim: claim(id, begun), want: isFree, reason: "whoever replaces the claim stops its replica"},
		"own, plain":        {claim: plain, want: isPlain, reason: "nobody can ask it, and nothing stops it"},
		"own, plain, asked": {claim: plain, who: standing{denied: true}, want: isFree, reason: "this side has written the claim, and not asked yet"},
		"earlier, plain":    {claim: &driverv1.Claim{OperationId: "u.create.0", State: begun, Replica: plainReplica}, want: isFree, reason: "it has ended, or there was no later one"},
		"earlier outcome":   {claim: claim("u.create.0", settled), want: isFree, reason: "an old outcome is never replayed"},
		"earlier, live":     {claim: claim("u.create.0", running), who: standing{live: true}, want: isBusy, reason: "one mutation at a time"},
		"earlier, silent":   {claim: claim("u.create.0", running), want: isFree, reason: "whoever replaces the claim stops its replica"},
		"later":             {claim: claim("u.delete.3", settled), want: isStale, reason: "another manager is ahead"},
		"same number":       {claim: claim("u.delete.2", settled), want: isStale, reason: "another operation has had the number, before a restore"},
		"nonsense, running": {claim: claim("what?", running), want: isFree, reason: "whoever replaces it stops whoever wrote it"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := judgeClaim(tc.claim, id, tc.who); got != tc.want {
				t.Errorf("judgeClaim = %d, want %d: %s", got, tc.want, tc.reason)
			}
		})
	}
}

// That a replica has ended an operation says nothing of the next one that it has
// accepted.
func TestAnEndedOperationSaysNothingOfTheNext(t *testing.T) {
	t.Parallel()
	c := &Caller{replicas: newReplicas()}
	c.since.Store(&time.Time{})
	c.replicas.onSession(session("r", 1), time.Now())
	k := claimReader{call: &call{c: c, req: &Request{Provider: "p", OperationID: "u.delete.2"}}}
	claim := func(id string) *driverv1.Claim {
		return &driverv1.Claim{OperationId: id, Attempt: 1, Replica: "r", State: driverv1.Claim_STATE_RUNNING}
	}
	earlier, own := claim("u.initialize.1"), claim(k.req.OperationID)
	if got := judgeClaim(earlier, k.req.OperationID, k.standing(earlier, 1)); got != isBusy {
		t.Fatalf("the earlier operation's claim is %v, want %v", got, isBusy)
	}
	k.over = earlier.GetOperationId()
	if got := judgeClaim(earlier, k.req.OperationID, k.standing(earlier, 1)); got != isFree {
		t.Errorf("the earlier operation's claim is %v once that has ended, want %v", got, isFree)
	}
	if got := judgeClaim(own, k.req.OperationID, k.standing(own, 1)); got != isHeld {
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
