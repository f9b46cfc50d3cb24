package main

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// answerTimeout is how long a driver may take.
const answerTimeout = time.Minute

// mixedTries is how often mcmctl asks while only some replicas implement the
// operation. If half of them do, all tries miss once in four billion times.
const mixedTries = 32

// A question goes to a replica of a provider's driver.
type question struct {
	conn     *bus.Conn
	cluster  string // * for the only one
	provider string
	wait     time.Duration // for replicas to be heard
}

// migrate returns an old class as the JSON of a MachineClass.
func (q *question) migrate(ctx context.Context, old *unstructured.Unstructured) ([]byte, error) {
	cluster, err := q.asker(ctx, driverv1.Operation_OPERATION_MIGRATE_CLASS)
	if err != nil {
		return nil, err
	}
	object, err := old.MarshalJSON()
	if err != nil {
		return nil, fmt.Errorf("write %s %s as JSON: %w", old.GetKind(), old.GetName(), err)
	}
	client, err := caller.New(q.conn, caller.Config{Cluster: cluster, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	defer client.Close()
	out, err := askAgain(ctx, client, caller.Request{
		Provider: q.provider, Namespace: old.GetNamespace(), Name: old.GetName(), Timeout: answerTimeout,
		OperationID: "mcmctl.migrateclass." + string(uuid.NewUUID()),
		Body: &driverv1.Envelope{Body: &driverv1.Envelope_MigrateClass{MigrateClass: &driverv1.MigrateClassRequest{
			Kind: old.GetKind(), ApiVersion: old.GetAPIVersion(), Object: object,
		}}},
	})
	if err != nil {
		return nil, fmt.Errorf("%s %s/%s: %s: %w", old.GetKind(), old.GetNamespace(), old.GetName(), bus.CodeName(bus.CodeOf(err)), err)
	}

	return out.Result.GetMigrateClass().GetMachineClass(), nil
}

// askAgain asks until the request reaches a replica that implements it. During an
// update of the driver only some do.
func askAgain(ctx context.Context, client *caller.Caller, req caller.Request) (out *caller.Outcome, err error) {
	for range mixedTries {
		out, err = client.Call(ctx, req)
		if bus.CodeOf(err) != driverv1.Code_CODE_UNIMPLEMENTED {
			return out, err
		}
	}

	return out, err
}

// asker waits until a replica that implements the operation is heard, and returns
// its control plane.
func (q *question) asker(ctx context.Context, op driverv1.Operation) (string, error) {
	heard, news := newFleet(q.cluster), make(chan struct{}, 1)
	stop, err := bus.WatchSessions(q.conn, q.cluster, func(s *driverv1.Session) {
		heard.onSession(s)
		select {
		case news <- struct{}{}:
		default:
		}
	})
	if err != nil {
		return "", err
	}
	defer stop()
	limit := time.NewTimer(q.wait)
	defer limit.Stop()
	for {
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-limit.C:
			return q.choose(heard.list(time.Now()), op)
		case <-news:
			// With a cluster named, one replica that can answer is enough.
			if cluster, err := q.choose(heard.list(time.Now()), op); err == nil && q.cluster != anyCluster {
				return cluster, nil
			}
		}
	}
}

// choose picks the control plane out of the replicas heard.
func (q *question) choose(heard []knownReplica, op driverv1.Operation) (string, error) {
	clusters, others, unable := map[string]bool{}, []string{}, false
	for _, r := range heard {
		switch {
		case r.session.GetProvider() != q.provider:
			others = append(others, r.session.GetProvider())
		case slices.Contains(r.session.GetCapabilities(), op):
			clusters[r.session.GetCluster()] = true
		default:
			unable = true
		}
	}
	names := slices.Sorted(maps.Keys(clusters))
	switch {
	case len(names) == 1:
		return names[0], nil
	case len(names) > 1:
		return "", fmt.Errorf("the driver of provider %s serves several control planes: choose one with --cluster: %s",
			q.provider, strings.Join(names, ", "))
	case unable:
		return "", fmt.Errorf("the driver of provider %s does not implement %s: use a version that does", q.provider, bus.Verb(op))
	default:
		return "", fmt.Errorf("%w within %s on %s: start its driver, check --nats-url and --cluster, "+
			"or raise --timeout", noReplica(q.provider, others), q.wait, q.conn.URL())
	}
}
