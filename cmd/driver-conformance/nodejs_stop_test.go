package main

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A replica that is asked to stop while the operations stream refuses what came of its
// last operation stays for as long as it takes to store that.
func TestNodeJS_StopStores(t *testing.T) {
	t.Parallel()
	machine := &driverv1.Machine{Namespace: "ns", Name: "m1", Uid: "u1"}
	for name, tc := range map[string]struct {
		reason string
		env    *driverv1.Envelope
		state  driverv1.Claim_State
	}{
		"settled": {
			"a delete has failed, which mcm is to read there",
			&driverv1.Envelope{OperationId: "u1.delete.0", Body: &driverv1.Envelope_Delete{Delete: &driverv1.DeleteRequest{Machine: machine, Class: small}}},
			driverv1.Claim_STATE_SETTLED,
		},
		"released": {
			"what a create has done is not known, and the next attempt need not wait for the dead replica",
			&driverv1.Envelope{
				OperationId: "u1.create.0", Recover: true,
				Body: &driverv1.Envelope_Create{Create: &driverv1.CreateRequest{Machine: machine, Class: small}},
			},
			driverv1.Claim_STATE_RELEASED,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := bustest.Server(t, embedded.Options{})
			nc := bustest.Raw(t, srv.URL())
			s := newOperations(t, nc)
			subscribed := func(subject string) *nats.Subscription {
				sub, err := nc.SubscribeSync(subject)
				if err != nil {
					t.Fatal(err)
				}

				return sub
			}
			sessions, fetches := subscribed("mcm.v1.default.session.nodejs.*"), subscribed("mcm.v1.default.fetch.nodejs.class")
			claims, acks := subscribed("mcm.v1.default.claim.nodejs.u1"), subscribed(bus.InboxPrefix("nodejs")+".>")
			d, _ := runNodeJS(t, "driver-nodejs-full", srv.URL())
			awaitMessage(t, sessions, func(*nats.Msg) bool { return true }) // it is there
			answers := ask(t, nc, "driver", "m1", tc.env)
			fetch := awaitMessage(t, fetches, func(*nats.Msg) bool { return true }) // it has claimed
			s.limit(t, 100)
			payload, err := bus.Encode(&driverv1.Envelope{Body: &driverv1.Envelope_FetchedClass{FetchedClass: &driverv1.FetchClassResponse{
				Status: &driverv1.Status{Code: driverv1.Code_CODE_UNAVAILABLE, Message: "not now", RetryAfter: durationpb.New(time.Second)},
			}}}, "")
			if err == nil {
				err = fetch.Respond(payload)
			}
			if err != nil {
				t.Fatal(err)
			}
			resultOf(t, answers)
			outcome := awaitMessage(t, claims, func(m *nats.Msg) bool {
				env, err := bus.Decode(m.Data, "")

				return err == nil && env.GetClaim().GetState() == tc.state
			})
			if ack := awaitMessage(t, acks, func(m *nats.Msg) bool { return m.Subject == outcome.Reply }); !strings.Contains(string(ack.Data), `"error"`) {
				t.Fatalf("the stream was to refuse the outcome, and says %s", ack.Data)
			}
			s.limit(t, -1)
			if err := d.Stop(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := d.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := s.claim(t).GetState(); got != tc.state {
				t.Errorf("%s: the claim is left %s, want %s", tc.reason, got, tc.state)
			}
		})
	}
}

// awaitMessage waits for the first message that will do.
func awaitMessage(t *testing.T, sub *nats.Subscription, ok func(*nats.Msg) bool) *nats.Msg {
	t.Helper()
	for {
		m, err := sub.NextMsg(time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		if ok(m) {
			return m
		}
	}
}

// operations is the operations stream, which mcm makes otherwise.
type operations struct {
	js     jetstream.JetStream
	config jetstream.StreamConfig
}

func newOperations(t *testing.T, nc *nats.Conn) *operations {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	s := &operations{js: js, config: jetstream.StreamConfig{
		Name: "MCM_OPS_default_nodejs", Subjects: []string{"mcm.v1.default.claim.nodejs.*"}, MaxMsgsPerSubject: 1,
		Storage: jetstream.MemoryStorage,
	}}
	if _, err := js.CreateStream(t.Context(), s.config); err != nil {
		t.Fatal(err)
	}

	return s
}

// limit has the stream refuse larger messages; -1 for none.
func (s *operations) limit(t *testing.T, bytes int32) {
	t.Helper()
	s.config.MaxMsgSize = bytes
	if _, err := s.js.UpdateStream(t.Context(), s.config); err != nil {
		t.Fatal(err)
	}
}

// claim returns what the stream has of machine u1.
func (s *operations) claim(t *testing.T) *driverv1.Claim {
	t.Helper()
	stream, err := s.js.Stream(t.Context(), s.config.Name)
	if err != nil {
		t.Fatal(err)
	}
	m, err := stream.GetLastMsgForSubject(t.Context(), "mcm.v1.default.claim.nodejs.u1")
	if err != nil {
		t.Fatal(err)
	}
	env, err := bus.Decode(m.Data, "")
	if err != nil {
		t.Fatal(err)
	}

	return env.GetClaim()
}
