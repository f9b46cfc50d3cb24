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
			"protocol":        strconv.Itoa(protocolVersion),
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
	for _, op := range s.cfg.Capabilities {
		info.Endpoints = append(info.Endpoints, micro.EndpointInfo{
			Name: Verb(op), Subject: s.endpointSubject(op), QueueGroup: driverQueue,
		})
	}

	return info
}

func (s *Server) endpointSubject(op driverv1.Operation) string {
	return wildcard("*", TreeDriver, s.cfg.Provider, Verb(op), "*", "*")
}

func (s *Server) serviceStats() micro.Stats {
	stats := micro.Stats{ServiceIdentity: s.identity(), Type: micro.StatsResponseType, Started: s.started.UTC()}
	s.mu.Lock()
	running, reads, kept := s.running, len(s.reads), len(s.held)-s.running
	s.mu.Unlock()
	for _, op := range s.cfg.Capabilities {
		e := s.stats.endpoint(op)
		e.Name, e.Subject, e.QueueGroup = Verb(op), s.endpointSubject(op), driverQueue
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

// serviceStats counts what a replica did since it started.
type serviceStats struct {
	busy, dropped atomic.Uint64

	mu  sync.Mutex
	ops map[driverv1.Operation]*micro.EndpointStats
}

func newServiceStats(ops []driverv1.Operation) *serviceStats {
	st := &serviceStats{ops: make(map[driverv1.Operation]*micro.EndpointStats, len(ops))}
	for _, op := range ops {
		st.ops[op] = &micro.EndpointStats{}
	}

	return st
}

func (st *serviceStats) knows(op driverv1.Operation) bool {
	_, ok := st.ops[op] // the map's keys never change
	return ok
}

// settled counts an operation that ran.
func (st *serviceStats) settled(op driverv1.Operation, status *driverv1.Status, took time.Duration) {
	st.mu.Lock()
	defer st.mu.Unlock()
	e := st.ops[op]
	e.NumRequests++
	e.ProcessingTime += took
	e.AverageProcessingTime = e.ProcessingTime / time.Duration(e.NumRequests)
	if status.GetCode() != driverv1.Code_CODE_OK {
		e.NumErrors++
		e.LastError = fmt.Sprintf("%d:%s", status.GetCode(), headerText(status.GetMessage()))
	}
}

// refused counts an operation that was answered with an error without running.
func (st *serviceStats) refused(op driverv1.Operation) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if e, ok := st.ops[op]; ok {
		e.NumRequests++
		e.NumErrors++
	}
}

func (st *serviceStats) endpoint(op driverv1.Operation) *micro.EndpointStats {
	st.mu.Lock()
	defer st.mu.Unlock()
	e := *st.ops[op]

	return &e
}
