package opstream

import (
	"context"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
)

// answerKept is the longest wait for an answer: longer than any caller needs.
const answerKept = 10 * time.Second

// An Inquirer sends messages whose answers come to an inbox of its own, each with its
// own token. It is safe for concurrent use.
type Inquirer struct {
	wire   bus.Wire
	prefix string
	sub    bus.Subscription

	mu      sync.Mutex
	tokens  uint64
	waiting map[string]func(*nats.Msg) // by reply subject
	sent    []inquiry                  // of the last answerKept, oldest first
}

// An inquiry is a message that an answer may come to.
type inquiry struct {
	reply string
	at    time.Time
}

// NewInquirer subscribes to an inbox of its own. Close ends that.
func NewInquirer(w bus.Wire) (*Inquirer, error) {
	q := &Inquirer{wire: w, prefix: w.Inbox() + ".", waiting: map[string]func(*nats.Msg){}}
	var err error
	if q.sub, err = w.Subscribe(q.prefix+"*", "", q.onAnswer); err != nil {
		return nil, err
	}

	return q, nil
}

// Close stops listening for answers.
func (q *Inquirer) Close() { _ = q.sub.Unsubscribe() } // fails only on a closed connection

// Send publishes m and has the first answer passed to f, from the connection's
// goroutine: f must not block. Forget ends the wait for it, which ends by itself
// after answerKept.
func (q *Inquirer) Send(m *nats.Msg, f func(*nats.Msg)) (forget func(), err error) {
	now := time.Now()
	q.mu.Lock()
	for len(q.sent) > 0 && now.Sub(q.sent[0].at) > answerKept {
		delete(q.waiting, q.sent[0].reply)
		q.sent = q.sent[1:]
	}
	q.tokens++
	m.Reply = q.prefix + strconv.FormatUint(q.tokens, 36)
	q.waiting[m.Reply] = f
	q.sent = append(q.sent, inquiry{m.Reply, now})
	q.mu.Unlock()
	forget = func() { q.take(m.Reply) }
	if err := q.wire.Publish(m); err != nil {
		forget()

		return func() {}, err
	}

	return forget, nil
}

// Ask is Send that waits for the answer, which may be "no responders".
func (q *Inquirer) Ask(ctx context.Context, m *nats.Msg, limit time.Duration) (*nats.Msg, error) {
	answers := make(chan *nats.Msg, 1)
	forget, err := q.Send(m, func(m *nats.Msg) { answers <- m })
	if err != nil {
		return nil, err
	}
	defer forget()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case answer := <-answers:
		return answer, nil
	case <-timer.C:
		return nil, ErrNoAnswer
	case <-ctx.Done():
		return nil, ctx.Err() //nolint:wrapcheck // the caller's own
	}
}

func (q *Inquirer) take(reply string) func(*nats.Msg) {
	q.mu.Lock()
	defer q.mu.Unlock()
	f := q.waiting[reply]
	delete(q.waiting, reply)

	return f
}

func (q *Inquirer) onAnswer(m *nats.Msg) {
	if f := q.take(m.Subject); f != nil {
		f(m)
	}
}
