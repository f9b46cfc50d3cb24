package caller_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A manager has left a create at a plain driver, and a full replica has taken that
// driver's place when the next manager comes. The claim that was written for the plain
// driver says that the create may be under way: it waits for its deadline.
func TestPlainReplacedByFull(t *testing.T) {
	t.Parallel()
	for name, onlyIfHeld := range map[string]bool{"taken up": false, "given up": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := optest.NewStoredRig(t)
			at, ended := make(chan struct{}, 1), make(chan struct{})
			plainDriver(t, r.NATS.URL(), func(env *driverv1.Envelope) *driverv1.Envelope {
				if env.GetCreate() == nil {
					return unimplemented()
				}
				time.AfterFunc(env.GetTimeout().AsDuration(), func() { close(ended) }) // the cloud does not answer
				at <- struct{}{}

				return nil
			})
			req := optest.Create("m")
			req.Timeout = 3 * time.Second
			ctx, crash := context.WithCancel(t.Context())
			done := optest.Call(ctx, r.Caller, req)
			bustest.Receive(t, "the plain driver's create", at)
			crash()
			bustest.Receive(t, "the first manager's end", done)
			beside := make(chan struct{}, 9)
			r.Replica(t, func(_ context.Context, task *replica.Task) *driverv1.Result {
				select {
				case <-ended:
				default:
					beside <- struct{}{}
				}

				return optest.Created(task)
			})
			successor := optest.NewCaller(t, bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}}), caller.Config{Operations: &caller.StreamConfig{}})
			req.Recover, req.Attempt, req.OnlyIfHeld = true, 1, onlyIfHeld
			for {
				out, err := successor.Call(t.Context(), req)
				if bus.OriginOf(err) != bus.OriginTimeout {
					break
				}
				req.Attempt, req.Until = out.Attempts, out.Until
			}
			select {
			case <-beside:
				t.Error("the full replica was asked while the plain driver may have been at it")
			default:
			}
			select {
			case <-ended:
			default:
				t.Error("the next manager went on while the plain driver may have been at it")
			}
		})
	}
}

func unimplemented() *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: &driverv1.Result{
		Status: &driverv1.Status{Code: driverv1.Code_CODE_UNIMPLEMENTED},
	}}}
}

// Where no plain driver was there to be asked, the next manager waits for none.
func TestPlainNeverThere(t *testing.T) {
	t.Parallel()
	r, g := optest.NewStoredRig(t), optest.NewGate(t)
	g.Release()
	req := optest.Create("m")
	req.Timeout = time.Hour // that is how long it would wait
	_, err := r.Caller.Call(t.Context(), req)
	optest.WantError(t, err, bus.OriginBus, driverv1.Code_CODE_UNAVAILABLE)
	r.Replica(t, g.Handle)
	successor := optest.NewCaller(t, bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}}), caller.Config{Operations: &caller.StreamConfig{}})
	req.Recover, req.Attempt = true, 1
	done := optest.Call(t.Context(), successor, req)
	optest.WantOK(t, bustest.Receive(t, "the outcome", done))
}

// A claim may have been lost along with its stream: where the stream is a new one, a plain
// driver may be at it all the same.
func TestPlainClaimMayBeLost(t *testing.T) {
	t.Parallel()
	r := optest.NewStoredRig(t)
	plainDriver(t, r.NATS.URL(), func(env *driverv1.Envelope) *driverv1.Envelope {
		if env.GetCreate() != nil {
			t.Error("a create, beside the one that may be under way")
		}

		return unimplemented()
	})
	req := optest.Create("m")
	req.Timeout, req.Recover, req.Attempt = time.Hour, true, 1
	waits := make(chan struct{}, 100)
	req.OnWaiting = func(uint32, error) { waits <- struct{}{} }
	ctx, end := context.WithCancel(t.Context())
	done := optest.Call(ctx, r.Caller, req)
	bustest.Receive(t, "word that it waits", waits)
	end()
	bustest.Receive(t, "the call's end", done)
}

// The sessions of a replica whose name stands for plain drivers count for nothing, and the
// log says why.
func TestReplicaCalledPlain(t *testing.T) {
	t.Parallel()
	log := &optest.Violations{}
	srv := bustest.Server(t, embedded.Options{})
	conn := bustest.Connect(t, bus.Config{URLs: []string{srv.URL()}})
	client, err := caller.New(conn, caller.Config{Cluster: optest.Cluster, Logger: log.Warnings()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	heard := make(chan string, 9)
	stop, err := bus.WatchSessions(conn, optest.Cluster, func(s *driverv1.Session) { heard <- s.GetReplica() })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	raw := bustest.Raw(t, srv.URL())
	defer raw.Close()
	for range 3 {
		for _, name := range []string{"plain", "other"} {
			payload, err := bus.Encode(&driverv1.Envelope{Replica: name, Body: &driverv1.Envelope_Session{Session: &driverv1.Session{
				Cluster: optest.Cluster, Provider: optest.Provider, Replica: name, Slots: 1,
			}}}, "")
			if err != nil {
				t.Fatal(err)
			}
			if err := raw.Publish("mcm.v1."+optest.Cluster+".session."+optest.Provider+"."+name, payload); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range 3 {
		if name := bustest.Receive(t, "the other's session", heard); name != "other" {
			t.Errorf("a session of replica %q is passed on", name)
		}
	}
	bustest.Eventually(t, "the other replica is known", func() bool { return len(client.Replicas()) > 0 })
	if all := client.Replicas(); len(all) != 1 || all[0].Session.GetReplica() != "other" {
		t.Errorf("replicas = %v, want the other one alone", all)
	}
	if n := strings.Count(log.All(), "reserved"); n != 1 {
		t.Errorf("%d lines say that the name is reserved, want 1: %s", n, log.All())
	}
}
