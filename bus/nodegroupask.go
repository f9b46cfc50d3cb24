package bus

import (
	"context"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

// A nodeGroupWish is one request on its way, as often as it is sent.
type nodeGroupWish struct {
	client            *NodeGroupClient
	provider, subject string
	verb              string
	changes           bool
	id                string
	body              *nodegroupv1.Envelope

	answers chan *nats.Msg
	replies []string // one subject for each time that it was sent
	open    int      // how many of them may still be answered
	refusal error    // what a driver said while others were open
}

// run sends the request, again whenever that may help, and waits for the answer.
func (w *nodeGroupWish) run(ctx context.Context) (*nodegroupv1.Envelope, error) {
	silence := time.NewTicker(nodeGroupSilence)
	defer silence.Stop()
	due := true
	for {
		if due && w.refusal == nil && len(w.replies) < nodeGroupTries {
			silence.Reset(nodeGroupSilence)
			if err := w.send(ctx); err != nil && w.open == 0 {
				return nil, err
			}
		}
		if w.open == 0 {
			return nil, w.nothing()
		}
		select {
		case m := <-w.answers:
			answer, again, err := w.hear(m)
			if answer != nil || err != nil {
				return answer, err
			}
			due = again
		case <-silence.C:
			due = true
		case <-ctx.Done():
			return nil, w.unknown()
		}
	}
}

// nothing says why nobody is at it (any more).
func (w *nodeGroupWish) nothing() error {
	if w.refusal != nil {
		return w.refusal // and nobody else has done anything
	}

	return busErrorf("replicas of provider %s are busy or stopping; nothing was done", w.provider)
}

// unknown says that nobody can tell; a refusal says nothing of what was sent before
// it.
func (w *nodeGroupWish) unknown() error {
	if w.refusal != nil {
		return timeoutErrorf("no answer from provider %s to %s, and to the same again: %w", w.provider, w.verb, w.refusal)
	}

	return timeoutErrorf("no answer from provider %s to %s: whether it was done will show", w.provider, w.verb)
}

// send has one more replica asked.
func (w *nodeGroupWish) send(ctx context.Context) error {
	payload, err := proto.Marshal(nodeGroupRequest(w.id, w.body, nodeGroupTimeout(ctx), time.Now()))
	if err != nil {
		return Errorf(driverv1.Code_CODE_INVALID_ARGUMENT, "encode a request about node groups: %w", err)
	}
	reply := strings.Join([]string{root, w.client.cluster, string(TreeReply), w.provider, nodeGroupCaller, nuid.Next()}, ".")
	w.replies = append(w.replies, reply)
	w.client.mu.Lock()
	w.client.waiting[reply] = w.answers
	w.client.mu.Unlock()
	if err := w.client.conn.publish(&nats.Msg{Subject: w.subject, Reply: reply, Data: payload}); err != nil {
		return busErrorf("ask provider %s about node groups: %w", w.provider, err)
	}
	w.open++

	return nil
}

func nodeGroupRequest(id string, body *nodegroupv1.Envelope, timeout time.Duration, now time.Time) *nodegroupv1.Envelope {
	return &nodegroupv1.Envelope{
		RequestId: id, Body: body.GetBody(), Timeout: durationpb.New(timeout), AcceptBy: timestamppb.New(now.Add(acceptBy)),
	}
}

// hear takes up what came back. Neither an answer nor an error says to go on
// waiting; again, that another replica may be asked at once.
func (w *nodeGroupWish) hear(m *nats.Msg) (answer *nodegroupv1.Envelope, again bool, err error) {
	if isNoResponders(m) {
		w.open--
		if w.open == 0 && w.refusal == nil {
			return nil, false, busErrorf("no replica of provider %s that serves node groups is on the bus", w.provider)
		}

		return nil, false, nil
	}
	answer = &nodegroupv1.Envelope{}
	if err := proto.Unmarshal(m.Data, answer); err != nil || answer.GetRequestId() != w.id {
		w.client.log.Warn("answer about node groups cannot be read", "subject", m.Subject, "err", err)

		return nil, false, nil // who sent it may have done it, as if it were silent
	}
	w.open--
	if answer.GetRefused() {
		return nil, true, nil
	}
	err = ErrorOf(answer.GetStatus())
	switch {
	case err == nil:
		return answer, false, nil
	case w.changes && w.refusal != nil:
		return nil, false, w.unknown() // it failed twice: once perhaps because of the other
	case w.changes && w.open > 0:
		// Perhaps because another one is doing it, or has: that one's answer decides.
		w.refusal = err

		return nil, false, nil
	default:
		return nil, false, err
	}
}

// forget has answers that still come dropped.
func (w *nodeGroupWish) forget() {
	w.client.mu.Lock()
	defer w.client.mu.Unlock()
	for _, reply := range w.replies {
		delete(w.client.waiting, reply)
	}
}

// nodeGroupTimeout is what is left of a context's time, within reason.
func nodeGroupTimeout(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return min(time.Until(deadline), defaultTimeout)
	}

	return defaultTimeout
}
