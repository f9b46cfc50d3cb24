package bus

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

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// This file answers the discovery protocol of NATS services (ADR-32), so that
// `nats micro ls|info|stats` shows every replica. The protocol is spoken here
// rather than by nats.go's micro package because that one runs an endpoint's
// requests one by one and counts only what is answered inside its callback.

// ServiceName is the name under which discovery shows the drivers of provider.
func ServiceName(provider string) string { return "mcm-driver-" + provider }

type discoverySub struct {
	subject string
	answer  nats.MsgHandler
}

func (s *Server) discovery() []discoverySub {
	verbs := map[micro.Verb]func() any{
		micro.PingVerb:  func() any { return micro.Ping{ServiceIdentity: s.identity(), Type: micro.PingResponseType} },
		micro.InfoVerb:  func() any { return s.info() },
		micro.StatsVerb: func() any { return s.serviceStats() },
	}
	name := ServiceName(s.cfg.Provider)
	var subs []discoverySub
	for verb, content := range verbs {
		for _, tail := range []string{"", "." + name, "." + name + "." + s.cfg.Replica} {
			subs = append(subs, discoverySub{
				subject: micro.APIPrefix + "." + verb.String() + tail,
				answer:  func(m *nats.Msg) { s.answer(m, content()) },
			})
		}
	}

	return subs
}

func (s *Server) answer(m *nats.Msg, v any) {
	payload, err := json.Marshal(v)
	if err != nil {
		s.log.Error("cannot encode a discovery answer", "err", err)

		return
	}
	// An answer belongs in somebody's inbox: below our own root it would be a
	// message of this driver's that it never meant to send.
	if m.Reply == "" || strings.HasPrefix(m.Reply, root+".") {
		return
	}
	if err := s.conn.publish(&nats.Msg{Subject: m.Reply, Data: payload}); err != nil {
		s.log.Debug("discovery answer not sent", "err", err)
	}
}

func (s *Server) identity() micro.ServiceIdentity {
	s.mu.Lock()
	draining := s.draining
	s.mu.Unlock()
	names := make([]string, 0, len(s.cfg.Capabilities))
	for _, op := range s.cfg.Capabilities {
		names = append(names, Verb(op))
	}

	return micro.ServiceIdentity{
		Name: ServiceName(s.cfg.Provider), ID: s.cfg.Replica, Version: s.cfg.Version,
		Metadata: map[string]string{
			"provider":        s.cfg.Provider,
			"clusters":        strings.Join(s.cfg.Clusters, ","),
			"kind":            s.cfg.Kind,
			"api_versions":    strings.Join(s.cfg.APIVersions, ","),
			"capabilities":    strings.Join(names, ","),
			"slots":           strconv.Itoa(s.cfg.Slots),
			"create_identity": IdentityName(s.cfg.CreateIdentity),
			"protocol":        strconv.Itoa(int(s.protocols.highest)),
			"hostname":        s.cfg.Hostname,
			"draining":        strconv.FormatBool(draining),
		},
	}
}

// IdentityName returns how people write a create identity: token, unique_name,
// none, or unspecified.
func IdentityName(id driverv1.CreateIdentity) string {
	return strings.ToLower(strings.TrimPrefix(id.String(), "CREATE_IDENTITY_"))
}

func (s *Server) info() micro.Info {
	info := micro.Info{
		ServiceIdentity: s.identity(), Type: micro.InfoResponseType,
		Description: fmt.Sprintf("machinebus driver of provider %s", s.cfg.Provider),
	}
	for _, e := range s.endpoints() {
		info.Endpoints = append(info.Endpoints, micro.EndpointInfo{
			Name: s.endpointName(e), Subject: s.endpointSubject(e), QueueGroup: driverQueue,
		})
	}

	return info
}

// endpoints are the operations of each cluster: an endpoint has one subject.
func (s *Server) endpoints() []endpoint {
	list := make([]endpoint, 0, len(s.cfg.Clusters)*len(s.cfg.Capabilities))
	for _, cluster := range s.cfg.Clusters {
		for _, op := range s.cfg.Capabilities {
			list = append(list, endpoint{cluster, op})
		}
	}

	return list
}

// endpointName is the operation's, with its cluster where there are several.
func (s *Server) endpointName(e endpoint) string {
	if len(s.cfg.Clusters) == 1 {
		return Verb(e.op)
	}

	return Verb(e.op) + "-" + e.cluster
}

func (s *Server) endpointSubject(e endpoint) string {
	if e.op == driverv1.Operation_OPERATION_NODE_GROUPS {
		return wildcard(e.cluster, TreeNodeGroup, s.cfg.Provider, "*")
	}

	return wildcard(e.cluster, TreeDriver, s.cfg.Provider, Verb(e.op), "*", "*")
}

func (s *Server) serviceStats() micro.Stats {
	stats := micro.Stats{ServiceIdentity: s.identity(), Type: micro.StatsResponseType, Started: s.started.UTC()}
	s.mu.Lock()
	running, reads, kept := s.running, len(s.reads), len(s.held)-s.running
	s.mu.Unlock()
	for _, end := range s.endpoints() {
		e := s.stats.figures(end)
		e.Name, e.Subject, e.QueueGroup = s.endpointName(end), s.endpointSubject(end), driverQueue
		extra, err := json.Marshal(map[string]uint64{
			"running": uint64(max(running, 0)), "reading": uint64(reads), "unacknowledged": uint64(max(kept, 0)),
			"busy": s.stats.busy.Load(), "dropped": s.stats.dropped.Load(),
		})
		if err == nil {
			e.Data = extra
		}
		stats.Endpoints = append(stats.Endpoints, e)
	}

	return stats
}

// An endpoint is one operation of one cluster.
type endpoint struct {
	cluster string
	op      driverv1.Operation
}

// serviceStats counts what a replica did since it started.
type serviceStats struct {
	busy, dropped atomic.Uint64

	mu  sync.Mutex
	ops map[endpoint]*micro.EndpointStats
}

func newServiceStats(endpoints []endpoint) *serviceStats {
	st := &serviceStats{ops: make(map[endpoint]*micro.EndpointStats, len(endpoints))}
	for _, e := range endpoints {
		st.ops[e] = &micro.EndpointStats{}
	}

	return st
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
		e.LastError = fmt.Sprintf("%d:%s", status.GetCode(), headerText(status.GetMessage()))
	}
}

// refused counts an operation that was answered with an error without running.
func (st *serviceStats) refused(end endpoint) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if e, ok := st.ops[end]; ok {
		e.NumRequests++
		e.NumErrors++
	}
}

func (st *serviceStats) figures(end endpoint) *micro.EndpointStats {
	st.mu.Lock()
	defer st.mu.Unlock()
	e := *st.ops[end]

	return &e
}
