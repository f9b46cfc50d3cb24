package bus_test

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
	"github.com/machinebus/machinebus/bus/embedded"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// BenchmarkStatus compares a read over the bus with a bare request and reply of
// the same bytes, one in flight, over the same server. Each pair of sub-benchmarks
// shares a run, so that their ratio means something on a shared machine.
func BenchmarkStatus(b *testing.B) {
	for _, where := range []string{"tcp", "inprocess"} {
		r := &rig{srv: bustest.Server(b, embedded.Options{})}
		cfg := bus.Config{URLs: []string{r.srv.URL()}}
		opts := []nats.Option{}
		if where == "inprocess" {
			cfg = bus.Config{InProcess: r.srv}
			opts = append(opts, nats.InProcessServer(r.srv))
		}
		r.conn = bustest.Connect(b, cfg)
		r.caller = newCaller(b, r.conn, bus.CallerConfig{})
		// As deployed: mcm is next to its server, drivers are not.
		driver := bustest.Connect(b, bus.Config{URLs: []string{r.srv.URL()}, InboxPrefix: bus.InboxPrefix(provider)})
		result := &driverv1.Result{Payload: &driverv1.Result_InstanceStatus{InstanceStatus: &driverv1.StatusResponse{
			Instance: &driverv1.Instance{ProviderId: "virtual://shop/m", NodeName: "m"},
		}}}
		run(b, driver, func(context.Context, *bus.Task) *driverv1.Result { return result })
		bustest.Eventually(b, "the session", func() bool { return len(r.caller.Replicas()) == 1 })
		req := status("m")

		request, reply := wireBytes(b, r, req)
		raw := bustest.Raw(b, r.srv.URL(), opts...)
		peer := bustest.Raw(b, r.srv.URL())
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
					_, err := r.caller.Call(b.Context(), req)

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
func wireBytes(b *testing.B, r *rig, req bus.Request) (request, reply []byte) {
	b.Helper()
	tap := bustest.Raw(b, r.srv.URL())
	seen := make(chan *nats.Msg, 9)
	sub, err := tap.Subscribe("mcm.v1.default.*.virtual.>", func(m *nats.Msg) {
		if s, err := bus.ParseSubject(m.Subject); err == nil && (s.Tree == bus.TreeDriver || s.Tree == bus.TreeReply) {
			seen <- m
		}
	})
	if err != nil || tap.Flush() != nil {
		b.Fatal(err)
	}
	if _, err := r.caller.Call(b.Context(), req); err != nil {
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
	r := &rig{srv: bustest.Server(b, embedded.Options{StoreDir: b.TempDir()})}
	r.conn = bustest.Connect(b, bus.Config{InProcess: r.srv})
	r.caller = newCaller(b, r.conn, bus.CallerConfig{Operations: &bus.StreamConfig{}})
	driver := bustest.Connect(b, bus.Config{URLs: []string{r.srv.URL()}, InboxPrefix: bus.InboxPrefix(provider)})
	run(b, driver, func(_ context.Context, t *bus.Task) *driverv1.Result { return created(t) })
	bustest.Eventually(b, "the replica", func() bool {
		reps := r.caller.Replicas()

		return len(reps) == 1
	})
	request, reply := wireBytes(b, r, status("m"))
	raw := bustest.Raw(b, r.srv.URL(), nats.InProcessServer(r.srv))
	peer := bustest.Raw(b, r.srv.URL())
	if _, err := peer.QueueSubscribe("raw.>", "driver", func(m *nats.Msg) { _ = m.Respond(reply) }); err != nil || peer.Flush() != nil {
		b.Fatal(err)
	}
	b.Run("raw", func(b *testing.B) {
		for b.Loop() {
			if _, err := raw.Request("raw.default.driver.virtual.create.shop.m", request, time.Minute); err != nil {
				b.Fatal(err)
			}
			m := nats.NewMsg("mcm.v1.default.claim.virtual.raw-" + strconv.FormatUint(serial.Add(1), 10))
			m.Data = request
			m.Header.Set("Nats-Expected-Last-Subject-Sequence", "0")
			if _, err := peer.RequestMsg(m, time.Minute); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("bus", func(b *testing.B) {
		for b.Loop() {
			req := create("m")
			out, err := r.caller.Call(b.Context(), req)
			if err != nil {
				b.Fatal(err)
			}
			if err := r.caller.Acknowledge(provider, out.Replica, req.OperationID); err != nil {
				b.Fatal(err)
			}
		}
	})
}
