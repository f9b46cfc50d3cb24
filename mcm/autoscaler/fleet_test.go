package autoscaler_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/proto/externalgrpc"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

const poolID = "provider:acme/pool"

// A fleet is a replica on a real bus whose cloud has one group.
type fleet struct {
	t        *testing.T
	url      string
	provider string
	stop     func()
	mu       sync.Mutex
	group    *nodegroupv1.Group
	more     []*nodegroupv1.Group // beside it
	list     []*nodegroupv1.Instance
	enter    func(*nodegroupv1.Envelope)                       // lets a request in; may wait
	leave    func(*nodegroupv1.Envelope)                       // lets the answer to one out, which has been done; may wait
	wrong    func(*nodegroupv1.Envelope) *nodegroupv1.Envelope // answers instead, if it likes
	asked    []*nodegroupv1.Envelope                           // what changes something
	done     map[string]int32                                  // sizes after requests that came to pass, by their ids
	provided *autoscaler.Provided                              // the gateway's
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	f := &fleet{t: t, url: bustest.Server(t, embedded.Options{}).URL(), provider: "acme", done: map[string]int32{}, group: &nodegroupv1.Group{
		Id: "pool", MinSize: 1, MaxSize: 5, TargetSize: 2, Description: "pool of small",
		Template: &nodegroupv1.NodeTemplate{Capacity: map[string]string{"cpu": "4", "memory": "16Gi"}, Labels: map[string]string{"size": "small"}},
	}}
	for _, id := range []string{"acme:///1", "acme:///2"} {
		f.list = append(f.list, &nodegroupv1.Instance{Id: id, State: nodegroupv1.InstanceState_INSTANCE_STATE_RUNNING})
	}
	f.start()

	return f
}

func (f *fleet) start() {
	conn := bustest.Connect(f.t, bus.Config{URLs: []string{f.url}})
	server, err := replica.New(conn, replica.Config{
		Provider: f.provider, Version: "1.0.0", Logger: bustest.Quiet(), NodeGroups: f.answer,
		Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_LIST},
	}, nil)
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

func (f *fleet) answer(_ context.Context, _ string, req *nodegroupv1.Envelope) *nodegroupv1.Envelope {
	f.mu.Lock()
	enter, leave := f.enter, f.leave
	f.mu.Unlock()
	if enter != nil {
		enter(req)
	}
	answer := f.do(req)
	if leave != nil {
		leave(req)
	}

	return answer
}

func (f *fleet) do(req *nodegroupv1.Envelope) *nodegroupv1.Envelope {
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
	switch body := req.GetBody().(type) {
	case *nodegroupv1.Envelope_Instances:
		return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_InstancesFound{InstancesFound: &nodegroupv1.InstancesResponse{Instances: slices.Clone(f.list)}}}
	case *nodegroupv1.Envelope_Resize:
		if _, ok := f.done[req.GetRequestId()]; !ok {
			if body.Resize.GetExpectedTarget() != f.group.GetTargetSize() {
				return failed(driverv1.Code_CODE_ABORTED)
			}
			f.group.TargetSize = body.Resize.GetTarget()
			f.done[req.GetRequestId()] = f.group.GetTargetSize()
		}

		return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Resized{Resized: &nodegroupv1.ResizeResponse{TargetSize: f.done[req.GetRequestId()]}}}
	case *nodegroupv1.Envelope_Delete:
		const deleting = nodegroupv1.InstanceState_INSTANCE_STATE_DELETING
		for n, i := range f.list {
			if slices.Contains(body.Delete.GetInstances(), i.GetId()) && i.GetState() != deleting {
				f.list[n] = &nodegroupv1.Instance{Id: i.GetId(), State: deleting}
				f.group.TargetSize--
			}
		}

		return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Deleted{Deleted: &nodegroupv1.DeleteResponse{TargetSize: f.group.GetTargetSize()}}}
	default:
		group := &nodegroupv1.Group{
			Id: f.group.GetId(), MinSize: f.group.GetMinSize(), MaxSize: f.group.GetMaxSize(), TargetSize: f.group.GetTargetSize(),
			Description: f.group.GetDescription(), Template: f.group.GetTemplate(), Options: f.group.GetOptions(),
		}

		return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_GroupsFound{GroupsFound: &nodegroupv1.GroupsResponse{
			Groups: append([]*nodegroupv1.Group{group}, f.more...),
		}}}
	}
}

func failed(code driverv1.Code) *nodegroupv1.Envelope {
	return &nodegroupv1.Envelope{Status: &driverv1.Status{Code: code, Message: "as told"}}
}

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
	client, err := bus.NewNodeGroupClient(bustest.Connect(f.t, bus.Config{URLs: []string{f.url}}), "default", bustest.Quiet())
	if err != nil {
		f.t.Fatal(err)
	}
	f.provided = autoscaler.NewProvided(dispatch.NewNodeGroups(client), clock)
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
		f.more = append(f.more, &nodegroupv1.Group{Id: fmt.Sprintf("more-%d", i), MaxSize: 5})
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
