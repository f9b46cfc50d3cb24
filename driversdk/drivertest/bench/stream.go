package bench

import (
	"context"
	"encoding/json"
	"sync"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
)

// A Stream is the operations stream, with which checks do what only NATS may.
type Stream struct {
	*Runner

	b *Bench
}

// A refusal is how JetStream answers a request that it does not take.
type refusal struct {
	Error *struct {
		Code        int    `json:"err_code"`
		Description string `json:"description"`
	} `json:"error"`
}

// ask has a request to JetStream answered.
func (s Stream) ask(subject string, data []byte, header nats.Header) *nats.Msg {
	ctx, cancel := context.WithTimeout(s.ctx, s.patience)
	defer cancel()
	answer, err := s.b.conn.Client().RequestMsgWithContext(ctx, &nats.Msg{Subject: subject, Data: data, Header: header})
	if err != nil {
		s.Failf("operations stream, %s: %w", subject, err)
	}

	return answer
}

// api makes a request about the operations stream, and returns the answer.
func (s Stream) api(what string, body []byte) []byte {
	subject := "STREAM." + what + "." + bus.StreamName(s.b.Cluster, s.b.Provider)
	answer := s.ask("$JS.API."+subject, body, nil)
	var refused refusal
	s.Must(json.Unmarshal(answer.Data, &refused))
	if refused.Error != nil {
		s.Failf("%s: %s", subject, refused.Error.Description)
	}

	return answer.Data
}

// Refuse has the operations stream take no claims until restore, or until the check ends. Those that are in it stay. A
// replica's write is not answered then: the bench listens there.
func (s Stream) Refuse() (restore func()) {
	var info struct {
		Config map[string]any `json:"config"`
	}
	s.Must(json.Unmarshal(s.api("INFO", nil), &info))
	delete(info.Config, "first_seq") // is said once only
	info.Config["subjects"] = []string{s.b.Below("claim." + s.b.Provider + ".none")}
	body, err := json.Marshal(info.Config)
	s.Must(err)
	restore = sync.OnceFunc(s.Restore)
	s.Cleanup(restore)
	s.api("UPDATE", body)

	return restore
}

// Lose deletes the operations stream, and has it made again.
func (s Stream) Lose() {
	s.api("DELETE", nil)
	s.Restore()
}

// Restore has the operations stream made, or as it should be, again.
func (s Stream) Restore() {
	s.b.caller.Close()
	s.start()
	s.Await()
}

// start has the operations stream made as the manager makes it.
func (s Stream) start() {
	asking, err := caller.New(s.b.conn, caller.Config{
		Cluster: s.b.Cluster, Operations: &caller.StreamConfig{Memory: true}, Key: s.b.Fetches.key, Logger: s.b.Logger,
	})
	s.Must(err)
	if s.b.caller == nil {
		s.b.close = append(s.b.close, func() { s.b.caller.Close() })
	}
	s.b.caller = asking
}

// Await waits until replicas can claim.
func (s Stream) Await() {
	s.Within(s.b.Wait, "the operations stream is there (drivers that send sessions need a NATS with JetStream)", func() bool {
		streams := s.b.caller.Streams()

		return len(streams) > 0 && streams[0].Ready
	})
}
