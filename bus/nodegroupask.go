package bus

import (
	"context"
	"fmt"
	"slices"
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
	open    []string         // reply subjects on which an answer may still come; nodeGroupTries at most
	tries   int              // how often it was sent and not found a replica full
	room    <-chan time.Time // when to send it again after one was; nil while that is not known
	pause   time.Duration    // until then, the next time
	refusal error            // what a driver said while others were open
}

// run sends the request, again whenever that may help, and waits for the answer.
func (w *nodeGroupWish) run(ctx context.Context) (*nodegroupv1.Envelope, error) {
	silence := time.NewTicker(nodeGroupSilence)
	defer silence.Stop()
	due := true
	for {
		if due && w.mayHelp() {
			silence.Reset(nodeGroupSilence)
			if err := w.send(ctx); err != nil && w.idle() {
				return nil, err
			}
		}
		if w.idle() && !w.waitsForRoom() {
			return nil, w.nothing()
		}
		select {
		case m := <-w.answers:
			if answer, err := w.hear(m); answer != nil || err != nil {
				return answer, err
			}
			due = false
		case <-w.room:
			due = true
		case <-silence.C:
			due = true
		case <-ctx.Done():
			if w.idle() {
				return nil, w.nothing()
			}

			return nil, w.unknown()
		}
	}
}

// mayHelp tells whether the request may be sent once more.
func (w *nodeGroupWish) mayHelp() bool { return w.refusal == nil && w.tries < nodeGroupTries }

// waitsForRoom tells whether it will be.
func (w *nodeGroupWish) waitsForRoom() bool { return w.refusal == nil && w.room != nil }

// idle tells that nobody is at it.
func (w *nodeGroupWish) idle() bool { return len(w.open) == 0 }

// nothing says why nobody has done it.
func (w *nodeGroupWish) nothing() error {
	if w.refusal != nil {
		return w.refusal // and nobody else has done anything
	}

	return NothingRanf("replicas of provider %s are busy or stopping; nothing was done", w.provider)
}

// unknown says that nobody can tell; a refusal says nothing of what was sent before
// it.
func (w *nodeGroupWish) unknown() error {
	if w.refusal != nil {
		return OutcomeUnknownf("no answer from provider %s to %s, and to the same again: %w", w.provider, w.verb, w.refusal)
	}

	return OutcomeUnknownf("no answer from provider %s to %s: whether it was done will show", w.provider, w.verb)
}

// send has one more replica asked.
func (w *nodeGroupWish) send(ctx context.Context) error {
	payload, err := proto.Marshal(nodeGroupRequest(w.id, w.body, nodeGroupTimeout(ctx), time.Now()))
	if err != nil {
		return Errorf(driverv1.Code_CODE_INVALID_ARGUMENT, "encode a request about node groups: %w", err)
	}
	reply := strings.Join([]string{Root, w.client.cluster, string(TreeReply), w.provider, nodeGroupCaller, nuid.Next()}, ".")
	w.client.mu.Lock()
	w.client.waiting[reply] = w.answers
	w.client.mu.Unlock()
	if err := w.client.conn.Publish(&nats.Msg{Subject: w.subject, Reply: reply, Data: payload}); err != nil {
		w.client.forget(reply)

		return NothingRanf("ask provider %s about node groups: %w", w.provider, err)
	}
	w.open = append(w.open, reply)
	w.tries++
	w.room = nil

	return nil
}

func nodeGroupRequest(id string, body *nodegroupv1.Envelope, timeout time.Duration, now time.Time) *nodegroupv1.Envelope {
	return &nodegroupv1.Envelope{
		RequestId: id, Body: body.GetBody(), Timeout: durationpb.New(timeout), AcceptBy: timestamppb.New(now.Add(AcceptBy)),
	}
}

// hear takes up what came back. Neither an answer nor an error says to go on
// waiting.
func (w *nodeGroupWish) hear(m *nats.Msg) (answer *nodegroupv1.Envelope, err error) {
	if IsNoResponders(m) {
		w.close(m.Subject)
		if w.idle() && w.refusal == nil {
			return nil, NothingRanf("no replica of provider %s that serves node groups is on the bus", w.provider)
		}

		return nil, nil
	}
	answer = &nodegroupv1.Envelope{}
	if err := proto.Unmarshal(m.Data, answer); err != nil || answer.GetRequestId() != w.id {
		w.client.log.Warn("answer about node groups cannot be read", "subject", m.Subject, "err", err)

		return nil, nil // who sent it may have done it, as if it were silent
	}
	w.close(m.Subject)
	if answer.GetRefused() {
		w.tries--
		w.room = time.After(w.pause) // at once after the first, for another replica may have some
		w.pause = min(max(2*w.pause, nodeGroupPause), nodeGroupPauseMax)

		return nil, nil
	}
	if err = ErrorOf(answer.GetStatus()); err == nil {
		err = w.check(answer)
	}
	switch {
	case err == nil:
		return answer, nil
	case w.changes && w.refusal != nil:
		return nil, w.unknown() // it failed twice: once perhaps because of the other
	case w.changes && !w.idle():
		// Perhaps because another one is doing it, or has: that one's answer decides.
		w.refusal = err

		return nil, nil
	default:
		return nil, err
	}
}

// check tells what is wrong with an answer that says that all went well. What of a
// change it was that did, nobody knows then.
func (w *nodeGroupWish) check(answer *nodegroupv1.Envelope) error {
	var given bool
	var size int32
	switch w.verb {
	case nodeGroupGroups:
		given = answer.GetGroupsFound() != nil
	case nodeGroupInstances:
		given = answer.GetInstancesFound() != nil
	case nodeGroupResize:
		given, size = answer.GetResized() != nil, answer.GetResized().GetTargetSize()
	case nodeGroupDelete:
		given, size = answer.GetDeleted() != nil, answer.GetDeleted().GetTargetSize()
	}
	fault := &Error{Code: driverv1.Code_CODE_INTERNAL, Origin: OriginDriver}
	if w.changes {
		fault.Origin = OriginTimeout
	}
	switch {
	case !given:
		fault.Err = fmt.Errorf("the driver of provider %s answered %s without what it was asked for", w.provider, w.verb)
	case size < 0:
		fault.Err = fmt.Errorf("the driver of provider %s answered %s with a size of %d", w.provider, w.verb, size)
	default:
		return nil
	}

	return fault
}

// close notes that there is an answer on a reply subject.
func (w *nodeGroupWish) close(reply string) {
	w.open = slices.DeleteFunc(w.open, func(open string) bool { return open == reply })
}

// nodeGroupTimeout is what is left of a context's time, within reason.
func nodeGroupTimeout(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return min(time.Until(deadline), DefaultTimeout)
	}

	return DefaultTimeout
}
