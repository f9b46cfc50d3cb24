package dispatch_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/mcm/dispatch"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

type greeter func()

func (g greeter) Hello(*driverv1.Hello) error {
	g()

	return nil
}

// A driver that does not know the leader gets a hello at once, and not every few seconds:
// until then it would do what the manager before still sends.
func TestHello_Behind(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var at []time.Duration
		start, behind := time.Now(), make(chan struct{}, 1)
		behind <- struct{}{}
		hello := &dispatch.Hello{Behind: behind, Message: &driverv1.Hello{}, Greeter: greeter(func() { at = append(at, time.Since(start)) })}
		go func() { _ = hello.Start(ctx) }()
		<-time.After(6 * time.Second) // of the bubble's clock
		synctest.Wait()
		if diff := cmp.Diff([]time.Duration{0, bus.SessionInterval, 5 * time.Second}, at); diff != "" {
			t.Errorf("hellos came at (-want +got):\n%s", diff)
		}
	})
}

// Two control planes of one name on one bus would be one for the drivers.
func TestNamesake(t *testing.T) {
	t.Parallel()
	srv := bustest.Server(t, embedded.Options{})
	conn := bustest.Connect(t, bus.Config{URLs: []string{srv.URL()}, Name: "mcm"})
	namesake := dispatch.NewNamesake("uid-1", "", logr.Discard())
	heard := make(chan string, 10)
	stop, err := bus.WatchHello(conn, cluster, func(h *driverv1.Hello) {
		namesake.OnHello(h)
		heard <- h.GetMcm()
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	announcer, err := bus.NewAnnouncer(conn, cluster)
	if err != nil {
		t.Fatal(err)
	}
	lead := func(name, uid string) {
		ctx, cancel := context.WithCancel(t.Context())
		hello := &dispatch.Hello{Greeter: announcer, Message: &driverv1.Hello{Mcm: name, ClusterUid: uid}}
		done := make(chan error, 1)
		go func() { done <- hello.Start(ctx) }()
		if got := bustest.Receive(t, "hello of "+name, heard); got != name {
			t.Errorf("heard %s, want %s", got, name)
		}
		cancel()
		if err := bustest.Receive(t, "end of "+name, done); err != nil {
			t.Error(err)
		}
		if !hello.NeedLeaderElection() {
			t.Error("a manager that does not lead says that it does")
		}
	}
	lead("one", "uid-1")
	if err := namesake.Check(nil); err != nil {
		t.Errorf("its own hello fails the check: %v", err)
	}
	lead("two", "uid-2")
	if err := namesake.Check(nil); err == nil || !strings.Contains(err.Error(), "manager two") {
		t.Errorf("check is %v, want an error that names manager two", err)
	}
}

// Without a prober the readiness check is not called, and its answer withholds
// what is to be done.
func TestNamesake_Log(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		lines := make(chan string, 10)
		namesake := dispatch.NewNamesake("uid-1", "", funcr.New(func(_, args string) { lines <- args }, funcr.Options{}))
		logged := func(want string) {
			t.Helper()
			synctest.Wait()
			select {
			case got := <-lines:
				if want == "" || !strings.Contains(got, want) {
					t.Errorf("log has %q, want %q", got, want)
				}
			default:
				if want != "" {
					t.Errorf("log has nothing, want %q", want)
				}
			}
		}
		for range 2 {
			for range 5 { // for longer than it takes to be forgotten
				namesake.OnHello(&driverv1.Hello{Mcm: "two", ClusterUid: "uid-2"})
				<-time.After(5 * time.Second) // of the bubble's clock
			}
			logged("--cluster-name")
			logged("")
			if namesake.Check(nil) == nil {
				t.Error("the check passes while a namesake is heard")
			}
			<-time.After(10 * time.Second) // of the bubble's clock
			logged("two")
			if err := namesake.Check(nil); err != nil {
				t.Errorf("the namesake is gone, and the check says %v", err)
			}
		}
	})
}
