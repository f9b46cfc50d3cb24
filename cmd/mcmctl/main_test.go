package main

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// bounded is how long anything a test waits for may take.
const bounded = 20 * time.Second

// startBus runs a NATS server and returns its URL.
func startBus(t *testing.T) string {
	t.Helper()

	return bustest.Server(t, embedded.Options{}).URL()
}

func connectTo(t *testing.T, url string) *bus.Conn {
	t.Helper()

	return bustest.Connect(t, bus.Config{URLs: []string{url}})
}

// startReplica runs a driver replica until the test ends.
func startReplica(t *testing.T, url string, cfg replica.Config, handle replica.HandlerFunc) {
	t.Helper()
	cfg.Logger, cfg.DrainTimeout = bustest.Quiet(), time.Second
	cfg.Capabilities = append(cfg.Capabilities,
		driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_DELETE, driverv1.Operation_OPERATION_LIST)
	cfg.CreateIdentity = driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN
	srv, err := replica.New(connectTo(t, url), cfg, handle)
	if err != nil {
		t.Fatalf("replica.New(...): %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- srv.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Server.Run(...): %v", err)
		}
	})
}

func ok(context.Context, *replica.Task) *driverv1.Result { return &driverv1.Result{} }

// createRequest asks for a machine.
func createRequest(name string) caller.Request {
	return caller.Request{
		Provider: "virtual", Namespace: "default", Name: name, OperationID: "uid-" + name + ".create.0", Timeout: bounded,
		Body: &driverv1.Envelope{Body: &driverv1.Envelope_Create{Create: &driverv1.CreateRequest{
			Machine: &driverv1.Machine{Namespace: "default", Name: name, Uid: "uid-" + strings.ReplaceAll(name, ".", "-")},
			Class:   &driverv1.ClassReference{Class: &driverv1.ObjectReference{Namespace: "default", Name: "small"}},
		}}},
	}
}

// startCreate requests a machine and ignores the outcome.
func startCreate(t *testing.T, url, name string) {
	t.Helper()
	client, err := caller.New(connectTo(t, url), caller.Config{Cluster: "default", Operations: &caller.StreamConfig{Memory: true}, Logger: bustest.Quiet()})
	if err != nil {
		t.Fatalf("caller.New(...): %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var calls sync.WaitGroup
	calls.Go(func() {
		for {
			_, err := client.Call(ctx, createRequest(name))
			if bus.OriginOf(err) != bus.OriginBus {
				return
			}
			t.Logf("create of %s: %v; again, as mcm would", name, err) // nothing was done
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
				return
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		calls.Wait()
		client.Close()
	})
}

// mcmctl runs the program.
func mcmctl(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errOut output
	ctx, cancel := context.WithTimeout(t.Context(), bounded)
	defer cancel()
	err = execute(ctx, &out, &errOut, args...)

	return out.String(), errOut.String(), err
}

func execute(ctx context.Context, out, errOut *output, args ...string) error {
	root := newRoot()
	root.SetArgs(args)
	root.SetIn(strings.NewReader(""))
	root.SetOut(out)
	root.SetErr(errOut)

	return root.ExecuteContext(ctx)
}

// output can be read while it is written.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()

	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()

	return o.buf.String()
}

// table returns a table's rows by the header's words.
func table(t *testing.T, text string) []map[string]string {
	t.Helper()
	lines := strings.Split(strings.TrimSpace(text), "\n")
	header := strings.Fields(lines[0])
	var rows []map[string]string
	for _, line := range lines[1:] {
		row := map[string]string{}
		for i, name := range header {
			begin := strings.Index(lines[0], name)
			end := len(line)
			if i+1 < len(header) {
				end = strings.Index(lines[0], header[i+1])
			}
			if begin > len(line) || end > len(line) {
				t.Fatalf("row does not fit the header:\n%s\n%s", lines[0], line)
			}
			row[name] = strings.TrimSpace(line[begin:end])
		}
		rows = append(rows, row)
	}

	return rows
}
