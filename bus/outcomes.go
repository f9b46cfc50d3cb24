package bus

import (
	"strings"

	"github.com/nats-io/nats.go"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// OperatorInbox is the prefix of the inboxes in which people's programs receive
// answers.
const OperatorInbox = "_INBOX_op"

// ServeOutcomes answers whoever asks a control plane what has come of its newest
// operations, and what waits: newest and waiting return that and must not block.
// There is one message for each outcome, as it was published for audit, and one for
// all that waits, if anything does.
func ServeOutcomes(
	conn *Conn, cluster string, newest func() []*driverv1.Audit, waiting func() *driverv1.OpsResponse,
) (stop func(), err error) {
	if err := ValidToken("cluster", cluster); err != nil {
		return nil, err
	}

	return conn.watch(wildcard(cluster, TreeOutcomes), func(m *nats.Msg) {
		// Anywhere else it would be a message of mcm's that it never meant to send.
		if !strings.HasPrefix(m.Reply, OperatorInbox+".") && !strings.HasPrefix(m.Reply, nats.InboxPrefix) {
			return
		}
		var answers []*driverv1.Envelope
		if w := waiting(); len(w.GetOperations()) > 0 {
			answers = append(answers, &driverv1.Envelope{Body: &driverv1.Envelope_OpsHeld{OpsHeld: w}})
		}
		for _, audit := range newest() {
			answers = append(answers, &driverv1.Envelope{
				OperationId: audit.GetOperationId(), Body: &driverv1.Envelope_Audit{Audit: audit},
			})
		}
		for _, env := range answers {
			payload, err := Encode(env, "")
			if err == nil {
				err = conn.publish(&nats.Msg{Subject: m.Reply, Data: payload})
			}
			if err != nil {
				return // the asker gets fewer
			}
		}
	})
}

// AskOutcomes returns a function that asks a control plane what has come of its
// newest operations, and what waits. Answers go to outcome and waiting, on one
// goroutine, whenever they come. Stop ends that.
func AskOutcomes(
	conn *Conn, outcome func(*driverv1.Audit), waiting func(cluster string, w *driverv1.OpsResponse),
) (ask func(cluster string) error, stop func(), err error) {
	inbox := conn.nc.NewInbox() + "."
	stop, err = conn.watch(inbox+"*", func(m *nats.Msg) {
		env, err := decodeMsg(m)
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
		payload, err := Encode(&driverv1.Envelope{Body: &driverv1.Envelope_Ops{Ops: &driverv1.OpsRequest{}}}, "")
		if err != nil {
			return err
		}

		return conn.publish(&nats.Msg{Subject: wildcard(cluster, TreeOutcomes), Reply: inbox + cluster, Data: payload})
	}, stop, nil
}
