package bus

import (
	"errors"
	"strings"

	"github.com/nats-io/nats.go"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// OperatorInbox is the prefix of the inboxes in which people's programs receive
// answers.
const OperatorInbox = "_INBOX_op"

// ServeOutcomes answers requests for a control plane's newest outcomes and its waiting
// operations: newest and waiting return these and must not block.
// There is one message for each outcome, as it was published for audit, and one for
// what waits, if anything does: the first of it if all does not fit, each with the
// first 256 characters of what it waits for. It changes what waiting returns.
func ServeOutcomes(
	conn *Conn, cluster string, newest func() []*driverv1.Audit, waiting func() *driverv1.OpsResponse,
) (stop func(), err error) {
	if err := ValidToken("cluster", cluster); err != nil {
		return nil, err
	}

	return conn.watch(Pattern(cluster, TreeOutcomes), func(m *nats.Msg) {
		// Anywhere else it would be a message of mcm's that it never meant to send.
		if !strings.HasPrefix(m.Reply, OperatorInbox+".") && !strings.HasPrefix(m.Reply, nats.InboxPrefix) {
			return
		}
		// What cannot be sent is left out: the asker gets fewer.
		if w := waiting(); len(w.GetOperations()) > 0 {
			answerWaiting(conn, m.Reply, w)
		}
		for _, audit := range newest() {
			_ = conn.send(m.Reply, "", &driverv1.Envelope{
				OperationId: audit.GetOperationId(), Body: &driverv1.Envelope_Audit{Audit: audit},
			})
		}
	})
}

// answerWaiting answers with as many of the first of w's operations as fit a message. It
// changes w.
func answerWaiting(conn *Conn, reply string, w *driverv1.OpsResponse) {
	for _, op := range w.GetOperations() {
		op.LastProgress = OneLine(op.GetLastProgress())
	}
	for {
		err := conn.send(reply, "", &driverv1.Envelope{Body: &driverv1.Envelope_OpsHeld{OpsHeld: w}})
		all := len(w.GetOperations())
		if !errors.Is(err, ErrTooLarge) || all <= 1 {
			return
		}
		w.Operations = w.GetOperations()[:all/2]
		w.Omitted += uint32(all - all/2)
	}
}

// AskOutcomes returns a function that asks a control plane what has come of its
// newest operations, and what waits. Answers go to outcome and waiting, on one
// goroutine, whenever they come. Stop ends that.
func AskOutcomes(
	conn *Conn, outcome func(*driverv1.Audit), waiting func(cluster string, w *driverv1.OpsResponse),
) (ask func(cluster string) error, stop func(), err error) {
	inbox := conn.nc.NewInbox() + "."
	stop, err = conn.watch(inbox+"*", func(m *nats.Msg) {
		env, err := DecodeMessage(m)
		switch {
		case err != nil:
		case env.GetAudit() != nil:
			outcome(env.GetAudit())
		case env.GetOpsHeld() != nil:
			waiting(strings.TrimPrefix(m.Subject, inbox), env.GetOpsHeld())
		}
	})
	if err != nil {
		return nil, nil, err
	}

	return func(cluster string) error {
		if err := ValidToken("cluster", cluster); err != nil {
			return err
		}

		return conn.send(Pattern(cluster, TreeOutcomes), inbox+cluster, &driverv1.Envelope{
			Body: &driverv1.Envelope_Ops{Ops: &driverv1.OpsRequest{}},
		})
	}, stop, nil
}
