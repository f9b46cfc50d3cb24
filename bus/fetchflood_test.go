package bus_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A slow library is slow for one provider, until it is released.
type slowLibrary struct {
	*library

	slow    string
	release chan struct{}

	mu                       sync.Mutex
	running, worst, answered int
}

func (l *slowLibrary) count() (answered, worst int) {
	l.mu.Lock()
	defer l.mu.Unlock()

	return l.answered, l.worst
}

func (l *slowLibrary) Class(ctx context.Context, who string, req *driverv1.FetchClassRequest) (*driverv1.Class, error) {
	if who != l.slow {
		return l.library.Class(ctx, who, req)
	}
	l.mu.Lock()
	l.running++
	l.worst = max(l.worst, l.running)
	l.mu.Unlock()
	<-l.release
	l.mu.Lock()
	defer l.mu.Unlock()
	l.running--
	l.answered++

	return l.class, nil
}

// A driver that asks more than can be answered has its own fetches wait, and those
// beyond dropped, and no other provider's.
func TestFloodOfFetches(t *testing.T) {
	t.Parallel()
	r := &fetchRig{srv: bustest.Server(t, embedded.Options{}), key: optest.NewKey(t), lib: newLibrary()}
	lib := &slowLibrary{library: r.lib, slow: "flood", release: make(chan struct{})}
	conn := bustest.Connect(t, bus.Config{URLs: []string{r.srv.URL()}, Name: "mcm"})
	server, err := bus.ServeFetches(conn, optest.Cluster, r.key, lib, bustest.Quiet())
	if err != nil {
		t.Fatal(err)
	}
	release := sync.OnceFunc(func() { close(lib.release) })
	t.Cleanup(server.Stop)
	t.Cleanup(release)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := conn.Flush(ctx); err != nil {
		t.Fatal(err)
	}
	payload, err := bus.Encode(&driverv1.Envelope{Body: &driverv1.Envelope_FetchClass{
		FetchClass: &driverv1.FetchClassRequest{Class: &driverv1.ObjectReference{Name: "c"}},
	}}, "")
	if err != nil {
		t.Fatal(err)
	}
	const sent, kept, atOnce = 1000, 512, 16
	nc := bustest.Raw(t, r.srv.URL())
	for i := range sent {
		reply := fmt.Sprintf("%s.%d", bus.InboxPrefix(lib.slow), i)
		if err := nc.PublishRequest("mcm.v1."+optest.Cluster+".fetch."+lib.slow+".class", reply, payload); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}

	if _, err := r.client(t, optest.Provider, nil).Class(t.Context(), optest.Cluster, &driverv1.ObjectReference{Name: "c"}); err != nil {
		t.Errorf("another provider's fetch beside a flood: %v", err)
	}
	bustest.Eventually(t, "what is too much is dropped", func() bool { return server.Dropped() == sent-kept })
	release()
	bustest.Eventually(t, "those that wait are answered", func() bool {
		answered, _ := lib.count()

		return answered == kept
	})
	if _, got := lib.count(); got > atOnce {
		t.Errorf("%d of one provider were answered at once, want %d at most", got, atOnce)
	}
	if _, err := r.client(t, lib.slow, nil).Class(t.Context(), optest.Cluster, &driverv1.ObjectReference{Name: "c"}); err != nil {
		t.Errorf("a fetch after the flood: %v", err)
	}
}
