package caller_test

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

func offers(h replica.NodeGroupHandler) func(*replica.Config) {
	return func(cfg *replica.Config) { cfg.NodeGroups = h }
}

func newNodeGroupClient(t *testing.T, conn *bus.Conn) *bus.NodeGroupClient {
	t.Helper()
	c, err := bus.NewNodeGroupClient(conn, optest.Cluster, bustest.Quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)

	return c
}

func resize(target int32) *nodegroupv1.Envelope {
	return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Resize{
		Resize: &nodegroupv1.ResizeRequest{Group: "a", ExpectedTarget: 1, Target: target},
	}}
}

func resized(_ context.Context, _ string, req *nodegroupv1.Envelope) *nodegroupv1.Envelope {
	return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Resized{
		Resized: &nodegroupv1.ResizeResponse{TargetSize: req.GetResize().GetTarget()},
	}}
}

// answers handles all requests with copies of one envelope.
func answers(answer *nodegroupv1.Envelope) replica.NodeGroupHandler {
	return func(context.Context, string, *nodegroupv1.Envelope) *nodegroupv1.Envelope {
		return proto.CloneOf(answer)
	}
}

func TestNodeGroupRequestIsAnswered(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	c := newNodeGroupClient(t, r.Conn)
	r.Replica(t, nil) // without node groups: it must not be asked
	rep := r.Replica(t, nil, offers(resized))
	bustest.Eventually(t, "the provider is known", func() bool { return len(c.Providers()) == 1 })
	for range 20 {
		answer, err := c.Ask(t.Context(), optest.Provider, resize(3))
		if err != nil {
			t.Fatal(err)
		}
		if got := answer.GetResized().GetTargetSize(); got != 3 || answer.GetReplica() != rep.Replica() {
			t.Fatalf("size %d by %s, want 3 by %s", got, answer.GetReplica(), rep.Replica())
		}
	}
}

func TestSubjectAboutNodeGroups(t *testing.T) {
	t.Parallel()
	for subject, want := range map[string]bool{
		"mcm.v1.default.nodegroup.virtual.resize":           true,
		"mcm.v1.default.reply.virtual.autoscaler.TOKEN":     true,
		"mcm.v1.default.reply.virtual.CALLER.autoscaler":    false,
		"mcm.v1.default.driver.virtual.delete.ns.nodegroup": false,
		"mcm.v1.default.session.virtual.autoscaler":         false,
	} {
		s, err := bus.ParseSubject(subject)
		if err != nil || s.AboutNodeGroups() != want {
			t.Errorf("%s: got %t (%v), want %t", subject, s.AboutNodeGroups(), err, want)
		}
	}
}

func TestNodeGroupErrorsSayWhatRan(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		offer  replica.NodeGroupHandler
		ask    *nodegroupv1.Envelope // nil is a resize
		origin bus.Origin
		code   driverv1.Code
	}{
		"nobody": {
			reason: "no replica serves node groups, so nothing can have run",
			origin: bus.OriginBus, code: driverv1.Code_CODE_UNAVAILABLE,
		},
		"refusal": {
			reason: "a driver's own word is passed on",
			offer: func(context.Context, string, *nodegroupv1.Envelope) *nodegroupv1.Envelope {
				return &nodegroupv1.Envelope{Status: &driverv1.Status{Code: driverv1.Code_CODE_ABORTED, Message: "size is 7"}}
			},
			origin: bus.OriginDriver, code: driverv1.Code_CODE_ABORTED,
		},
		"panic": {
			reason: "a bug of a driver ends neither the replica nor the wait",
			offer: func(context.Context, string, *nodegroupv1.Envelope) *nodegroupv1.Envelope {
				panic("on purpose") //nolint:forbidigo // what is tested
			},
			origin: bus.OriginDriver, code: driverv1.Code_CODE_INTERNAL,
		},
		"no answer": {
			reason: "as with a panic",
			offer:  func(context.Context, string, *nodegroupv1.Envelope) *nodegroupv1.Envelope { return nil },
			origin: bus.OriginDriver, code: driverv1.Code_CODE_INTERNAL,
		},
		"no size": {
			reason: "it claims to be done, and nobody can tell what",
			offer:  answers(&nodegroupv1.Envelope{}),
			origin: bus.OriginTimeout, code: driverv1.Code_CODE_INTERNAL,
		},
		"impossible size": {
			reason: "as no size",
			offer: answers(&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Resized{
				Resized: &nodegroupv1.ResizeResponse{TargetSize: -1},
			}}),
			origin: bus.OriginTimeout, code: driverv1.Code_CODE_INTERNAL,
		},
		"no size after a delete": {
			reason: "a size of 0 would be believed",
			offer:  answers(&nodegroupv1.Envelope{}),
			ask:    &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Delete{Delete: &nodegroupv1.DeleteRequest{Group: "a"}}},
			origin: bus.OriginTimeout, code: driverv1.Code_CODE_INTERNAL,
		},
		"no groups": {
			reason: "none would be believed",
			offer:  answers(&nodegroupv1.Envelope{}),
			ask:    &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Groups{Groups: &nodegroupv1.GroupsRequest{}}},
			origin: bus.OriginDriver, code: driverv1.Code_CODE_INTERNAL,
		},
		"groups for instances": {
			reason: "what was not asked for is no answer",
			offer: answers(&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_GroupsFound{
				GroupsFound: &nodegroupv1.GroupsResponse{},
			}}),
			ask:    &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Instances{Instances: &nodegroupv1.InstancesRequest{Group: "a"}}},
			origin: bus.OriginDriver, code: driverv1.Code_CODE_INTERNAL,
		},
		"too large": {
			reason: "what does not fit a message is said to be so",
			offer: func(context.Context, string, *nodegroupv1.Envelope) *nodegroupv1.Envelope {
				return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_GroupsFound{GroupsFound: &nodegroupv1.GroupsResponse{
					Groups: []*nodegroupv1.Group{{Description: string(make([]byte, 5<<20))}},
				}}}
			},
			origin: bus.OriginDriver, code: driverv1.Code_CODE_INTERNAL,
		},
		"not UTF-8": {
			reason: "what cannot be encoded is said to be so at once, and not waited for",
			offer: answers(&nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_GroupsFound{GroupsFound: &nodegroupv1.GroupsResponse{
				Groups: []*nodegroupv1.Group{{Description: "\xff"}},
			}}}),
			origin: bus.OriginDriver, code: driverv1.Code_CODE_INTERNAL,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := optest.NewRig(t)
			c := newNodeGroupClient(t, r.Conn)
			r.Replica(t, nil, offers(tc.offer))
			_, err := c.Ask(t.Context(), optest.Provider, cmp.Or(tc.ask, resize(3)))
			if err == nil || bus.OriginOf(err) != tc.origin || bus.CodeOf(err) != tc.code {
				t.Errorf("%v (%v, %v), want %v, %v: %s", err, bus.OriginOf(err), bus.CodeOf(err), tc.origin, tc.code, tc.reason)
			}
		})
	}
}

// A replica that stops does not wait for a cloud that does not answer.
func TestNodeGroupDrainTimeoutCancels(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	c := newNodeGroupClient(t, r.Conn)
	entered, ended := make(chan struct{}, 3), make(chan error, 3) // as often as it is sent
	rep := r.Replica(t, nil, func(cfg *replica.Config) { cfg.DrainTimeout = 10 * time.Millisecond },
		offers(func(ctx context.Context, _ string, _ *nodegroupv1.Envelope) *nodegroupv1.Envelope {
			entered <- struct{}{}
			<-ctx.Done()
			ended <- ctx.Err()

			return &nodegroupv1.Envelope{Status: bus.StatusOf(ctx.Err())}
		}))
	asked := make(chan error, 1)
	go func() {
		_, err := c.Ask(t.Context(), optest.Provider, resize(3))
		asked <- err
	}()
	bustest.Receive(t, "the handler", entered)
	rep.Stop()
	if err := bustest.Receive(t, "the end of the handler's context", ended); !errors.Is(err, context.Canceled) {
		t.Errorf("context ended by %v, want it cancelled", err)
	}
	optest.WantError(t, bustest.Receive(t, "the answer", asked), bus.OriginDriver, driverv1.Code_CODE_CANCELED)
	if err := bustest.Receive(t, "Run returns", rep.Done); err != nil {
		t.Errorf("Run: %v", err)
	}
}

// A lost answer is asked for under the same id, and a replica without a slot is
// passed over.
func TestNodeGroupRequestIsRepeatedUnderItsID(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	c := newNodeGroupClient(t, r.Conn)
	ids := make(chan string, 3)
	tries := 0
	serveNodeGroups(t, r, func(req *nodegroupv1.Envelope) *nodegroupv1.Envelope {
		ids <- req.GetRequestId()
		tries++
		switch tries {
		case 1:
			return nil // lost
		case 2:
			return &nodegroupv1.Envelope{Refused: true}
		}

		return resized(t.Context(), optest.Cluster, req)
	})
	answer, err := c.Ask(t.Context(), optest.Provider, resize(3))
	if err != nil || answer.GetResized().GetTargetSize() != 3 {
		t.Fatalf("%v, %v", answer, err)
	}
	first, second, third := <-ids, <-ids, <-ids
	if first == "" || first != second || second != third {
		t.Errorf("ids %q, %q, %q: want the same one", first, second, third)
	}
}

// A replica that is full of other requests for a moment has room soon.
func TestNodeGroupFullForAMoment(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	c := newNodeGroupClient(t, r.Conn)
	sent := 0
	serveNodeGroups(t, r, func(req *nodegroupv1.Envelope) *nodegroupv1.Envelope {
		sent++
		if sent <= 5 {
			return &nodegroupv1.Envelope{Refused: true}
		}

		return resized(t.Context(), optest.Cluster, req)
	})
	answer, err := c.Ask(t.Context(), optest.Provider, resize(3))
	if err != nil || answer.GetResized().GetTargetSize() != 3 {
		t.Errorf("%v, %v", answer, err)
	}
}

// Replicas that stay full have done nothing, which is known of all but those that
// say nothing.
func TestNodeGroupStaysFull(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		silent int // of those that are asked first
		within time.Duration
		most   int64 // times that it is sent
		origin bus.Origin
		want   string
	}{
		"all":         {"each has said so; the pauses between requests grow", 0, 3300 * time.Millisecond, 6, bus.OriginBus, "nothing was done"},
		"but for one": {"it may have done it before the others were asked", 1, 3 * time.Second, 5, bus.OriginTimeout, "whether it was done will show"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := optest.NewRig(t)
			c := newNodeGroupClient(t, r.Conn)
			var sent atomic.Int64
			serveNodeGroups(t, r, func(*nodegroupv1.Envelope) *nodegroupv1.Envelope {
				if sent.Add(1) <= int64(tc.silent) {
					return nil
				}

				return &nodegroupv1.Envelope{Refused: true}
			})
			ctx, cancel := context.WithTimeout(t.Context(), tc.within)
			defer cancel()
			_, err := c.Ask(ctx, optest.Provider, resize(3))
			if bus.OriginOf(err) != tc.origin || err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v (%v), want %q (%v): %s", err, bus.OriginOf(err), tc.want, tc.origin, tc.reason)
			}
			if got := sent.Load(); got > tc.most {
				t.Errorf("sent %d times, want %d at most", got, tc.most)
			}
		})
	}
}

// However much a gateway looks, there is room for its changes.
func TestNodeGroupLooksLeaveRoomForChanges(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	c := newNodeGroupClient(t, r.Conn)
	looking, looked := make(chan struct{}), make(chan struct{})
	r.Replica(t, nil, func(cfg *replica.Config) { cfg.Slots = 1 }, offers(func(ctx context.Context, of string, req *nodegroupv1.Envelope) *nodegroupv1.Envelope {
		if req.GetGroups() == nil {
			return resized(ctx, of, req)
		}
		close(looking)
		<-looked

		return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_GroupsFound{GroupsFound: &nodegroupv1.GroupsResponse{}}}
	}))
	bustest.Eventually(t, "the provider is known", func() bool { return len(c.Providers()) == 1 })
	done := make(chan error, 1)
	go func() {
		_, err := c.Ask(t.Context(), optest.Provider, &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Groups{Groups: &nodegroupv1.GroupsRequest{}}})
		done <- err
	}()
	<-looking
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // for the case that there is none
	defer cancel()
	if _, err := c.Ask(ctx, optest.Provider, resize(3)); err != nil {
		t.Error(err)
	}
	close(looked)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A refusal of the repeat says nothing of the request whose answer was lost: the
// size may be another because it was done.
func TestNodeGroupRefusalAfterALostAnswer(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	c := newNodeGroupClient(t, r.Conn)
	tries := 0
	serveNodeGroups(t, r, func(*nodegroupv1.Envelope) *nodegroupv1.Envelope {
		tries++
		if tries == 1 {
			return nil // lost
		}

		return &nodegroupv1.Envelope{Status: &driverv1.Status{Code: driverv1.Code_CODE_ABORTED, Message: "size is 3"}}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second) // that the first one was lost only time tells
	defer cancel()
	_, err := c.Ask(ctx, optest.Provider, resize(3))
	if bus.OriginOf(err) != bus.OriginTimeout || !strings.Contains(err.Error(), "size is 3") {
		t.Errorf("%v (%v), want an unknown outcome that tells what the driver said", err, bus.OriginOf(err))
	}
}

// A cloud that takes longer than the wait before a repeat is a slow one, and none
// that never answers: whichever answer comes counts, however late.
func TestNodeGroupLateAnswer(t *testing.T) {
	t.Parallel()
	ok := func(req *nodegroupv1.Envelope) *nodegroupv1.Envelope {
		return resized(t.Context(), optest.Cluster, req)
	}
	busy := func(*nodegroupv1.Envelope) *nodegroupv1.Envelope { return &nodegroupv1.Envelope{Refused: true} }
	conflict := func(*nodegroupv1.Envelope) *nodegroupv1.Envelope {
		return &nodegroupv1.Envelope{Status: &driverv1.Status{Code: driverv1.Code_CODE_ABORTED, Message: "size is 3"}}
	}
	silent := func(*nodegroupv1.Envelope) *nodegroupv1.Envelope { return nil }
	type answer = func(*nodegroupv1.Envelope) *nodegroupv1.Envelope
	for name, tc := range map[string]struct {
		reason        string
		second, first answer // in the order in which they answer
		origin        bus.Origin
		want          string // of the error; none if empty
	}{
		"first of two":     {reason: "the repeat is still at work", second: silent, first: ok},
		"while in use":     {reason: "the repeat finds the group in use, by the first", second: conflict, first: ok},
		"conflict, busy":   {"the first has done nothing: the driver's word stands", conflict, busy, bus.OriginDriver, "size is 3"},
		"refused, both":    {"the repeat may be refused for what the first did", conflict, conflict, bus.OriginTimeout, "size is 3"},
		"another has room": {reason: "the first still counts when others are busy", second: busy, first: ok},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := optest.NewRig(t)
			c := newNodeGroupClient(t, r.Conn)
			var held *nats.Msg
			asked := 0
			subscribeNodeGroups(t, r, func(m *nats.Msg, req *nodegroupv1.Envelope) {
				asked++
				switch asked {
				case 1:
					held = m
				case 2:
					respond(t, m, req, tc.second(req))
					respond(t, held, req, tc.first(req))
				}
			})
			answer, err := c.Ask(t.Context(), optest.Provider, resize(3))
			switch {
			case tc.want == "" && (err != nil || answer.GetResized().GetTargetSize() != 3):
				t.Errorf("%v, %v: %s", answer, err, tc.reason)
			case tc.want != "" && (err == nil || bus.OriginOf(err) != tc.origin || !strings.Contains(err.Error(), tc.want)):
				t.Errorf("%v (%v), want %q (%v): %s", err, bus.OriginOf(err), tc.want, tc.origin, tc.reason)
			}
		})
	}
}

// serveNodeGroups answers requests about node groups with what answer returns; nil
// is no answer.
func serveNodeGroups(t *testing.T, r *optest.Rig, answer func(req *nodegroupv1.Envelope) *nodegroupv1.Envelope) {
	t.Helper()
	subscribeNodeGroups(t, r, func(m *nats.Msg, req *nodegroupv1.Envelope) { respond(t, m, req, answer(req)) })
}

// subscribeNodeGroups has requests about node groups handled, one after the other.
func subscribeNodeGroups(t *testing.T, r *optest.Rig, handle func(m *nats.Msg, req *nodegroupv1.Envelope)) {
	t.Helper()
	nc := bustest.Raw(t, r.NATS.URL())
	_, err := nc.QueueSubscribe("mcm.v1."+optest.Cluster+".nodegroup."+optest.Provider+".*", "driver", func(m *nats.Msg) {
		req := &nodegroupv1.Envelope{}
		if err := proto.Unmarshal(m.Data, req); err != nil {
			t.Error(err)
		}
		handle(m, req)
	})
	if err == nil {
		err = nc.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// respond sends an answer; nil is none.
func respond(t *testing.T, m *nats.Msg, req, answer *nodegroupv1.Envelope) {
	t.Helper()
	if answer == nil {
		return
	}
	answer.RequestId = req.GetRequestId()
	payload, err := proto.Marshal(answer)
	if err == nil {
		err = m.Respond(payload)
	}
	if err != nil {
		t.Error(err)
	}
}

func TestNodeGroupRequestsThatAreDropped(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	ran := make(chan struct{}, 9)
	r.Replica(t, nil, offers(func(ctx context.Context, of string, req *nodegroupv1.Envelope) *nodegroupv1.Envelope {
		ran <- struct{}{}

		return resized(ctx, of, req)
	}))
	nc := bustest.Raw(t, r.NATS.URL())
	ask := func(reply string, env *nodegroupv1.Envelope) *nodegroupv1.Envelope {
		t.Helper()
		sub, err := nc.SubscribeSync(reply)
		if err != nil {
			t.Fatal(err)
		}
		payload, err := proto.Marshal(env)
		if err == nil {
			err = nc.PublishRequest("mcm.v1."+optest.Cluster+".nodegroup."+optest.Provider+".resize", reply, payload)
		}
		if err != nil {
			t.Fatal(err)
		}
		m, err := sub.NextMsg(time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		answer := &nodegroupv1.Envelope{}
		if err := proto.Unmarshal(m.Data, answer); err != nil {
			t.Fatal(err)
		}

		return answer
	}
	if err := nc.PublishRequest("mcm.v1."+optest.Cluster+".nodegroup."+optest.Provider+".resize",
		"mcm.v1."+optest.Cluster+".reply.other.autoscaler.x", []byte("x")); err != nil {
		t.Fatal(err)
	}
	stale := resize(3)
	stale.RequestId, stale.AcceptBy = "r1", timestamppb.New(time.Now().Add(-time.Minute))
	own := "mcm.v1." + optest.Cluster + ".reply." + optest.Provider + ".autoscaler."
	if got := ask(own+"a", stale).GetStatus().GetCode(); got != driverv1.Code_CODE_ABORTED {
		t.Errorf("a stale request: %v, want Aborted [GROUP-6]", got)
	}
	unknown := &nodegroupv1.Envelope{RequestId: "r2"}
	if got := ask(own+"b", unknown).GetStatus().GetCode(); got != driverv1.Code_CODE_UNIMPLEMENTED {
		t.Errorf("an unknown body: %v, want Unimplemented [GROUP-5]", got)
	}
	wrong := &nodegroupv1.Envelope{RequestId: "r3", Body: &nodegroupv1.Envelope_Groups{Groups: &nodegroupv1.GroupsRequest{}}}
	if got := ask(own+"c", wrong).GetStatus().GetCode(); got != driverv1.Code_CODE_INVALID_ARGUMENT {
		t.Errorf("another body than the subject says: %v, want InvalidArgument", got)
	}
	if len(ran) != 0 {
		t.Errorf("the driver was asked %d times, want none", len(ran))
	}
}

// What deploy/nats lets the gateway and a driver do is enough, and the gateway
// hears no answers to mcm.
func TestNodeGroupPermissionsSuffice(t *testing.T) {
	t.Parallel()
	const permissions = `
authorization { users = [
  { user: driver, password: driver, permissions: {
    subscribe: { allow: ["mcm.v1.default.nodegroup.virtual.* driver", "mcm.v1.default.driver.virtual.> driver", "mcm.v1.default.>", "_INBOX.>", "$SRV.>"] }
    publish: { allow: [">"] } } }
  { user: gateway, password: gateway, permissions: {
    subscribe: { allow: ["mcm.v1.default.reply.*.autoscaler.*", "mcm.v1.default.session.*.*"] }
    publish: { allow: ["mcm.v1.default.nodegroup.>"] } } }
] }`
	file := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(file, []byte(permissions), 0o600); err != nil {
		t.Fatal(err)
	}
	r := &optest.Rig{NATS: bustest.Server(t, embedded.Options{ConfigFile: file})}
	as := func(user string) string { return "nats://" + user + ":" + user + "@" + r.NATS.URL()[len("nats://"):] }
	log := &optest.Violations{}
	gateway := bustest.Connect(t, bus.Config{URLs: []string{as("gateway")}, Logger: log.Logger()})
	c := newNodeGroupClient(t, gateway)
	driver := bustest.Connect(t, bus.Config{URLs: []string{as("driver")}})
	optest.Run(t, driver, nil, offers(resized))
	bustest.Eventually(t, "the provider is known", func() bool { return len(c.Providers()) == 1 })
	if _, err := c.Ask(t.Context(), optest.Provider, resize(3)); err != nil {
		t.Error(err)
	}
	if got := log.All(); got != "" {
		t.Errorf("the gateway overstepped its permissions: %q", got)
	}
}
