package caller_test

import (
	"context"
	"fmt"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// BenchmarkStatus compares a read over the bus with a bare request and reply of
// the same bytes, one in flight, over the same server. Each pair of sub-benchmarks
// shares a run, so that their ratio means something on a shared machine.
func BenchmarkStatus(b *testing.B) {
	for _, where := range []string{"tcp", "inprocess"} {
		r := &optest.Rig{NATS: bustest.Server(b, embedded.Options{})}
		cfg := bus.Config{URLs: []string{r.NATS.URL()}}
		opts := []nats.Option{}
		if where == "inprocess" {
			cfg = bus.Config{InProcess: r.NATS}
			opts = append(opts, nats.InProcessServer(r.NATS))
		}
		r.Conn = bustest.Connect(b, cfg)
		r.Caller = optest.NewCaller(b, r.Conn, caller.Config{})
		// As deployed: mcm is next to its server, drivers are not.
		driver := bustest.Connect(b, bus.Config{URLs: []string{r.NATS.URL()}, InboxPrefix: bus.InboxPrefix(optest.Provider)})
		result := &driverv1.Result{Payload: &driverv1.Result_InstanceStatus{InstanceStatus: &driverv1.StatusResponse{
			Instance: &driverv1.Instance{ProviderId: "virtual://shop/m", NodeName: "m"},
		}}}
		optest.Run(b, driver, func(context.Context, *replica.Task) *driverv1.Result { return result })
		bustest.Eventually(b, "the session", func() bool { return len(r.Caller.Replicas()) == 1 })
		req := optest.Status("m")

		request, reply := wireBytes(b, r, req)
		raw := bustest.Raw(b, r.NATS.URL(), opts...)
		peer := bustest.Raw(b, r.NATS.URL())
		if _, err := peer.QueueSubscribe("raw.>", "driver", func(m *nats.Msg) { _ = m.Respond(reply) }); err != nil || peer.Flush() != nil {
			b.Fatal(err)
		}
		for _, inFlight := range []int{1, 64, 1024} {
			b.Run(fmt.Sprintf("%s/%d/raw", where, inFlight), func(b *testing.B) {
				together(b, inFlight, func() error {
					_, err := raw.Request("raw.default.driver.virtual.status.shop.m", request, time.Minute)

					return err
				})
			})
			b.Run(fmt.Sprintf("%s/%d/bus", where, inFlight), func(b *testing.B) {
				together(b, inFlight, func() error {
					_, err := r.Caller.Call(b.Context(), req)

					return err
				})
			})
		}
	}
}

// together makes b.N calls, so many at a time.
func together(b *testing.B, inFlight int, call func() error) {
	b.Helper()
	b.ReportAllocs()
	b.SetParallelism(max(1, inFlight/runtime.GOMAXPROCS(0)))
	before := cpuTime(b)
	defer func() { b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/op") }()
	if inFlight == 1 {
		for b.Loop() {
			if err := call(); err != nil {
				b.Fatal(err)
			}
		}

		return
	}
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if err := call(); err != nil {
				b.Error(err)

				return
			}
		}
	})
}

// cpuTime is what this process has used, which other work on the machine changes
// less than the time that passes.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}

	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// wireBytes listens to one call and returns what it put on the wire.
func wireBytes(b *testing.B, r *optest.Rig, req caller.Request) (request, reply []byte) {
	b.Helper()
	tap := bustest.Raw(b, r.NATS.URL())
	seen := make(chan *nats.Msg, 9)
	sub, err := tap.Subscribe("mcm.v1.default.*.virtual.>", func(m *nats.Msg) {
		if s, err := bus.ParseSubject(m.Subject); err == nil && (s.Tree == bus.TreeDriver || s.Tree == bus.TreeReply) {
			seen <- m
		}
	})
	if err != nil || tap.Flush() != nil {
		b.Fatal(err)
	}
	if _, err := r.Caller.Call(b.Context(), req); err != nil {
		b.Fatal(err)
	}
	request, reply = bustest.Receive(b, "the request", seen).Data, bustest.Receive(b, "the reply", seen).Data
	if err := sub.Unsubscribe(); err != nil || tap.Flush() != nil {
		b.Fatal(err)
	}

	return request, reply
}

// BenchmarkCreate compares a claimed mutation with the sum of what it cannot do
// without: a bare request and reply of the same bytes, and one acknowledged
// compare-and-set from where drivers are.
func BenchmarkCreate(b *testing.B) {
	r := &optest.Rig{NATS: bustest.Server(b, embedded.Options{StoreDir: b.TempDir()})}
	r.Conn = bustest.Connect(b, bus.Config{InProcess: r.NATS})
	r.Caller = optest.NewCaller(b, r.Conn, caller.Config{Operations: &caller.StreamConfig{}})
	driver := bustest.Connect(b, bus.Config{URLs: []string{r.NATS.URL()}, InboxPrefix: bus.InboxPrefix(optest.Provider)})
	optest.Run(b, driver, func(_ context.Context, t *replica.Task) *driverv1.Result { return optest.Created(t) })
	bustest.Eventually(b, "the replica and its operations stream", func() bool {
		states := r.Caller.Streams()

		return len(r.Caller.Replicas()) == 1 && len(states) == 1 && states[0].Ready
	})
	request, reply := wireBytes(b, r, optest.Status("m"))
	raw := bustest.Raw(b, r.NATS.URL(), nats.InProcessServer(r.NATS))
	peer := bustest.Raw(b, r.NATS.URL())
	if _, err := peer.QueueSubscribe("raw.>", "driver", func(m *nats.Msg) { _ = m.Respond(reply) }); err != nil || peer.Flush() != nil {
		b.Fatal(err)
	}
	b.Run("raw", func(b *testing.B) {
		for b.Loop() {
			if _, err := raw.Request("raw.default.driver.virtual.create.shop.m", request, time.Minute); err != nil {
				b.Fatal(err)
			}
			m := nats.NewMsg("mcm.v1.default.claim.virtual.raw-" + strconv.FormatUint(optest.Serial.Add(1), 10))
			m.Data = request
			m.Header.Set("Nats-Expected-Last-Subject-Sequence", "0")
			if _, err := peer.RequestMsg(m, time.Minute); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("bus", func(b *testing.B) {
		for b.Loop() {
			req := optest.Create("m")
			out, err := r.Caller.Call(b.Context(), req)
			if err != nil {
				b.Fatal(err)
			}
			if err := r.Caller.Acknowledge(optest.Provider, out.Replica, req.OperationID); err != nil {
				b.Fatal(err)
			}
		}
	})
}
