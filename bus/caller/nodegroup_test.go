package caller_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// gateway returns a caller as the cluster-autoscaler's gateway has it.
func gateway(t *testing.T, conn *bus.Conn) *caller.Caller {
	t.Helper()
	c, err := caller.New(conn, caller.Config{Cluster: optest.Cluster, Name: "autoscaler", Logger: bustest.Quiet()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)

	return c
}

func groupsOf(req *driverv1.NodeGroupsRequest) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_NodeGroups{NodeGroups: req}}
}

func resize(target int32) *driverv1.Envelope {
	return groupsOf(&driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Resize{
		Resize: &driverv1.NodeGroupResizeRequest{Group: "a", ExpectedTarget: 1, Target: target},
	}})
}

func listGroups() *driverv1.Envelope {
	return groupsOf(&driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Groups{Groups: &driverv1.NodeGroupListRequest{}}})
}

// wish makes a request of a body.
func wish(body *driverv1.Envelope) caller.Request {
	return caller.Request{Provider: optest.Provider, OperationID: nuid.Next(), Body: body, Timeout: 20 * time.Second}
}

// resized says that a resize was done, or how many groups there are.
func resized(req *driverv1.Envelope) *driverv1.Result {
	if req.GetNodeGroups().GetResize() == nil {
		return foundGroups()
	}

	return &driverv1.Result{Payload: &driverv1.Result_NodeGroups{NodeGroups: &driverv1.NodeGroupsResponse{
		Body: &driverv1.NodeGroupsResponse_Resize{
			Resize: &driverv1.NodeGroupResizeResponse{TargetSize: req.GetNodeGroups().GetResize().GetTarget()},
		},
	}}}
}

func foundGroups(groups ...*driverv1.NodeGroup) *driverv1.Result {
	return &driverv1.Result{Payload: &driverv1.Result_NodeGroups{NodeGroups: &driverv1.NodeGroupsResponse{
		Body: &driverv1.NodeGroupsResponse_Groups{Groups: &driverv1.NodeGroupListResponse{Groups: groups}},
	}}}
}

func doesResize(_ context.Context, t *replica.Task) *driverv1.Result { return resized(t.Request) }

// withoutGroups is a replica that serves no node groups.
func withoutGroups(cfg *replica.Config) {
	cfg.Capabilities = slices.DeleteFunc(cfg.Capabilities, func(op driverv1.Operation) bool {
		return op == driverv1.Operation_OPERATION_NODE_GROUPS
	})
}

func TestNodeGroupRequestIsAnswered(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	c := gateway(t, r.Conn)
	r.Replica(t, doesResize, withoutGroups) // it must not be asked
	rep := r.Replica(t, doesResize)
	for range 20 {
		out, err := c.Call(t.Context(), wish(resize(3)))
		if err != nil {
			t.Fatal(err)
		}
		if got := out.Result.GetNodeGroups().GetResize().GetTargetSize(); got != 3 || out.Replica != rep.Replica() {
			t.Fatalf("size %d by %s, want 3 by %s", got, out.Replica, rep.Replica())
		}
	}
}

func TestNodeGroupErrorsSayWhatRan(t *testing.T) {
	t.Parallel()
	says := func(result *driverv1.Result) replica.HandlerFunc {
		return func(context.Context, *replica.Task) *driverv1.Result { return proto.CloneOf(result) }
	}
	for name, tc := range map[string]struct {
		reason string
		driver replica.HandlerFunc // nil serves no node groups
		ask    *driverv1.Envelope  // nil is a look at the groups
		origin bus.Origin
		code   driverv1.Code
	}{
		"none": {
			reason: "no replica serves node groups, so nothing can have run",
			ask:    resize(3), origin: bus.OriginBus, code: driverv1.Code_CODE_UNAVAILABLE,
		},
		"refusal": {
			reason: "a driver's own word is passed on",
			driver: says(bus.Failure(driverv1.Code_CODE_ABORTED, "size is 7")),
			origin: bus.OriginDriver, code: driverv1.Code_CODE_ABORTED,
		},
		"panic": {
			reason: "a bug of a driver ends neither the replica nor the wait",
			driver: func(context.Context, *replica.Task) *driverv1.Result {
				panic("on purpose") //nolint:forbidigo // what is tested
			},
			origin: bus.OriginDriver, code: driverv1.Code_CODE_INTERNAL,
		},
		"no answer": {
			reason: "as with a panic", driver: says(nil),
			origin: bus.OriginDriver, code: driverv1.Code_CODE_INTERNAL,
		},
		"too large": {
			reason: "what does not fit a message is said to be so",
			driver: says(foundGroups(&driverv1.NodeGroup{Description: string(make([]byte, 5<<20))})),
			origin: bus.OriginDriver, code: driverv1.Code_CODE_INTERNAL,
		},
		"not UTF-8": {
			reason: "what cannot be encoded is said to be so at once, and not waited for",
			driver: says(foundGroups(&driverv1.NodeGroup{Description: "\xff"})),
			origin: bus.OriginDriver, code: driverv1.Code_CODE_INTERNAL,
		},
		"nothing": {
			reason: "what this version has no subject for is never sent",
			driver: doesResize, ask: groupsOf(&driverv1.NodeGroupsRequest{}),
			origin: bus.OriginBus, code: driverv1.Code_CODE_INVALID_ARGUMENT,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := optest.NewRig(t)
			c := gateway(t, r.Conn)
			change := []func(*replica.Config){}
			if tc.driver == nil {
				change = append(change, withoutGroups)
			}
			r.Replica(t, tc.driver, change...)
			_, err := c.Call(t.Context(), wish(cmp.Or(tc.ask, listGroups())))
			if err == nil || bus.OriginOf(err) != tc.origin || bus.CodeOf(err) != tc.code {
				t.Errorf("%v (%v, %v), want %v, %v: %s", err, bus.OriginOf(err), bus.CodeOf(err), tc.origin, tc.code, tc.reason)
			}
		})
	}
}

// Plain drivers are not asked about node groups, and who asks need not be allowed to.
func TestNodeGroupsOfAPlainDriver(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	asked := make(chan string, 9)
	nc := bustest.Raw(t, r.NATS.URL())
	for _, tree := range []string{"plain", "driver"} {
		_, err := nc.QueueSubscribe("mcm.v1."+optest.Cluster+"."+tree+".>", "driver", func(m *nats.Msg) { asked <- m.Subject })
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	_, err := gateway(t, r.Conn).Call(t.Context(), wish(resize(3)))
	optest.WantError(t, err, bus.OriginBus, driverv1.Code_CODE_UNAVAILABLE)
	if e, ok := errors.AsType[*bus.Error](err); !ok || e.NoRoom {
		t.Errorf("%#v: it is not worth while to ask again soon", err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if len(asked) > 0 {
		t.Errorf("a request on %s", <-asked)
	}
}

// A replica that stops does not wait for a cloud that does not answer.
func TestNodeGroupDrainTimeoutCancels(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	c := gateway(t, r.Conn)
	entered, ended := make(chan struct{}, 99), make(chan error, 99) // a machine that stalls may have it asked again
	rep := r.Replica(t, func(ctx context.Context, _ *replica.Task) *driverv1.Result {
		entered <- struct{}{}
		<-ctx.Done()
		ended <- ctx.Err()

		return &driverv1.Result{Status: bus.StatusOf(ctx.Err())}
	}, func(cfg *replica.Config) { cfg.DrainTimeout = 10 * time.Millisecond })
	asked := optest.Call(t.Context(), c, wish(listGroups()))
	bustest.Receive(t, "the handler", entered)
	rep.Stop()
	if err := bustest.Receive(t, "the end of the handler's context", ended); !errors.Is(err, context.Canceled) {
		t.Errorf("context ended by %v, want it cancelled", err)
	}
	optest.WantError(t, bustest.Receive(t, "the answer", asked).Err, bus.OriginDriver, driverv1.Code_CODE_CANCELED)
	if err := bustest.Receive(t, "Run returns", rep.Done); err != nil {
		t.Errorf("Run: %v", err)
	}
}

// A step is how a replica that only this test knows treats a request; nil says nothing.
type step func(req *driverv1.Envelope) *driverv1.Envelope

func silent(*driverv1.Envelope) *driverv1.Envelope { return nil }

func full(*driverv1.Envelope) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Busy{Busy: &driverv1.Busy{Reason: driverv1.BusyReason_BUSY_REASON_SLOTS}}}
}

func tooLate(*driverv1.Envelope) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Busy{Busy: &driverv1.Busy{Reason: driverv1.BusyReason_BUSY_REASON_STALE}}}
}

func conflict(*driverv1.Envelope) *driverv1.Envelope {
	return bus.ResultFrame(bus.Failure(driverv1.Code_CODE_ABORTED, "size is 3"))
}

func does(req *driverv1.Envelope) *driverv1.Envelope { return bus.ResultFrame(resized(req)) }

// A stepWire leads to one replica, which treats requests about node groups by one step
// after the other, and by the last one again and again. Nothing else may be published.
type stepWire struct {
	bus.Wire

	t     *testing.T
	steps []step

	mu       sync.Mutex
	replies  nats.MsgHandler
	sessions nats.MsgHandler
	requests []*driverv1.Envelope
}

func (w *stepWire) Subscribe(subject, _ string, f nats.MsgHandler) (bus.Subscription, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch tree := strings.Split(subject, ".")[3]; tree {
	case "reply":
		w.replies = f
	case "session":
		w.sessions = f
	default:
		w.t.Errorf("it listens to %s", subject)
	}

	return w, nil
}

func (*stepWire) Unsubscribe() error { return nil }
func (*stepWire) Drain() error       { return nil }
func (*stepWire) Up() bool           { return true }
func (*stepWire) OnUp(func())        {}
func (*stepWire) ServerID() string   { return "s" }

func (w *stepWire) Publish(m *nats.Msg) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	req, err := bus.DecodeMessage(m)
	if want := "mcm.v1.default.nodegroup." + optest.Provider + "." + bus.RequestVerb(req); err != nil || m.Subject != want {
		w.t.Errorf("a request on %s, %v; want it on %s", m.Subject, err, want)
	}
	w.requests = append(w.requests, req)
	answer := w.steps[0](req)
	if len(w.steps) > 1 {
		w.steps = w.steps[1:]
	}
	if answer == nil {
		return nil
	}
	answer.OperationId, answer.Attempt, answer.Replica = req.GetOperationId(), req.GetAttempt(), "raw"
	payload, err := bus.Encode(answer, "")
	if err != nil {
		w.t.Error(err)
	}
	go w.replies(&nats.Msg{Subject: m.Reply, Data: payload})

	return nil
}

// stepped runs f on the clock of a bubble, with a gateway whose requests are treated by
// steps.
func stepped(t *testing.T, f func(t *testing.T, w *stepWire, c *caller.Caller), all ...step) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &stepWire{t: t, steps: all}
		c, err := caller.New(w, caller.Config{Cluster: optest.Cluster, Name: "autoscaler", Logger: bustest.Quiet()})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		f(t, w, c)
	})
}

// What became of a change that was sent twice is known only if it succeeds; of what
// reads a failure says all.
func TestNodeGroupRequestIsSentAgain(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		ask    *driverv1.Envelope
		steps  []step
		sent   int
		origin bus.Origin
		want   string // of the error; none if empty
		noRoom bool
	}{
		"done":            {reason: "it is done under one id", ask: resize(3), steps: []step{silent, does}, sent: 2},
		"full":            {"it was not begun", resize(3), []step{full}, 1, bus.OriginBus, "are busy", true},
		"stale":           {"nor was this, and the remedy is another", resize(3), []step{tooLate}, 1, bus.OriginBus, "compare its clock", true},
		"full afterwards": {"the first may have done it", resize(3), []step{silent, full}, 2, bus.OriginTimeout, "are busy", true},
		"refused": {
			"the size may be another because the first has done it", resize(3), []step{silent, conflict}, 2, bus.OriginTimeout, "size is 3", false,
		},
		"refused at once":     {"nothing else was asked", resize(3), []step{conflict}, 1, bus.OriginDriver, "size is 3", false},
		"read, refused later": {"what reads has no effect to doubt", listGroups(), []step{silent, conflict}, 2, bus.OriginDriver, "size is 3", false},
		"read, full":          {"as a change, but that it may have run means nothing", listGroups(), []step{silent, full}, 2, bus.OriginBus, "are busy", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			stepped(t, func(t *testing.T, w *stepWire, c *caller.Caller) {
				t.Helper()
				req := wish(tc.ask)
				out, err := c.Call(t.Context(), req)
				e, _ := errors.AsType[*bus.Error](err)
				switch {
				case tc.want == "" && (err != nil || out.Result.GetNodeGroups().GetResize().GetTargetSize() != 3):
					t.Errorf("%v, %v: %s", out.Result, err, tc.reason)
				case tc.want != "" && (e == nil || e.Origin != tc.origin || e.NoRoom != tc.noRoom || !strings.Contains(err.Error(), tc.want)):
					t.Errorf("%#v, want %q (%v, no room: %t): %s", err, tc.want, tc.origin, tc.noRoom, tc.reason)
				}
				if len(w.requests) != tc.sent {
					t.Errorf("sent %d times, want %d", len(w.requests), tc.sent)
				}
				for n, got := range w.requests {
					if got.GetOperationId() != req.OperationID || int(got.GetAttempt()) != n+1 || got.GetEarlierMayRun() ||
						got.GetRecover() != (n > 0 && bus.EditsNodeGroup(got)) {
						t.Errorf("request %d: %v", n, got)
					}
				}
			}, tc.steps...)
		})
	}
}

// Who asks again, as there was no room, has what was sent before count.
func TestNodeGroupRequestOfSeveralCalls(t *testing.T) {
	t.Parallel()
	stepped(t, func(t *testing.T, w *stepWire, c *caller.Caller) {
		t.Helper()
		req := wish(resize(3))
		out, err := c.Call(t.Context(), req)
		optest.WantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_UNAVAILABLE)
		req.Recover, req.Attempt = true, out.Attempts
		_, err = c.Call(t.Context(), req)
		optest.WantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_ABORTED)
		if got := w.requests[2].GetAttempt(); got != 2 {
			t.Errorf("attempt %d, want 2: the one that was refused before is no attempt", got)
		}
	}, silent, full, conflict)
}

// A replica that speaks another protocol may hear the request. Which one is asked is not
// for the gateway to choose.
func TestNodeGroupRequestBesideAStrangeReplica(t *testing.T) {
	t.Parallel()
	stepped(t, func(t *testing.T, w *stepWire, c *caller.Caller) {
		t.Helper()
		const later = 1000
		payload, err := bus.Encode(&driverv1.Envelope{Replica: "strange", Body: &driverv1.Envelope_Session{Session: &driverv1.Session{
			Cluster: optest.Cluster, Provider: optest.Provider, Replica: "strange", Sequence: 1, Protocol: later, ProtocolMin: later,
		}}}, "")
		if err != nil {
			t.Fatal(err)
		}
		w.sessions(&nats.Msg{Subject: "mcm.v1." + optest.Cluster + ".session." + optest.Provider + ".strange", Data: payload})
		if n := len(c.Replicas()); n != 1 {
			t.Fatalf("%d replicas are known, want one", n)
		}
		if _, err := c.Call(t.Context(), wish(resize(3))); err != nil {
			t.Error(err)
		}
	}, does)
}

// A change that is not answered in time may have been made.
func TestNodeGroupRequestIsNotAnswered(t *testing.T) {
	t.Parallel()
	stepped(t, func(t *testing.T, _ *stepWire, c *caller.Caller) {
		t.Helper()
		_, err := c.Call(t.Context(), wish(resize(3)))
		optest.WantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_DEADLINE_EXCEEDED)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err = c.Call(ctx, wish(resize(3)))
		optest.WantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_DEADLINE_EXCEEDED)
		if _, err = c.Call(ctx, wish(listGroups())); !errors.Is(err, context.DeadlineExceeded) || bus.OriginOf(err) == bus.OriginTimeout {
			t.Errorf("a read: %v (%v), want the context's own end", err, bus.OriginOf(err))
		}
	}, silent)
}

// A slow cloud is no lost request: its replica says that it has it, and nothing is sent
// again until that replica is dead.
func TestNodeGroupSlowCloud(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		dies   bool
		step   step // of the next replica
		origin bus.Origin
		want   string
	}{
		"answers":           {reason: "it was at work all the time"},
		"dies":              {reason: "another one is asked, which finds it done", dies: true, step: does},
		"dies, and refused": {"what the first one did is not known", true, conflict, bus.OriginTimeout, "size is 3"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := optest.NewRig(t)
			c := gateway(t, r.Conn)
			gate, taken := make(chan struct{}), make(chan uint32, 9)
			var entered atomic.Int64
			rep := r.Replica(t, func(ctx context.Context, task *replica.Task) *driverv1.Result {
				entered.Add(1)
				select {
				case <-gate:
				case <-ctx.Done():
				}

				return resized(task.Request)
			})
			req := wish(resize(3))
			req.OnAccepted = func(attempt uint32, _ string) { taken <- attempt }
			asked := optest.Call(t.Context(), c, req)
			sent := bustest.Receive(t, "the replica says that it has the request", taken)
			if tc.dies {
				answers(t, r, tc.step)
				rep.Proxy.Cut()
			} else {
				close(gate)
			}
			got := bustest.Receive(t, "the answer", asked)
			switch {
			case tc.want == "" && (got.Err != nil || got.Out.Result.GetNodeGroups().GetResize().GetTargetSize() != 3):
				t.Errorf("%v, %v: %s", got.Out.Result, got.Err, tc.reason)
			case tc.want != "" && (bus.OriginOf(got.Err) != tc.origin || !strings.Contains(fmt.Sprint(got.Err), tc.want)):
				t.Errorf("%v (%v), want %q (%v): %s", got.Err, bus.OriginOf(got.Err), tc.want, tc.origin, tc.reason)
			}
			if n := entered.Load(); n > int64(sent) {
				t.Errorf("the driver was asked %d times, %d more than before its replica said that it has the request", n, n-int64(sent))
			}
		})
	}
}

// answers has another replica treat requests about node groups, each by the same step.
func answers(t *testing.T, r *optest.Rig, treat step) {
	t.Helper()
	nc := bustest.Raw(t, r.NATS.URL())
	_, err := nc.QueueSubscribe("mcm.v1."+optest.Cluster+".nodegroup."+optest.Provider+".*", "driver", func(m *nats.Msg) {
		req, err := bus.DecodeMessage(m)
		if err != nil {
			t.Error(err)

			return
		}
		answer := treat(req)
		answer.OperationId, answer.Attempt, answer.Replica = req.GetOperationId(), req.GetAttempt(), "raw"
		payload, err := bus.Encode(answer, "")
		if err == nil {
			err = m.Respond(payload)
		}
		if err != nil {
			t.Error(err)
		}
	})
	if err == nil {
		err = nc.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// However much is looked at node groups, there is room for their changes, and for reads
// of machines; each has no more than its own.
func TestNodeGroupLanes(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	c := gateway(t, r.Conn)
	entered, gate := make(chan struct{}, 9), make(chan struct{})
	r.Replica(t, func(_ context.Context, task *replica.Task) *driverv1.Result {
		entered <- struct{}{}
		<-gate
		if task.Operation == driverv1.Operation_OPERATION_NODE_GROUPS {
			return resized(task.Request)
		}

		return &driverv1.Result{}
	}, func(cfg *replica.Config) { cfg.Slots = 1 })
	var running []<-chan optest.Answer
	for _, req := range []caller.Request{wish(listGroups()), wish(resize(3)), optest.Status("m")} {
		running = append(running, optest.Call(t.Context(), r.Caller, req))
		bustest.Receive(t, "the driver is asked beside the others", entered)
	}
	for _, req := range []caller.Request{wish(listGroups()), wish(resize(4)), optest.Status("m2")} {
		_, err := c.Call(t.Context(), req)
		if e, ok := errors.AsType[*bus.Error](err); !ok || !e.NoRoom {
			t.Errorf("a second %s: %v, want it refused", bus.RequestVerb(req.Body), err)
		}
	}
	close(gate)
	for _, one := range running {
		optest.WantOK(t, bustest.Receive(t, "the answer", one))
	}
	for _, req := range []caller.Request{wish(listGroups()), wish(resize(4)), optest.Status("m2")} {
		if _, err := c.Call(t.Context(), req); err != nil {
			t.Errorf("%s, when the slots are free again: %v", bus.RequestVerb(req.Body), err)
		}
	}
}

// A subject of node groups takes the request that it names and nothing else.
func TestNodeGroupSubjects(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	var ran atomic.Int64
	rep := r.Replica(t, func(_ context.Context, task *replica.Task) *driverv1.Result {
		ran.Add(1)

		return resized(task.Request)
	})
	nc := bustest.Raw(t, r.NATS.URL())
	root := "mcm.v1." + optest.Cluster + "."
	if err := nc.PublishRequest(root+"nodegroup."+optest.Provider+".resize", root+"reply.other.autoscaler.x", []byte("x")); err != nil {
		t.Fatal(err)
	}
	stale, deletion := resize(3), optest.Create("m").Body
	stale.AcceptBy = timestamppb.New(time.Now().Add(-time.Minute))
	deletion = &driverv1.Envelope{
		ClaimTerms: &driverv1.ClaimTerms{Sequence: new(uint64(0))},
		Body:       &driverv1.Envelope_Delete{Delete: &driverv1.DeleteRequest{Machine: bus.MachineOf(deletion)}},
	}
	below := "nodegroup." + optest.Provider + "."
	for name, tc := range map[string]struct {
		subject string
		env     *driverv1.Envelope
		json    bool
		code    driverv1.Code // busy for OK
	}{
		"stale":                  {below + "resize", stale, false, driverv1.Code_CODE_OK},
		"nothing":                {below + "resize", groupsOf(&driverv1.NodeGroupsRequest{}), false, driverv1.Code_CODE_UNIMPLEMENTED},
		"another body":           {below + "groups", resize(3), false, driverv1.Code_CODE_INVALID_ARGUMENT},
		"delete of a machine":    {below + "delete", deletion, false, driverv1.Code_CODE_INVALID_ARGUMENT},
		"on the driver's tree":   {"driver." + optest.Provider + ".groups.ns.m", listGroups(), false, driverv1.Code_CODE_INVALID_ARGUMENT},
		"on the replica's tree":  {"replica." + optest.Provider + "." + rep.Replica() + ".resize.ns.m", resize(3), false, driverv1.Code_CODE_INVALID_ARGUMENT},
		"a change in JSON":       {below + "resize", resize(3), true, driverv1.Code_CODE_INVALID_ARGUMENT},
		"named as the operation": {below + "nodegroups", listGroups(), false, driverv1.Code_CODE_INVALID_ARGUMENT},
		"a list of instances":    {below + "list", &driverv1.Envelope{Body: &driverv1.Envelope_List{List: &driverv1.ListRequest{}}}, false, driverv1.Code_CODE_INVALID_ARGUMENT},
	} {
		tc.env.OperationId, tc.env.Attempt = "o", 1
		answer := exchange(t, nc, root+tc.subject, tc.env, tc.json)
		if busy := answer.GetBusy(); tc.code == driverv1.Code_CODE_OK {
			if busy.GetReason() != driverv1.BusyReason_BUSY_REASON_STALE {
				t.Errorf("%s: answered %v, want that it is stale [GROUP-6]", name, answer)
			}
		} else if got := answer.GetResult().GetStatus().GetCode(); got != tc.code {
			t.Errorf("%s: answered %v, want %v", name, answer, tc.code)
		}
	}
	if n := ran.Load(); n != 0 {
		t.Errorf("the driver was asked %d times, want none", n)
	}
	look := listGroups()
	look.OperationId, look.Attempt = "o", 1
	if answer := exchange(t, nc, root+below+"groups", look, true); answer.GetResult().GetNodeGroups().GetGroups() == nil {
		t.Errorf("a look in JSON: %v", answer)
	}
}

// exchange sends one request and returns the answer, which comes as it was asked.
func exchange(t *testing.T, nc *nats.Conn, subject string, env *driverv1.Envelope, json bool) *driverv1.Envelope {
	t.Helper()
	reply := "mcm.v1." + optest.Cluster + ".reply." + optest.Provider + ".autoscaler." + nuid.Next()
	sub, err := nc.SubscribeSync(reply)
	if err != nil {
		t.Fatal(err)
	}
	contentType := ""
	if json {
		contentType = bus.ContentTypeJSON
	}
	payload, err := bus.Encode(env, contentType)
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.PublishMsg(&nats.Msg{Subject: subject, Reply: reply, Data: payload, Header: nats.Header{bus.HeaderContentType: {contentType}}}); err != nil {
		t.Fatal(err)
	}
	m, err := sub.NextMsg(time.Minute)
	if err != nil {
		t.Fatalf("%s: %v", subject, err)
	}
	if got := bus.ContentTypeOf(m); got != contentType {
		t.Errorf("%s: answered as %q, asked as %q", subject, got, contentType)
	}
	answer, err := bus.DecodeMessage(m)
	if err != nil {
		t.Fatal(err)
	}

	return answer
}

// What deploy/nats lets the gateway and a driver do is enough, also when the driver has no
// room, and the gateway hears no answers to mcm.
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
	c := gateway(t, bustest.Connect(t, bus.Config{URLs: []string{as("gateway")}, Logger: log.Logger()}))
	entered, gate := make(chan struct{}, 1), make(chan struct{})
	var asked atomic.Int64
	for range 2 {
		driver := bustest.Connect(t, bus.Config{URLs: []string{as("driver")}})
		optest.Run(t, driver, func(_ context.Context, task *replica.Task) *driverv1.Result {
			if asked.Add(1) == 1 {
				entered <- struct{}{}
				<-gate
			}

			return resized(task.Request)
		}, func(cfg *replica.Config) {
			cfg.Slots, cfg.Capabilities = 1, append(cfg.Capabilities, driverv1.Operation_OPERATION_NODE_GROUPS)
		})
	}
	bustest.Eventually(t, "the replicas are known", func() bool { return len(c.Replicas()) == 2 })
	first := optest.Call(t.Context(), c, wish(resize(3)))
	bustest.Receive(t, "a driver is asked", entered)
	bustest.Eventually(t, "its replica is asked again, and not the other one in its place", func() bool {
		_, err := c.Call(t.Context(), wish(resize(3)))
		e, _ := errors.AsType[*bus.Error](err)

		return e != nil && e.NoRoom
	})
	close(gate)
	optest.WantOK(t, bustest.Receive(t, "the answer", first))
	if got := log.All(); got != "" {
		t.Errorf("the gateway overstepped its permissions: %q", got)
	}
}
