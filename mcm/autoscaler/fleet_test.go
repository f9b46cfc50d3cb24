package autoscaler_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/proto/externalgrpc"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const poolID = "provider:acme/pool"

// A fleet is a replica on a real bus whose cloud has one group.
type fleet struct {
	t        *testing.T
	url      string
	provider string
	stop     func()
	mu       sync.Mutex
	group    *driverv1.NodeGroup
	more     []*driverv1.NodeGroup // beside it
	list     []*driverv1.NodeGroupInstance
	enter    func(*driverv1.NodeGroupsRequest)                  // lets a request in; may wait
	leave    func(*driverv1.NodeGroupsRequest)                  // lets the answer to one out, which has been done; may wait
	wrong    func(*driverv1.NodeGroupsRequest) *driverv1.Result // answers instead, if it likes
	asked    []*driverv1.NodeGroupsRequest                      // what changes something
	done     map[string]int32                                   // sizes after requests that came to pass, by their ids
	provided *autoscaler.Provided                               // the gateway's
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	f := &fleet{t: t, url: bustest.Server(t, embedded.Options{}).URL(), provider: "acme", done: map[string]int32{}, group: &driverv1.NodeGroup{
		Id: "pool", MinSize: 1, MaxSize: 5, TargetSize: 2, Description: "pool of small",
		Template: &driverv1.NodeGroupTemplate{Capacity: map[string]string{"cpu": "4", "memory": "16Gi"}, Labels: map[string]string{"size": "small"}},
	}}
	for _, id := range []string{"acme:///1", "acme:///2"} {
		f.list = append(f.list, &driverv1.NodeGroupInstance{Id: id, State: driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_RUNNING})
	}
	f.start()

	return f
}

func (f *fleet) start() {
	conn := bustest.Connect(f.t, bus.Config{URLs: []string{f.url}})
	server, err := replica.New(conn, replica.Config{
		Provider: f.provider, Version: "1.0.0", Logger: bustest.Quiet(),
		Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_NODE_GROUPS},
	}, replica.HandlerFunc(f.answer))
	if err != nil {
		f.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(f.t.Context())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	f.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			f.t.Error(err)
		}
	})
	f.t.Cleanup(f.stop)
}

func (f *fleet) answer(_ context.Context, t *replica.Task) *driverv1.Result {
	req := t.Request.GetNodeGroups()
	f.mu.Lock()
	enter, leave := f.enter, f.leave
	f.mu.Unlock()
	if enter != nil {
		enter(req)
	}
	answer := f.do(t.Request.GetOperationId(), req)
	if leave != nil {
		leave(req)
	}

	return answer
}

func (f *fleet) do(id string, req *driverv1.NodeGroupsRequest) *driverv1.Result {
	f.mu.Lock()
	defer f.mu.Unlock()
	if req.GetResize() != nil || req.GetDelete() != nil {
		f.asked = append(f.asked, req)
	}
	if f.wrong != nil {
		if answer := f.wrong(req); answer != nil {
			return answer
		}
	}
	answer := &driverv1.NodeGroupsResponse{}
	switch body := req.GetBody().(type) {
	case *driverv1.NodeGroupsRequest_Instances:
		answer.Body = &driverv1.NodeGroupsResponse_Instances{Instances: &driverv1.NodeGroupInstancesResponse{Instances: slices.Clone(f.list)}}
	case *driverv1.NodeGroupsRequest_Resize:
		if _, ok := f.done[id]; !ok {
			if body.Resize.GetExpectedTarget() != f.group.GetTargetSize() {
				return failed(driverv1.Code_CODE_ABORTED)
			}
			f.group.TargetSize = body.Resize.GetTarget()
			f.done[id] = f.group.GetTargetSize()
		}
		answer.Body = &driverv1.NodeGroupsResponse_Resize{Resize: &driverv1.NodeGroupResizeResponse{TargetSize: f.done[id]}}
	case *driverv1.NodeGroupsRequest_Delete:
		const deleting = driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_DELETING
		for n, i := range f.list {
			if slices.Contains(body.Delete.GetInstances(), i.GetId()) && i.GetState() != deleting {
				f.list[n] = &driverv1.NodeGroupInstance{Id: i.GetId(), State: deleting}
				f.group.TargetSize--
			}
		}
		answer.Body = &driverv1.NodeGroupsResponse_Delete{Delete: &driverv1.NodeGroupDeleteResponse{TargetSize: f.group.GetTargetSize()}}
	default:
		group := &driverv1.NodeGroup{
			Id: f.group.GetId(), MinSize: f.group.GetMinSize(), MaxSize: f.group.GetMaxSize(), TargetSize: f.group.GetTargetSize(),
			Description: f.group.GetDescription(), Template: f.group.GetTemplate(), Options: f.group.GetOptions(),
		}
		answer.Body = &driverv1.NodeGroupsResponse_Groups{Groups: &driverv1.NodeGroupListResponse{
			Groups: append([]*driverv1.NodeGroup{group}, f.more...),
		}}
	}

	return &driverv1.Result{Payload: &driverv1.Result_NodeGroups{NodeGroups: answer}}
}

func failed(code driverv1.Code) *driverv1.Result { return bus.Failure(code, "as told") }

func (f *fleet) change(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
}

// gateway returns a rig whose gateway is on the fleet's bus and knows its group.
func (f *fleet) gateway(clock func() time.Time) *rig {
	f.t.Helper()
	r := f.gatewayOf(clock)
	r.sees(func(ids []string) bool { return len(ids) == 1 })

	return r
}

// gatewayOf returns one that need not know of any yet.
func (f *fleet) gatewayOf(clock func() time.Time) *rig {
	f.t.Helper()
	client, err := caller.New(bustest.Connect(f.t, bus.Config{URLs: []string{f.url}}), caller.Config{
		Cluster: "default", Name: "autoscaler", Logger: bustest.Quiet(),
	})
	if err != nil {
		f.t.Fatal(err)
	}
	f.provided = autoscaler.NewProvided(dispatch.NewNodeGroups(client, logr.Discard()), clock)
	ctx, cancel := context.WithCancel(f.t.Context())
	done := make(chan error, 1)
	go func() { done <- f.provided.Start(ctx) }()
	f.t.Cleanup(func() {
		cancel()
		<-done
		client.Close()
	})

	return newRig(f.t, func(_ *rig, c *autoscaler.Config) { c.Provided = f.provided })
}

// sees refreshes until the groups are as expected.
func (r *rig) sees(ok func(ids []string) bool) {
	r.t.Helper()
	bustest.Eventually(r.t, "the groups are as expected", func() bool {
		if _, err := r.Refresh(r.t.Context(), &externalgrpc.RefreshRequest{}); err != nil {
			r.t.Fatal(err)
		}
		groups, err := r.NodeGroups(r.t.Context(), &externalgrpc.NodeGroupsRequest{})
		if err != nil {
			r.t.Fatal(err)
		}
		var ids []string
		for _, g := range groups.GetNodeGroups() {
			ids = append(ids, g.GetId())
		}

		return ok(ids)
	})
}

func (r *rig) sizeOf(id string) int32 {
	r.t.Helper()
	answer, err := r.NodeGroupTargetSize(r.t.Context(), &externalgrpc.NodeGroupTargetSizeRequest{Id: id})
	if err != nil {
		r.t.Fatal(err)
	}

	return answer.GetTargetSize()
}

func (r *rig) grow(id string, delta int32) error {
	_, err := r.NodeGroupIncreaseSize(r.t.Context(), &externalgrpc.NodeGroupIncreaseSizeRequest{Id: id, Delta: delta})

	return err
}

// lists makes more groups of the fleet's, which share its instances.
func (f *fleet) lists(n int) {
	for i := range n {
		f.more = append(f.more, &driverv1.NodeGroup{Id: fmt.Sprintf("more-%d", i), MaxSize: 5})
	}
}

// A turnstile lets callers in once so many of them wait at the same time.
func turnstile(n int) (enter func()) {
	all := make(chan struct{})
	var mu sync.Mutex
	waiting := 0

	return func() {
		mu.Lock()
		waiting++
		if waiting == n {
			close(all)
		}
		mu.Unlock()
		<-all
	}
}
