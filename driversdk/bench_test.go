package driversdk_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/driversdk"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// BenchmarkRead compares a status request, from the manager's side of the bus through the
// SDK's handler and back, with NATS request and reply of the same messages. The manager is
// beside its server, in its process or not; a driver never is.
func BenchmarkRead(b *testing.B) {
	for _, where := range []string{"embedded", "tcp"} {
		b.Run(where, func(b *testing.B) {
			r := newBenchRig(b, where == "embedded", embedded.Options{})
			for _, inFlight := range []int{1, 64, 1024} {
				b.Run(strconv.Itoa(inFlight), func(b *testing.B) { compare(b, inFlight, r.bareRead, r.read) })
			}
		})
	}
}

// BenchmarkCreate compares a create, which is accepted, claimed, answered and acknowledged,
// with what it cannot do without: a request and its reply, and one compare-and-set from the
// driver's side. The store is on this machine's disk, and each write is synced.
func BenchmarkCreate(b *testing.B) {
	r := newBenchRig(b, true, embedded.Options{StoreDir: b.TempDir()})
	for _, inFlight := range []int{1, 16} {
		b.Run(strconv.Itoa(inFlight), func(b *testing.B) { compare(b, inFlight, r.bareCreate, r.create) })
	}
}

// compare makes b.N calls and as many of the peer, in turns of a few, so many at a time.
// It reports the time of a call (ns/op) and of the peer's, and the ratio of the two: the
// median of the turns, and the lowest and highest one.
func compare(b *testing.B, inFlight int, peer, call func() error) {
	b.Helper()
	const turns = 5
	each := max(inFlight, b.N/turns)
	var own, peers, ratios []float64
	for range turns {
		peers = append(peers, nanoseconds(b, inFlight, each, peer))
		own = append(own, nanoseconds(b, inFlight, each, call))
		ratios = append(ratios, own[len(own)-1]/peers[len(peers)-1])
	}
	for _, values := range [][]float64{own, peers, ratios} {
		slices.Sort(values)
	}
	b.ReportMetric(own[turns/2], "ns/op")
	b.ReportMetric(peers[turns/2], "peer-ns/op")
	b.ReportMetric(ratios[turns/2], "ratio")
	b.ReportMetric(ratios[0], "lowest-ratio")
	b.ReportMetric(ratios[turns-1], "highest-ratio")
}

// nanoseconds makes n calls, so many at a time, and returns the time that one adds.
func nanoseconds(b *testing.B, inFlight, n int, call func() error) float64 {
	b.Helper()
	var left atomic.Int64
	left.Store(int64(n))
	failed := make(chan error, inFlight)
	began := time.Now()
	for range inFlight {
		go func() {
			var err error
			for err == nil && left.Add(-1) >= 0 {
				err = call()
			}
			failed <- err
		}()
	}
	var err error
	for range inFlight {
		err = errors.Join(err, <-failed)
	}
	if err != nil {
		b.Fatal(err)
	}

	return float64(time.Since(began)) / float64(n)
}

// A benchRig is one server with both sides of the bus and both sides of the peer.
type benchRig struct {
	caller         *caller.Caller
	manager        *nats.Conn         // the peer's
	driver         *nats.Conn         // the peer's
	request, reply *driverv1.Envelope // what one read puts on the bus
}

func newBenchRig(b *testing.B, inProcess bool, opts embedded.Options) *benchRig {
	b.Helper()
	srv := bustest.Server(b, opts)
	cfg, peer := bus.Config{URLs: []string{srv.URL()}}, []nats.Option{}
	if inProcess {
		cfg, peer = bus.Config{InProcess: srv}, []nats.Option{nats.InProcessServer(srv)}
	}
	conn := bustest.Connect(b, cfg)
	r := &benchRig{
		caller:  optest.NewCaller(b, conn, caller.Config{Operations: &caller.StreamConfig{Memory: srv.InMemory()}}),
		manager: bustest.Raw(b, srv.URL(), peer...), driver: bustest.Raw(b, srv.URL()),
	}
	fetches, err := bus.ServeFetches(conn, optest.Cluster, optest.NewKey(b), benchClass{}, bustest.Quiet())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(fetches.Stop)
	r.serve(b, srv.URL())
	r.recordRead(b)
	if _, err := r.driver.QueueSubscribe(peerSubject, "driver", r.answer); err != nil || r.driver.Flush() != nil {
		b.Fatal("the peer's driver does not listen:", err)
	}

	return r
}

// serve runs a replica with the SDK until the end of the benchmark.
func (r *benchRig) serve(b *testing.B, url string) {
	b.Helper()
	ctx, stop := context.WithCancel(b.Context())
	served := make(chan error, 1)
	go func() {
		served <- driversdk.Serve(ctx, driversdk.Config{
			Provider: optest.Provider, NATS: driversdk.NATSConfig{URLs: []string{url}}, Clusters: []string{optest.Cluster},
			Slots: 4096, Logger: bustest.Quiet(),
		}, benchDriver{})
	}()
	b.Cleanup(func() {
		stop()
		if err := <-served; err != nil {
			b.Error(err)
		}
	})
	bustest.Eventually(b, "the replica and its operations stream", func() bool {
		streams := r.caller.Streams()

		return len(r.caller.Replicas()) == 1 && len(streams) == 1 && streams[0].Ready
	})
}

// recordRead makes one read and keeps what it put on the bus.
func (r *benchRig) recordRead(b *testing.B) {
	b.Helper()
	seen := make(chan *nats.Msg, 64)
	tap, err := r.driver.ChanSubscribe(strings.Join([]string{"mcm.v1", optest.Cluster, "*", optest.Provider, ">"}, "."), seen)
	if err == nil {
		err = r.driver.Flush()
	}
	if err = errors.Join(err, r.read()); err != nil {
		b.Fatal(err)
	}
	for r.request == nil || r.reply == nil {
		switch env, err := bus.Decode(bustest.Receive(b, "a read's request and result", seen).Data, ""); {
		case err != nil:
			b.Fatal(err)
		case env.GetStatus() != nil:
			r.request = env
		case env.GetResult() != nil:
			r.reply = env
		}
	}
	if err := tap.Unsubscribe(); err != nil {
		b.Fatal(err)
	}
}

const peerSubject = "peer.status"

// answer is the driver's part of a bare read.
func (r *benchRig) answer(m *nats.Msg) {
	if _, err := bus.Decode(m.Data, ""); err != nil {
		return // the call times out and reports it
	}
	if payload, err := bus.Encode(r.reply, ""); err == nil {
		_ = m.Respond(payload) // as above
	}
}

func (r *benchRig) bareRead() error {
	payload, err := bus.Encode(r.request, "")
	if err != nil {
		return err
	}
	m, err := r.manager.Request(peerSubject, payload, time.Minute)
	if err == nil {
		_, err = bus.Decode(m.Data, "")
	}

	return err
}

func (r *benchRig) bareCreate() error {
	if err := r.bareRead(); err != nil {
		return err
	}
	record, err := bus.Encode(r.request, "")
	if err != nil {
		return err
	}
	m := nats.NewMsg(bus.Pattern(optest.Cluster, bus.TreeClaim, optest.Provider, "peer-"+strconv.FormatUint(optest.Serial.Add(1), 10)))
	m.Data = record
	m.Header.Set("Nats-Expected-Last-Subject-Sequence", "0")
	answer, err := r.driver.RequestMsg(m, time.Minute)
	if err != nil {
		return err
	}
	var stored struct {
		Error *struct {
			Description string `json:"description"`
		} `json:"error"`
	}
	if err := json.Unmarshal(answer.Data, &stored); err != nil {
		return fmt.Errorf("answer of JetStream: %w", err)
	}
	if stored.Error != nil {
		return fmt.Errorf("JetStream: %s", stored.Error.Description)
	}

	return nil
}

var benchClassReference = &driverv1.ClassReference{Class: &driverv1.ObjectReference{Namespace: "shop", Name: "small", Uid: "5f0c5f0c", ResourceVersion: "1"}}

func (r *benchRig) read() error {
	req := optest.Status("worker-1-7d9f8-abcde")
	req.Body.GetStatus().Class = benchClassReference
	_, err := r.caller.Call(context.Background(), req)

	return err
}

func (r *benchRig) create() error {
	req := optest.Create("worker")
	req.Body.GetCreate().Class = benchClassReference
	out, err := r.caller.Call(context.Background(), req)
	if err != nil {
		return err
	}

	return r.caller.Acknowledge(req.Provider, out.Replica, req.OperationID)
}

// A benchClass serves the one class there is.
type benchClass struct{}

func (benchClass) Class(_ context.Context, provider string, req *driverv1.FetchClassRequest) (*driverv1.Class, error) {
	return &driverv1.Class{Reference: req.GetClass(), Provider: provider, ProviderSpec: []byte(`{"size":"small"}`)}, nil
}

func (benchClass) Secret(context.Context, string, *driverv1.FetchSecretRequest) (*driverv1.SecretContent, error) {
	return nil, errors.New("the class has no secret")
}

func (benchClass) Bootstrap(context.Context, string, *driverv1.FetchBootstrapRequest) (*driverv1.BootstrapContent, error) {
	return nil, errors.New("no machine here has bootstrap values")
}

type benchSpec struct {
	Size string `json:"size"`
}

// A benchDriver answers at once: the way there and back is measured.
type benchDriver struct{}

func (benchDriver) Get(_ context.Context, req *driversdk.Request[benchSpec]) (*driversdk.Instance, error) {
	return &driversdk.Instance{ProviderID: "bench://" + req.Machine.Name, MachineName: req.Machine.Name}, nil
}

func (benchDriver) Create(_ context.Context, req *driversdk.Request[benchSpec]) (*driversdk.Instance, error) {
	return &driversdk.Instance{ProviderID: "bench://" + req.Machine.UID, NodeName: req.Machine.Name}, nil
}

func (benchDriver) Delete(context.Context, *driversdk.Request[benchSpec]) error {
	return errors.New("this driver deletes nothing")
}

func (benchDriver) List(context.Context, *driversdk.Class[benchSpec]) ([]*driversdk.Instance, error) {
	return nil, errors.New("this driver lists nothing")
}
