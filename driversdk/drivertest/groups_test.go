package drivertest

import (
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// onGroup answers a request about node groups.
func (r *replica) onGroup(m *nats.Msg) {
	if !strings.HasPrefix(m.Reply, "mcm.v1."+clusterOf(m)+".reply."+testProvider+".") && r.fault != "GROUP-3" {
		return
	}
	contentType := m.Header.Get(bus.HeaderContentType)
	env, err := bus.Decode(m.Data, contentType)
	if err != nil {
		return
	}
	r.mu.Lock()
	draining := r.draining
	r.mu.Unlock()
	if draining {
		r.send(m.Reply, contentType, env, busy(driverv1.BusyReason_BUSY_REASON_DRAINING))

		return
	}
	if bus.EditsNodeGroup(env) && time.Now().After(env.GetAcceptBy().AsTime()) && r.fault != "GROUP-6" {
		r.send(m.Reply, contentType, env, busy(driverv1.BusyReason_BUSY_REASON_STALE))

		return
	}
	wrong := !strings.HasSuffix(m.Subject, "."+bus.RequestVerb(env)) || env.GetNodeGroups() == nil
	var result *driverv1.Result
	switch {
	case env.GetNodeGroups() == nil && r.fault == "GROUP-11/read":
		result = r.do(clusterOf(m), env, nil)
	case wrong && bus.RequestVerb(env) != "" && r.fault != "GROUP-11":
		result = resultOf(driverv1.Code_CODE_INVALID_ARGUMENT, "the subject says something else")
	default:
		result = r.doGroup(env)
	}
	r.send(m.Reply, contentType, env, &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: result}})
}

func (r *replica) doGroup(env *driverv1.Envelope) *driverv1.Result {
	req := env.GetNodeGroups()
	if len(req.ProtoReflect().GetUnknown()) > 0 && r.fault == "GROUP-5/field" {
		return resultOf(driverv1.Code_CODE_INVALID_ARGUMENT, "what is that?")
	}
	pools := r.pools
	pools.mu.Lock()
	defer pools.mu.Unlock()
	switch body := req.GetBody().(type) {
	case *driverv1.NodeGroupsRequest_Groups:
		return pools.groups()
	case *driverv1.NodeGroupsRequest_Instances:
		return pools.instances(body.Instances.GetGroup())
	case *driverv1.NodeGroupsRequest_Resize:
		return pools.resize(env.GetOperationId(), body.Resize)
	case *driverv1.NodeGroupsRequest_Delete:
		return pools.remove(body.Delete)
	}
	if r.fault == "GROUP-5" {
		return resultOf(driverv1.Code_CODE_INTERNAL, "what is that?")
	}

	return resultOf(driverv1.Code_CODE_UNIMPLEMENTED, "not here")
}

func foundGroups(r *driverv1.NodeGroupsResponse) *driverv1.Result {
	return &driverv1.Result{Payload: &driverv1.Result_NodeGroups{NodeGroups: r}}
}

// groups lists them, and with some faults one that there must not be.
func (p *pools) groups() *driverv1.Result {
	found := &driverv1.NodeGroupListResponse{}
	for _, name := range []string{"pool-a", "pool-b"} {
		found.Groups = append(found.Groups, &driverv1.NodeGroup{
			Id: name, MinSize: p.all[name].min, MaxSize: poolMax, TargetSize: p.all[name].size(p.fault),
			Template: &driverv1.NodeGroupTemplate{Capacity: map[string]string{"cpu": "4", "memory": "16Gi"}},
		})
	}
	odd := &driverv1.NodeGroup{Id: "odd", MaxSize: 1}
	switch p.fault {
	case "GROUP-7":
		odd.Id = "a name"
	case "GROUP-8":
		odd.MinSize = 2
	case "GROUP-10":
		odd.Template = &driverv1.NodeGroupTemplate{Capacity: map[string]string{"cpu": "4"}}
	}
	found.Groups = append(found.Groups, odd)

	return foundGroups(&driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Groups{Groups: found}})
}

func (p *pools) instances(group string) *driverv1.Result {
	pool := p.all[group]
	if pool == nil {
		return resultOf(driverv1.Code_CODE_NOT_FOUND, "no such group")
	}
	pool.pass()
	found := &driverv1.NodeGroupInstancesResponse{}
	for _, m := range pool.members {
		if m.state() == creating && p.fault == "INSTANCES-1" {
			continue
		}
		id := m.id()
		if m.state() == running && p.fault == "INSTANCES-2" {
			id = m.name
		}
		found.Instances = append(found.Instances, &driverv1.NodeGroupInstance{Id: id, State: m.state()})
	}

	return foundGroups(&driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Instances{Instances: found}})
}

func (p *pools) resize(request string, req *driverv1.NodeGroupResizeRequest) *driverv1.Result {
	pool := p.all[req.GetGroup()]
	size := pool.size(p.fault)
	done := func() *driverv1.Result {
		return foundGroups(&driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Resize{
			Resize: &driverv1.NodeGroupResizeResponse{TargetSize: pool.size(p.fault)},
		}})
	}
	if slices.Contains(pool.requests, request) && p.fault != "RESIZE-4" {
		return done()
	}
	target := req.GetTarget()
	coming := slices.DeleteFunc(slices.Clone(pool.members), func(m *member) bool { return m.state() != creating })
	switch {
	case size != req.GetExpectedTarget() && p.fault != "RESIZE-1":
		return resultOf(driverv1.Code_CODE_ABORTED, "another size")
	case target > poolMax && p.fault != "RESIZE-2":
		return resultOf(driverv1.Code_CODE_OUT_OF_RANGE, "too many")
	case int(size-target) > len(coming) && p.fault != "RESIZE-3":
		return resultOf(driverv1.Code_CODE_FAILED_PRECONDITION, "they have come")
	}
	if p.fault == "RESIZE-1/steps" { // what was compared is old when it is used
		p.mu.Unlock()
		<-time.After(bench.Silence)
		p.mu.Lock()
	}
	pool.requests = append(pool.requests, request)
	for range min(target, poolMax) - size {
		pool.add(false)
	}
	for range size - target {
		pool.members = pool.members[:len(pool.members)-1]
	}

	return done()
}

func (p *pools) remove(req *driverv1.NodeGroupDeleteRequest) *driverv1.Result {
	pool := p.all[req.GetGroup()]
	var victims []*member
	foreign := false
	for _, id := range req.GetInstances() {
		for _, other := range p.all {
			for _, m := range other.members {
				switch {
				case m.id() != id && m.name != id || m.state() == creating && p.fault == "INSTANCES-3":
				case other != pool:
					foreign = p.fault != "REMOVE-3"
				case m.state() != deleting && !slices.Contains(victims, m):
					victims = append(victims, m)
				}
			}
		}
	}
	switch {
	case foreign && p.fault == "REMOVE-1/part":
		victims[0].remove()
		fallthrough
	case foreign:
		return resultOf(driverv1.Code_CODE_INVALID_ARGUMENT, "of another group")
	case pool.size("")-int32(len(victims)) < pool.min && len(victims) > 0 && p.fault != "REMOVE-4":
		return resultOf(driverv1.Code_CODE_FAILED_PRECONDITION, "too few would be left")
	}
	for n, m := range victims {
		if p.fault == "REMOVE-1" {
			m = pool.members[n] // the oldest will do
		}
		m.remove()
	}
	if len(victims) < len(req.GetInstances()) && p.fault == "REMOVE-2" {
		pool.lost++
	}

	return foundGroups(&driverv1.NodeGroupsResponse{Body: &driverv1.NodeGroupsResponse_Delete{
		Delete: &driverv1.NodeGroupDeleteResponse{TargetSize: pool.size(p.fault)},
	}})
}
