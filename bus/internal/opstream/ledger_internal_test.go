package opstream

import (
	"errors"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
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
			is:  ErrConflict, text: "wrong last sequence", reason: "another writer was first",
		},
		"conflict in flight": {
			msg: &nats.Msg{Data: []byte(`{"error":{"code":400,"err_code":10164,"description":"wrong last sequence"}}`)},
			is:  ErrConflict, text: "wrong last sequence", reason: "a cluster's word for a write still under way",
		},
		"nobody":     {msg: &nats.Msg{Header: nats.Header{"Status": {"503"}}}, is: ErrNoStream, text: "does not exist", reason: "nothing captures the subject"},
		"no stream":  {msg: &nats.Msg{Data: []byte(`{"error":{"err_code":10059,"description":"stream not found"}}`)}, is: ErrNoStream, text: "stream not found", reason: "the stream is gone"},
		"no account": {msg: &nats.Msg{Data: []byte(`{"error":{"err_code":10039,"description":"not enabled"}}`)}, is: ErrNoJetStream, text: "not enabled", reason: "JetStream is off"},
		"nonsense":   {msg: &nats.Msg{Data: []byte(`what?`)}, text: "acknowledgement", reason: "no JSON"},
		"no number":  {msg: &nats.Msg{Data: []byte(`{"stream":"S"}`)}, text: "without a stream or sequence", reason: "an acknowledgement of nothing"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seq, err := SequenceOf(tc.msg)
			if seq != tc.seq || (err == nil) != (tc.text == "") {
				t.Fatalf("ackOf = %d, %v, want %d: %s", seq, err, tc.seq, tc.reason)
			}
			if err != nil && (!strings.Contains(err.Error(), tc.text) || tc.is != nil && !errors.Is(err, tc.is)) {
				t.Errorf("error = %v, want %v with %q: %s", err, tc.is, tc.text, tc.reason)
			}
		})
	}
	if seq, known := ConflictOf(&APIError{ErrCode: codeWrongLast, Description: "wrong last sequence: 12"}); !known || seq != 12 {
		t.Errorf("conflictOf = %d, %t, want 12", seq, known)
	}
	if _, known := ConflictOf(&APIError{ErrCode: codeWrongLastConstant, Description: "wrong last sequence"}); known {
		t.Error("a conflict without a sequence has one")
	}
}

func TestStreamNamesDiffer(t *testing.T) {
	t.Parallel()
	if got := bus.StreamName("default", "virtual"); got != "MCM_OPS_default_virtual" {
		t.Errorf("name = %s", got)
	}
	if a, b := bus.StreamName("x_y", "z"), bus.StreamName("x", "y_z"); a == b {
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
	if err != nil || r.Sequence != 9 || r.Envelope.GetClaim() != nil {
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
		if seq, err := SequenceOf(m); (seq == 0) == (err == nil) {
			t.Errorf("ackOf = %d, %v", seq, err)
		} else if at, known := ConflictOf(err); known && !errors.Is(err, ErrConflict) {
			t.Errorf("conflict at %d of %v", at, err)
		}
		r, err := recordOf(m, "a")
		if r != nil && (err != nil || r.Sequence == 0 || r.Envelope == nil) {
			t.Errorf("record = %v, %v", r, err)
		}
		if r != nil {
			c := r.Envelope.GetClaim()
			ResultOf(c, nil)
		}
	})
}
