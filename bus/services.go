package bus

import (
	"encoding/json"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Service is what a driver's replica says of itself to the discovery of NATS
// services (ADR-32). A plain driver may answer it as well, under [ServiceName].
type Service struct {
	Provider, Replica, Version, Hostname string
	Started                              time.Time
	// Figures are those of its operations by control plane.
	Figures map[string]Figures
}

// Figures tell what a replica has done for one control plane since it started.
type Figures struct {
	// Requests ended, Errors of them with an error, the newest of which was
	// LastError.
	Requests, Errors int
	LastError        string
	// Latency is how long they took on average.
	Latency time.Duration
}

// AskServices returns a function that asks all drivers on the bus for their
// figures, as often as it is called. Answers go to f, on one goroutine, whenever
// they come. Stop ends that.
func AskServices(conn *Conn, f func(Service)) (ask func() error, stop func(), err error) {
	inbox := conn.nc.NewInbox()
	stop, err = conn.watch(inbox, func(m *nats.Msg) {
		if s, ok := parseService(m.Data); ok {
			f(s)
		}
	})
	if err != nil {
		return nil, nil, err
	}

	return func() error {
		return conn.Publish(&nats.Msg{Subject: micro.APIPrefix + "." + micro.StatsVerb.String(), Reply: inbox})
	}, stop, nil
}

// parseService reads an answer; false for services that are no drivers.
func parseService(payload []byte) (Service, bool) {
	var stats micro.Stats
	if json.Unmarshal(payload, &stats) != nil || stats.Type != micro.StatsResponseType {
		return Service{}, false
	}
	provider, ok := strings.CutPrefix(stats.Name, ServiceName(""))
	if !ok || ValidToken("provider", provider) != nil || stats.ID == "" {
		return Service{}, false
	}
	s := Service{
		Provider: provider, Replica: stats.ID, Version: stats.Version, Hostname: stats.Metadata["hostname"],
		Started: stats.Started, Figures: map[string]Figures{},
	}
	busy := map[string]time.Duration{}
	for _, e := range stats.Endpoints {
		if e == nil {
			continue
		}
		cluster, ok := clusterOf(e.Subject)
		if !ok {
			continue
		}
		sum := s.Figures[cluster]
		sum.Requests += e.NumRequests
		sum.Errors += e.NumErrors
		if e.LastError != "" {
			sum.LastError = e.LastError
		}
		busy[cluster] += e.ProcessingTime
		if sum.Requests > 0 {
			sum.Latency = busy[cluster] / time.Duration(sum.Requests)
		}
		s.Figures[cluster] = sum
	}

	return s, true
}

// clusterOf returns the control plane that an endpoint's subject, which may hold
// wildcards, belongs to.
func clusterOf(subject string) (string, bool) {
	rest, ok := strings.CutPrefix(subject, Root+".")
	cluster, _, more := strings.Cut(rest, ".")

	return cluster, ok && more && ValidToken("cluster", cluster) == nil
}

// ServiceName is the name under which discovery shows the drivers of provider.
func ServiceName(provider string) string { return "mcm-driver-" + provider }

// IdentityName returns how people write a create identity: token, unique_name,
// none, or unspecified.
func IdentityName(id driverv1.CreateIdentity) string {
	return strings.ToLower(strings.TrimPrefix(id.String(), "CREATE_IDENTITY_"))
}
