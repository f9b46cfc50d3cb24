package replica

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// This file answers the discovery protocol of NATS services (ADR-32), so that
// `nats micro ls|info|stats` shows every replica. The protocol is spoken here
// rather than by nats.go's micro package because that one runs an endpoint's
// requests one by one and counts only what is answered inside its callback.

// A discovery answers for a replica. It is safe for concurrent use.
type discovery struct {
	part

	started   time.Time
	protocols bus.Protocols
	ops       *operations
}

// answers returns what answers each subject.
func (d *discovery) answers() map[string]nats.MsgHandler {
	verbs := map[micro.Verb]func() any{
		micro.PingVerb:  func() any { return micro.Ping{ServiceIdentity: d.identity(), Type: micro.PingResponseType} },
		micro.InfoVerb:  func() any { return d.info() },
		micro.StatsVerb: func() any { return d.serviceStats() },
	}
	name := bus.ServiceName(d.cfg.Provider)
	answers := map[string]nats.MsgHandler{}
	for verb, content := range verbs {
		for _, tail := range []string{"", "." + name, "." + name + "." + d.cfg.Replica} {
			answers[micro.APIPrefix+"."+verb.String()+tail] = func(m *nats.Msg) { d.answer(m, content()) }
		}
	}

	return answers
}

func (d *discovery) answer(m *nats.Msg, v any) {
	payload, err := json.Marshal(v)
	if err != nil {
		d.log.Error("cannot encode a discovery answer", "err", err)

		return
	}
	// An answer goes to an inbox only. Below our own root it would be a machinebus message
	// that this driver did not mean to send.
	if m.Reply == "" || strings.HasPrefix(m.Reply, bus.Root+".") {
		return
	}
	if err := d.conn.Publish(&nats.Msg{Subject: m.Reply, Data: payload}); err != nil {
		d.log.Debug("discovery answer not sent", "err", err)
	}
}

func (d *discovery) identity() micro.ServiceIdentity {
	d.ops.mu.Lock()
	draining := d.ops.draining
	d.ops.mu.Unlock()
	names := make([]string, 0, len(d.cfg.Capabilities))
	for _, op := range d.cfg.Capabilities {
		names = append(names, bus.Verb(op))
	}

	return micro.ServiceIdentity{
		Name: bus.ServiceName(d.cfg.Provider), ID: d.cfg.Replica, Version: d.cfg.Version,
		Metadata: map[string]string{
			"provider":        d.cfg.Provider,
			"clusters":        strings.Join(d.cfg.Clusters, ","),
			"kind":            d.cfg.Kind,
			"api_versions":    strings.Join(d.cfg.APIVersions, ","),
			"capabilities":    strings.Join(names, ","),
			"slots":           strconv.Itoa(d.cfg.Slots),
			"create_identity": bus.IdentityName(d.cfg.CreateIdentity),
			"protocol":        strconv.Itoa(int(d.protocols.Highest)),
			"hostname":        d.cfg.Hostname,
			"draining":        strconv.FormatBool(draining),
		},
	}
}

func (d *discovery) info() micro.Info {
	info := micro.Info{
		ServiceIdentity: d.identity(), Type: micro.InfoResponseType,
		Description: fmt.Sprintf("machinebus driver of provider %s", d.cfg.Provider),
	}
	for _, e := range d.endpoints() {
		info.Endpoints = append(info.Endpoints, micro.EndpointInfo{
			Name: d.endpointName(e), Subject: d.endpointSubject(e), QueueGroup: bus.DriverQueue,
		})
	}

	return info
}

// endpoints returns the operations of each cluster: an endpoint has one subject.
func (d *discovery) endpoints() []endpoint {
	list := make([]endpoint, 0, len(d.cfg.Clusters)*len(d.cfg.Capabilities))
	for _, cluster := range d.cfg.Clusters {
		for _, op := range d.cfg.Capabilities {
			list = append(list, endpoint{cluster, op})
		}
	}

	return list
}

// endpointName returns the operation's name, with the cluster if there are several.
func (d *discovery) endpointName(e endpoint) string {
	if len(d.cfg.Clusters) == 1 {
		return bus.Verb(e.op)
	}

	return bus.Verb(e.op) + "-" + e.cluster
}

func (d *discovery) endpointSubject(e endpoint) string {
	if e.op == driverv1.Operation_OPERATION_NODE_GROUPS {
		return bus.Pattern(e.cluster, bus.TreeNodeGroup, d.cfg.Provider, "*")
	}

	return bus.Pattern(e.cluster, bus.TreeDriver, d.cfg.Provider, bus.Verb(e.op), "*", "*")
}

func (d *discovery) serviceStats() micro.Stats {
	stats := micro.Stats{ServiceIdentity: d.identity(), Type: micro.StatsResponseType, Started: d.started.UTC()}
	d.ops.mu.Lock()
	running, reads := d.ops.mutatingLocked(), len(d.ops.reads)
	kept := len(d.ops.byID) - running
	d.ops.mu.Unlock()
	for _, end := range d.endpoints() {
		e := d.stats.figures(end)
		e.Name, e.Subject, e.QueueGroup = d.endpointName(end), d.endpointSubject(end), bus.DriverQueue
		extra, err := json.Marshal(map[string]uint64{
			"running": uint64(max(running, 0)), "reading": uint64(reads), "unacknowledged": uint64(max(kept, 0)),
			"busy": d.stats.busy.Load(), "dropped": d.stats.dropped.Load(),
		})
		if err == nil {
			e.Data = extra
		}
		stats.Endpoints = append(stats.Endpoints, &e)
	}

	return stats
}

// An endpoint is one operation of one cluster.
type endpoint struct {
	cluster string
	op      driverv1.Operation
}

// serviceStats counts a replica's operations since it started.
type serviceStats struct {
	busy, dropped atomic.Uint64

	mu  sync.Mutex
	ops map[endpoint]micro.EndpointStats
}

// settled counts an operation that ran.
func (st *serviceStats) settled(end endpoint, status *driverv1.Status, took time.Duration) {
	st.mu.Lock()
	defer st.mu.Unlock()
	e := st.ops[end]
	e.NumRequests++
	e.ProcessingTime += took
	e.AverageProcessingTime = e.ProcessingTime / time.Duration(e.NumRequests)
	if status.GetCode() != driverv1.Code_CODE_OK {
		e.NumErrors++
		e.LastError = fmt.Sprintf("%d:%s", status.GetCode(), bus.OneLine(status.GetMessage()))
	}
	st.ops[end] = e
}

// refused counts an operation that was answered with an error without running.
func (st *serviceStats) refused(end endpoint) {
	st.mu.Lock()
	defer st.mu.Unlock()
	e := st.ops[end]
	e.NumRequests++
	e.NumErrors++
	st.ops[end] = e
}

func (st *serviceStats) figures(end endpoint) micro.EndpointStats {
	st.mu.Lock()
	defer st.mu.Unlock()

	return st.ops[end]
}
