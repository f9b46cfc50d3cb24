package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// identities are the ways to identify a driver's repeated create. There is a
// provider for each, called after it.
var identities = []string{"token", "unique_name", "none"}

// TestNATSCluster breaks a cluster of nats-servers in the middle of creates of
// drivers of all identities.
func TestNATSCluster(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		fault  func(*clusterEnv)
	}{
		"leader steps down": {"another server of three leads a stream, whose writes of that moment are lost or not", (*clusterEnv).stepDown},
		"rolling restart":   {"an update of NATS, each server with its store", (*clusterEnv).restartAll},
		"leader is lost":    {"the leader's disk is gone with it", (*clusterEnv).loseLeader},
		"follower is away":  {"two of three go on, and mcm shows that the third is behind", (*clusterEnv).loseFollower},
	} {
		t.Run(name, func(t *testing.T) {
			e := newClusterBus(newEnv(t))
			tc.fault(e)
			if !e.creating {
				t.Fatal("nothing was being created")
			}
			e.waitRunning(e.names...)
			e.wantLive()
			e.deleteAll(e.names...)
			e.eventually("no claim is held", func(ctx context.Context) error {
				held, err := stack.HeldClaims(ctx, e.nats.URL(), e.name, identities...)
				if err == nil && len(held) > 0 {
					err = fmt.Errorf("claims %v", held)
				}
				return err
			})
			e.wantMade()
			if t.Failed() {
				t.Log(tc.reason)
			}
		})
	}
}

// A clusterEnv is an env with three nats-servers, and two replicas of a driver for
// each identity.
type clusterEnv struct {
	*env

	nats     *stack.NATSCluster
	js       jetstream.JetStream
	manager  *stack.Manager
	tap      *stack.Tap
	drivers  map[string][]*stack.Driver // by identity
	classes  map[string]string
	names    []string // of all machines
	creating bool
}

func newClusterBus(own *env) *clusterEnv {
	own.Helper()
	e := &clusterEnv{env: own, drivers: map[string][]*stack.Driver{}, classes: map[string]string{}}
	const servers = 3
	var err error
	e.nats, err = e.site.StartNATSCluster(e.ctx(), servers)
	e.must(err)
	e.atEnd = append(e.atEnd, e.nats.Close)
	nc, err := nats.Connect(e.nats.URL(), nats.MaxReconnects(-1), nats.ReconnectWait(100*time.Millisecond))
	e.must(err)
	e.Cleanup(nc.Close)
	e.js, err = jetstream.New(nc)
	e.must(err)
	// Where nothing identifies a create, the next waits for the lost one's deadline.
	e.manager, e.tap = e.startManager(e.nats.URL(), "--nats-stream-replicas=3", "--machine-operation-timeout=6s")
	for _, identity := range identities {
		for i := range 2 {
			d, err := e.site.StartDriver(e.ctx(), e.tap, stack.DriverOptions{
				Name: fmt.Sprintf("driver-%s-%d", identity, i+1), NATSURL: e.nats.URL(), Clusters: []string{e.name},
				Args: []string{"--provider", identity, "--identity", identity},
			})
			e.must(err)
			e.drivers[identity] = append(e.drivers[identity], d)
		}
		e.classes[identity] = e.createProvider(identity)
	}
	e.slowCreates(2 * time.Second)
	e.awaitStreams()
	return e
}

// create begins machines of each identity and returns when a replica of each has begun
// to create. Each identity is looked at in every round: where one of them has to wait for
// another connection, the creates of the others may end meanwhile.
func (e *clusterEnv) create() {
	e.Helper()
	const each = 2
	begun := map[string]bool{} // by identity
	identityOf := map[string]string{}
	for _, identity := range identities {
		for range each {
			name := fmt.Sprintf("%s-%02d", e.name, len(e.names)+1)
			e.createMachine(name, e.classes[identity])
			e.names = append(e.names, name)
			identityOf[name] = identity
		}
	}
	e.eventually("a driver of each identity creates", func(context.Context) error {
		for _, audit := range e.tap.Audits() {
			if identity, ok := identityOf[audit.GetName()]; ok && audit.GetOperation() == create {
				begun[identity] = true
			}
		}
		var missing []string
		for _, identity := range identities {
			for _, d := range e.drivers[identity] {
				begun[identity] = begun[identity] || len(e.tap.Running(d.Replica, create)) > 0
			}
			if !begun[identity] {
				missing = append(missing, identity)
			}
		}
		if len(missing) > 0 {
			return fmt.Errorf("none with identity %s does", strings.Join(missing, ", "))
		}
		return nil
	})
	stats, err := e.cloud.Admin.Stats(e.ctx())
	e.must(err)
	e.creating = e.creating || stats.ConcurrentCreates > 0
}

// stream returns how an identity's operations stream is.
func (e *clusterEnv) stream(ctx context.Context, identity string) (*jetstream.StreamInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second) // a stream without a leader does not answer
	defer cancel()
	s, err := e.js.Stream(ctx, bus.StreamName(e.name, identity))
	if err != nil {
		return nil, err
	}
	info := s.CachedInfo()
	if info.Cluster == nil || info.Cluster.Leader == "" {
		return nil, fmt.Errorf("the stream of %s has no leader", identity)
	}
	return info, nil
}

// awaitStreams waits until all servers have all of all streams.
func (e *clusterEnv) awaitStreams() {
	e.Helper()
	e.eventually("the operations streams are at all servers", func(ctx context.Context) error {
		for _, identity := range identities {
			info, err := e.stream(ctx, identity)
			if err != nil {
				return err
			}
			if len(info.Cluster.Replicas) != len(e.nats.Servers)-1 {
				return fmt.Errorf("the stream of %s has %d followers", identity, len(info.Cluster.Replicas))
			}
			for _, r := range info.Cluster.Replicas {
				if !r.Current || r.Offline {
					return fmt.Errorf("%s does not have the stream of %s", r.Name, identity)
				}
			}
		}
		return nil
	})
}

// stepDown has every stream's leader hand over, while its driver creates.
func (e *clusterEnv) stepDown() {
	e.Helper()
	e.create()
	for _, identity := range identities {
		before, err := e.stream(e.ctx(), identity)
		e.must(err)
		_, err = e.js.Conn().Request("$JS.API.STREAM.LEADER.STEPDOWN."+before.Config.Name, nil, 5*time.Second)
		e.must(err)
		e.eventually("another server leads the stream of "+identity, func(ctx context.Context) error {
			after, err := e.stream(ctx, identity)
			if err == nil && after.Cluster.Leader == before.Cluster.Leader {
				err = fmt.Errorf("%s still does", after.Cluster.Leader)
			}
			return err
		})
	}
}

// restartAll stops and starts the servers, one after the other, while drivers
// create.
func (e *clusterEnv) restartAll() {
	e.Helper()
	for _, server := range e.nats.Servers {
		e.create()
		e.must(server.Stop())
		e.must(server.Restart(e.ctx()))
		e.awaitStreams()
	}
}

// loseLeader kills the server that leads the stream of the drivers without
// identity, while they create. It comes back with nothing.
func (e *clusterEnv) loseLeader() {
	e.Helper()
	info, err := e.stream(e.ctx(), "none")
	e.must(err)
	e.create()
	for _, server := range e.nats.Servers {
		if server.Name != info.Cluster.Leader {
			continue
		}
		e.must(server.Kill())
		e.must(server.Wipe())
		e.must(server.Restart(e.ctx()))
		e.awaitStreams()
		return
	}
	e.Fatalf("no server is called %s", info.Cluster.Leader)
}

// loseFollower keeps a server away that follows the stream of the drivers without identity,
// while they create.
func (e *clusterEnv) loseFollower() {
	e.Helper()
	info, err := e.stream(e.ctx(), "none")
	e.must(err)
	behind := func() float64 {
		return e.counter(e.manager, "mcm_dispatch_operations_stream_replicas_behind", `provider="none"`)
	}
	i := slices.IndexFunc(e.nats.Servers, func(s *stack.NATSServer) bool { return s.Name == info.Cluster.Replicas[0].Name })
	server := e.nats.Servers[i]
	e.create()
	e.must(server.Kill())
	e.eventually("mcm shows that a server is behind", func(context.Context) error { return atLeast(behind(), 1) })
	e.create()
	e.must(server.Restart(e.ctx()))
	e.awaitStreams()
	e.eventually("mcm shows that no server is behind", func(context.Context) error {
		if n := behind(); n > 0 {
			return fmt.Errorf("%g are", n)
		}
		return nil
	})
}

// wantLive expects one instance of each machine.
func (e *clusterEnv) wantLive() {
	e.Helper()
	e.eventually("each machine has one instance", func(ctx context.Context) error {
		live, err := e.cloud.Instances(ctx)
		if err != nil {
			return err
		}
		of := map[string]int{}
		for _, instance := range live {
			of[instance.Tags[cloudapi.TagMachineUID]]++
		}
		if len(live) != len(e.names) || len(of) != len(e.names) {
			return fmt.Errorf("%d instances of %d machines, want %d", len(live), len(of), len(e.names))
		}
		return nil
	})
}

// wantMade expects that the cloud has never made a second instance for a machine
// whose create has an identity, and for others at most one for each attempt; and
// that none is left.
func (e *clusterEnv) wantMade() {
	e.Helper()
	attempts := map[string]uint32{} // at creates that ended, by operation id
	for _, audit := range e.tap.Audits() {
		if audit.GetOperation() == create && audit.GetStatus().GetCode() == driverv1.Code_CODE_OK {
			attempts[audit.GetName()] = audit.GetAttempts()
		}
	}
	created, err := e.cloud.Created(e.ctx())
	e.must(err)
	made := map[string]int{}
	for _, entry := range created {
		made[entry.Name]++
		if n := made[entry.Name]; n > 1 && (entry.Identity != cloudapi.IdentityNone || n > int(attempts[entry.Name])) {
			e.Errorf("instance %d of %s, identity %s, %d attempts", n, entry.Name, entry.Identity, attempts[entry.Name])
		}
	}
	if len(made) != len(e.names) {
		e.Errorf("the cloud made instances of %d machines, want %d", len(made), len(e.names))
	}
	stats, err := e.cloud.Admin.Stats(e.ctx())
	e.must(err)
	if stats.Live != 0 {
		e.Errorf("%d instances are left", stats.Live)
	}
}
