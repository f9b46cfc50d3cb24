package drivertest

import (
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

// onGroup answers a request about node groups.
func (r *replica) onGroup(m *nats.Msg) {
	if !strings.HasPrefix(m.Reply, "mcm.v1."+clusterOf(m)+".reply."+testProvider+".") && r.fault != "GROUP-3" {
		return
	}
	req := &nodegroupv1.Envelope{}
	if proto.Unmarshal(m.Data, req) != nil {
		return
	}
	answer := r.doGroup(req)
	answer.RequestId, answer.Replica = req.GetRequestId(), r.id
	if r.fault == "GROUP-2/id" {
		answer.RequestId = ""
	}
	data, _ := proto.Marshal(answer)
	_ = r.nc.Publish(m.Reply, data)
	if r.fault == "GROUP-2" {
		_ = r.nc.Publish(m.Reply, data)
	}
}

func groupStatus(code driverv1.Code, text string) *nodegroupv1.Envelope {
	return &nodegroupv1.Envelope{Status: &driverv1.Status{Code: code, Message: text}}
}

func (r *replica) doGroup(req *nodegroupv1.Envelope) *nodegroupv1.Envelope {
	r.mu.Lock()
	draining := r.draining
	r.mu.Unlock()
	if draining {
		refusal := groupStatus(driverv1.Code_CODE_UNAVAILABLE, "about to stop")
		refusal.Refused = true

		return refusal
	}
	if len(req.ProtoReflect().GetUnknown()) > 0 && r.fault == "GROUP-5/field" {
		return groupStatus(driverv1.Code_CODE_INVALID_ARGUMENT, "what is that?")
	}
	pools := r.pools
	pools.mu.Lock()
	defer pools.mu.Unlock()
	stale := time.Now().After(req.GetAcceptBy().AsTime()) && r.fault != "GROUP-6"
	switch body := req.GetBody().(type) {
	case *nodegroupv1.Envelope_Groups:
		return pools.groups()
	case *nodegroupv1.Envelope_Instances:
		return pools.instances(body.Instances.GetGroup())
	case *nodegroupv1.Envelope_Resize:
		if stale {
			return groupStatus(driverv1.Code_CODE_ABORTED, "stale")
		}

		return pools.resize(req.GetRequestId(), body.Resize)
	case *nodegroupv1.Envelope_Delete:
		if stale {
			return groupStatus(driverv1.Code_CODE_ABORTED, "stale")
		}

		return pools.remove(body.Delete)
	}
	if r.fault == "GROUP-5" {
		return groupStatus(driverv1.Code_CODE_INTERNAL, "what is that?")
	}

	return groupStatus(driverv1.Code_CODE_UNIMPLEMENTED, "not here")
}

// groups lists them, and with some faults one that there must not be.
func (p *pools) groups() *nodegroupv1.Envelope {
	found := &nodegroupv1.GroupsResponse{}
	for _, name := range []string{"pool-a", "pool-b"} {
		found.Groups = append(found.Groups, &nodegroupv1.Group{
			Id: name, MinSize: p.all[name].min, MaxSize: poolMax, TargetSize: p.all[name].size(p.fault),
			Template: &nodegroupv1.NodeTemplate{Capacity: map[string]string{"cpu": "4", "memory": "16Gi"}},
		})
	}
	odd := &nodegroupv1.Group{Id: "odd", MaxSize: 1}
	switch p.fault {
	case "GROUP-7":
		odd.Id = "a name"
	case "GROUP-8":
		odd.MinSize = 2
	case "GROUP-10":
		odd.Template = &nodegroupv1.NodeTemplate{Capacity: map[string]string{"cpu": "4"}}
	}
	found.Groups = append(found.Groups, odd)

	return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_GroupsFound{GroupsFound: found}}
}

func (p *pools) instances(group string) *nodegroupv1.Envelope {
	pool := p.all[group]
	if pool == nil {
		return groupStatus(driverv1.Code_CODE_NOT_FOUND, "no such group")
	}
	pool.pass()
	found := &nodegroupv1.InstancesResponse{}
	for _, m := range pool.members {
		if m.state() == creating && p.fault == "INSTANCES-1" {
			continue
		}
		id := m.id()
		if m.state() == running && p.fault == "INSTANCES-2" {
			id = m.name
		}
		found.Instances = append(found.Instances, &nodegroupv1.Instance{Id: id, State: m.state()})
	}

	return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_InstancesFound{InstancesFound: found}}
}

func (p *pools) resize(request string, req *nodegroupv1.ResizeRequest) *nodegroupv1.Envelope {
	pool := p.all[req.GetGroup()]
	size := pool.size(p.fault)
	done := func() *nodegroupv1.Envelope {
		return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Resized{
			Resized: &nodegroupv1.ResizeResponse{TargetSize: pool.size(p.fault)},
		}}
	}
	if slices.Contains(pool.requests, request) && p.fault != "RESIZE-4" {
		return done()
	}
	target := req.GetTarget()
	coming := slices.DeleteFunc(slices.Clone(pool.members), func(m *member) bool { return m.state() != creating })
	switch {
	case size != req.GetExpectedTarget() && p.fault != "RESIZE-1":
		return groupStatus(driverv1.Code_CODE_ABORTED, "another size")
	case target > poolMax && p.fault != "RESIZE-2":
		return groupStatus(driverv1.Code_CODE_OUT_OF_RANGE, "too many")
	case int(size-target) > len(coming) && p.fault != "RESIZE-3":
		return groupStatus(driverv1.Code_CODE_FAILED_PRECONDITION, "they have come")
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

func (p *pools) remove(req *nodegroupv1.DeleteRequest) *nodegroupv1.Envelope {
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
		return groupStatus(driverv1.Code_CODE_INVALID_ARGUMENT, "of another group")
	case pool.size("")-int32(len(victims)) < pool.min && len(victims) > 0 && p.fault != "REMOVE-4":
		return groupStatus(driverv1.Code_CODE_FAILED_PRECONDITION, "too few would be left")
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

	return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Deleted{
		Deleted: &nodegroupv1.DeleteResponse{TargetSize: pool.size(p.fault)},
	}}
}
