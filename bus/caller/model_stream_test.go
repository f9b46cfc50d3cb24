package caller

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// codeStreamExists is JetStream's refusal to make an existing stream with other settings.
const codeStreamExists = 10058

// simStreams is as much of JetStream as the protocol uses: streams that keep the
// last message of each subject, written by compare-and-set, read by direct get.
// TestModelStreamIsLikeJetStream holds it against the real one.
type simStreams struct {
	off, away bool // there is none; it is there and does not answer
	byName    map[string]*simStore
	order     map[uint64]uint64    // of all records ever written, by their sequences
	begun     map[uint64]time.Time // when a record that a call begins was stored, by its place in order
	// onPut is called with the record that replaced another; may be nil.
	onPut func(subject string, before, after []byte)
}

type simStore struct {
	config  jetstream.StreamConfig
	made    time.Time
	last    uint64
	records map[string]simRecord
}

type simRecord struct {
	sequence uint64
	data     []byte
	ttl      []string  // as its header says
	ends     time.Time // zero for never
}

func newSimStreams() *simStreams {
	return &simStreams{byName: map[string]*simStore{}, order: map[uint64]uint64{}, begun: map[uint64]time.Time{}}
}

// take handles a message if JetStream has to do with it: handled says so, and
// answer is what comes back.
func (s *simStreams) take(m *nats.Msg) (answer *nats.Msg, handled bool) {
	if s.off {
		return nil, false
	}
	if what, ok := strings.CutPrefix(m.Subject, "$JS.API.DIRECT.GET."); ok {
		return s.get(m, what)
	}
	if what, ok := strings.CutPrefix(m.Subject, "$JS.API."); ok {
		return s.api(m, what)
	}
	for name, store := range s.byName {
		for _, pattern := range store.config.Subjects {
			if subjectMatches(pattern, m.Subject) {
				if s.away {
					return nil, true
				}

				return s.put(name, store, m), true
			}
		}
	}

	return nil, false
}

func (s *simStreams) get(m *nats.Msg, what string) (*nats.Msg, bool) {
	name, subject, _ := strings.Cut(what, ".")
	store, ok := s.byName[name]
	switch {
	case !ok:
		return nil, false // nothing subscribes there
	case s.away:
		return nil, true
	}
	r, ok := store.live(subject)
	if !ok {
		return &nats.Msg{Subject: m.Reply, Header: nats.Header{
			bus.HeaderStatus: {"404"}, "Description": {"Message Not Found"},
		}}, true
	}

	answer := &nats.Msg{Subject: m.Reply, Data: r.data, Header: nats.Header{
		"Nats-Subject": {subject}, "Nats-Sequence": {strconv.FormatUint(r.sequence, 10)}, "Nats-Stream": {name},
	}}
	if r.ttl != nil {
		answer.Header["Nats-TTL"] = r.ttl
	}

	return answer, true
}

func (s *simStreams) api(m *nats.Msg, what string) (*nats.Msg, bool) {
	if s.away {
		return nil, true
	}
	verb, name, _ := cutLast(what)
	store := s.byName[name]
	var cfg jetstream.StreamConfig
	if len(m.Data) > 0 && json.Unmarshal(m.Data, &cfg) != nil {
		return answerTo(m, map[string]any{"error": opstream.APIError{Code: 400, ErrCode: 10025, Description: "invalid JSON"}}), true
	}
	switch {
	case verb == "STREAM.CREATE" && store == nil:
		s.byName[name] = &simStore{config: cfg, made: time.Now(), last: max(cfg.FirstSeq, 1) - 1, records: map[string]simRecord{}}
	case store == nil:
		return answerTo(m, map[string]any{"error": opstream.APIError{Code: 404, ErrCode: 10059, Description: "stream not found"}}), true
	case verb == "STREAM.DELETE":
		delete(s.byName, name)

		return answerTo(m, map[string]any{"success": true}), true
	case verb == "STREAM.CREATE":
		return answerTo(m, map[string]any{"error": opstream.APIError{
			Code: 400, ErrCode: codeStreamExists, Description: "stream name already in use with a different configuration",
		}}), true
	}

	return answerTo(m, map[string]any{
		"created": s.byName[name].made, "ts": time.Now(), "state": map[string]any{"last_seq": s.byName[name].last},
	}), true
}

func (s *simStreams) put(name string, store *simStore, m *nats.Msg) *nats.Msg {
	before, _ := store.live(m.Subject)
	if want := m.Header.Get("Nats-Expected-Last-Subject-Sequence"); want != "" && want != strconv.FormatUint(before.sequence, 10) {
		return answerTo(m, map[string]any{"stream": name, "seq": 0, "error": opstream.APIError{
			Code: 400, ErrCode: 10071, Description: fmt.Sprintf("wrong last sequence: %d", before.sequence),
		}})
	}
	store.last++
	s.order[store.last] = uint64(len(s.order)) + 1
	if env, err := bus.Decode(m.Data, ""); err == nil && env.GetClaim().GetState() == driverv1.Claim_STATE_BEGUN {
		s.begun[s.order[store.last]] = time.Now()
	}
	after := simRecord{sequence: store.last, data: m.Data, ttl: m.Header["Nats-TTL"]}
	if ttl, err := time.ParseDuration(m.Header.Get("Nats-TTL")); err == nil {
		after.ends = time.Now().Add(ttl)
	}
	store.records[m.Subject] = after
	if s.onPut != nil {
		s.onPut(m.Subject, before.data, after.data)
	}

	return answerTo(m, map[string]any{"stream": name, "seq": store.last})
}

func (s *simStore) live(subject string) (simRecord, bool) {
	r, ok := s.records[subject]
	if !ok || !r.ends.IsZero() && !time.Now().Before(r.ends) {
		return simRecord{}, false
	}

	return r, true
}

func answerTo(m *nats.Msg, body any) *nats.Msg {
	data, err := json.Marshal(body)
	if err != nil {
		panic(err) //nolint:forbidigo // of a test's own maps
	}

	return &nats.Msg{Subject: m.Reply, Data: data}
}

// cutLast cuts around the last dot.
func cutLast(s string) (before, after string, found bool) {
	i := strings.LastIndexByte(s, '.')
	if i < 0 {
		return s, "", false
	}

	return s[:i], s[i+1:], true
}
