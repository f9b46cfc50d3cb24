package dispatch_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/mcm/dispatch"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A groupCaller answers requests about node groups by a function of how many came.
type groupCaller struct {
	answer func(n int, req caller.Request) (*caller.Outcome, error)

	mu       sync.Mutex
	requests []caller.Request
	at       []time.Time
	replicas []caller.Replica
	down     bool
}

func (c *groupCaller) Call(ctx context.Context, req caller.Request) (*caller.Outcome, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.requests, c.at = append(c.requests, req), append(c.at, time.Now())
	if ctx.Err() != nil {
		return &caller.Outcome{}, ctx.Err()
	}

	return c.answer(len(c.requests), req)
}

func (c *groupCaller) Replicas() []caller.Replica { return c.replicas }

func (c *groupCaller) Up() bool { return !c.down }

func said(r *driverv1.NodeGroupsResponse) *caller.Outcome {
	return &caller.Outcome{Result: &driverv1.Result{Payload: &driverv1.Result_NodeGroups{NodeGroups: r}}}
}

func sizeIs(n int32) *caller.Outcome {
	return said(&driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Resize{
		Resize: &driverv1.NodeGroupResizeResponse{TargetSize: n},
	}})
}

// noRoom is what the caller says when no replica has a slot, and so many attempts may have
// had an effect before.
func noRoom(attempts uint32) (*caller.Outcome, error) {
	err := bus.NothingRanf("all replicas are busy")
	err.NoRoom = true
	if attempts > 0 {
		err.Origin = bus.OriginTimeout
	}

	return &caller.Outcome{Attempts: attempts}, err
}

// A provider that is taken out of service is not asked for ever, nor forgotten because
// the bus was away.
func TestNodeGroups_Providers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &groupCaller{}
		n := dispatch.NewNodeGroups(c, logr.Discard())
		after := func(d time.Duration, want ...string) {
			t.Helper()
			<-time.After(d) // of the bubble's clock
			if diff := cmp.Diff(want, n.Providers()); diff != "" {
				t.Errorf("providers (-want +got):\n%s", diff)
			}
		}
		hear := func(providers ...string) {
			c.replicas = []caller.Replica{{
				Session: &driverv1.Session{Provider: "machines", Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_CREATE}}, Seen: time.Now(),
			}}
			for _, provider := range providers {
				c.replicas = append(c.replicas, caller.Replica{Seen: time.Now(), Session: &driverv1.Session{
					Provider: provider, Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_NODE_GROUPS},
				}})
			}
		}
		hear("stays", "gone")
		after(0, "gone", "stays")
		hear()
		after(40*time.Minute, "gone", "stays")
		hear("stays")
		after(0, "gone", "stays")
		hear()
		after(21*time.Minute, "stays")
		c.down = true
		after(2*time.Hour, "stays")
		c.down = false
		hear("stays", "gone")
		after(0, "gone", "stays")
	})
}

// Replicas that are full for a moment have room soon: they are asked again under the same
// id, first at once, and then less and less often.
func TestNodeGroups_FullForAMoment(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const refusals = 6
		c := &groupCaller{answer: func(n int, _ caller.Request) (*caller.Outcome, error) {
			if n <= refusals {
				return noRoom(uint32(n / 3)) // of the third one an attempt may have run
			}

			return sizeIs(3), nil
		}}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		begun := time.Now()
		if size, err := dispatch.NewNodeGroups(c, logr.Discard()).Resize(ctx, "p", "g", 1, 3); size != 3 || err != nil {
			t.Errorf("%d, %v", size, err)
		}
		var pauses []time.Duration
		for n, req := range c.requests {
			if n > 0 {
				pauses = append(pauses, c.at[n].Sub(c.at[n-1]))
			}
			if attempts := uint32(n / 3); req.OperationID == "" || req.OperationID != c.requests[0].OperationID ||
				req.Attempt != attempts || req.Recover != (attempts > 0) {
				t.Errorf("request %d has id %q, attempts %d, recover %t; want %q, %d", n, req.OperationID, req.Attempt, req.Recover, c.requests[0].OperationID, attempts)
			}
			if left := 20*time.Second - c.at[n].Sub(begun); req.Timeout != left {
				t.Errorf("request %d may take %v, want what is left: %v", n, req.Timeout, left)
			}
		}
		ms := time.Millisecond
		if diff := cmp.Diff([]time.Duration{0, 150 * ms, 300 * ms, 600 * ms, 1200 * ms, 1200 * ms}, pauses); diff != "" {
			t.Errorf("pauses (-want +got):\n%s", diff)
		}
	})
}

// Replicas that stay full have done nothing, unless one was silent before.
func TestNodeGroups_StayFull(t *testing.T) {
	t.Parallel()
	for attempts, unknown := range map[uint32]bool{0: false, 1: true} {
		synctest.Test(t, func(t *testing.T) {
			c := &groupCaller{answer: func(int, caller.Request) (*caller.Outcome, error) { return noRoom(attempts) }}
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			_, err := dispatch.NewNodeGroups(c, logr.Discard()).Delete(ctx, "p", "g", []string{"i"})
			if dispatch.CodeOf(err) != dispatch.Unavailable || dispatch.Unknowable(err) != unknown {
				t.Errorf("%v, unknowable: %t; want %t after %d attempts", err, dispatch.Unknowable(err), unknown, attempts)
			}
			if len(c.requests) < 3 {
				t.Errorf("asked %d times, want as long as there is time", len(c.requests))
			}
		})
	}
}

// Whoever gives no time gets a minute.
func TestNodeGroups_Deadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &groupCaller{answer: func(int, caller.Request) (*caller.Outcome, error) { return noRoom(0) }}
		begun := time.Now()
		if _, err := dispatch.NewNodeGroups(c, logr.Discard()).Resize(t.Context(), "p", "g", 1, 2); err == nil {
			t.Error("no error")
		}
		if took := time.Since(begun); took != time.Minute {
			t.Errorf("it took %v, want a minute", took)
		}
	})
}

// An answer that is none, to a request that changes something, leaves open what was done.
func TestNodeGroups_ImpossibleAnswers(t *testing.T) {
	t.Parallel()
	group := said(&driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Groups{Groups: &driverv1.NodeGroupListResponse{}}})
	failure := bus.Errorf(driverv1.Code_CODE_ABORTED, "size is 7")
	for name, tc := range map[string]struct {
		reason  string
		ask     func(context.Context, *dispatch.NodeGroups) error
		answer  *caller.Outcome
		err     error
		code    dispatch.Code
		unknown bool
	}{
		"no size":              {"it claims to be done, and what was done is not known", resizeIt, said(nil), nil, dispatch.Internal, true},
		"impossible size":      {"as no size", resizeIt, sizeIs(-1), nil, dispatch.Internal, true},
		"size after a delete":  {"what was not asked for is no answer", deleteIt, sizeIs(3), nil, dispatch.Internal, true},
		"no groups":            {"none would be believed", listThem, said(nil), nil, dispatch.Internal, false},
		"no result":            {"nor would this", listThem, &caller.Outcome{}, nil, dispatch.Internal, false},
		"groups for instances": {"what was not asked for is no answer", instancesOf, group, nil, dispatch.Internal, false},
		"refused":              {"a driver's word stays as it is", resizeIt, &caller.Outcome{}, failure, dispatch.Aborted, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := &groupCaller{answer: func(int, caller.Request) (*caller.Outcome, error) { return tc.answer, tc.err }}
			err := tc.ask(t.Context(), dispatch.NewNodeGroups(c, logr.Discard()))
			if dispatch.CodeOf(err) != tc.code || dispatch.Unknowable(err) != tc.unknown || tc.err != nil && !errors.Is(err, tc.err) {
				t.Errorf("%v (%v, unknowable: %t), want %v, %t: %s", err, dispatch.CodeOf(err), dispatch.Unknowable(err), tc.code, tc.unknown, tc.reason)
			}
		})
	}
}

func resizeIt(ctx context.Context, n *dispatch.NodeGroups) error {
	_, err := n.Resize(ctx, "p", "g", 1, 2)

	return err
}

func deleteIt(ctx context.Context, n *dispatch.NodeGroups) error {
	_, err := n.Delete(ctx, "p", "g", []string{"i"})

	return err
}

func listThem(ctx context.Context, n *dispatch.NodeGroups) error {
	_, err := n.Groups(ctx, "p")

	return err
}

func instancesOf(ctx context.Context, n *dispatch.NodeGroups) error {
	_, err := n.Instances(ctx, "p", "g")

	return err
}
