package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloud"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// The driver runs as a process, against a real nats-server and the virtual cloud
// itself; the tests ask through the bus as the manager does.

const (
	childVariable = "DRIVER_VIRTUAL_TEST_CHILD"
	apiToken      = "test-token"
	patience      = 30 * time.Second
)

// TestMain lets the test binary be the driver as well.
func TestMain(m *testing.M) {
	if os.Getenv(childVariable) == "" {
		os.Exit(m.Run())
	}
	go func() { // a child whose parent is gone has no open standard input
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(3)
	}()
	main()
	os.Exit(0)
}

// A child is one process of the driver.
type child struct {
	cmd  *exec.Cmd
	mu   sync.Mutex
	text bytes.Buffer
	done chan error
}

func (c *child) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.text.Write(p)
}

func (c *child) output() string {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.text.String()
}

func run(t *testing.T, args ...string) *child {
	t.Helper()
	c := &child{cmd: exec.CommandContext(t.Context(), os.Args[0], args...), done: make(chan error, 1)}
	c.cmd.Env = append(os.Environ(), childVariable+"=1", "MACHINEBUS_LOG_LEVEL=debug")
	c.cmd.Stdout, c.cmd.Stderr = c, c
	if _, err := c.cmd.StdinPipe(); err != nil { // stays open while this process lives
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.cmd.Process.Kill()
		c.wait(t)
		if t.Failed() {
			t.Logf("driver %v:\n%s", args, c.output())
		}
	})
	go func() { c.done <- c.cmd.Wait() }()

	return c
}

// wait returns the exit code; -1 when killed.
func (c *child) wait(t *testing.T) int {
	t.Helper()
	select {
	case err := <-c.done:
		c.done <- err // for the next caller
	case <-time.After(patience):
		t.Errorf("the driver did not end:\n%s", c.output())
	}

	return c.cmd.ProcessState.ExitCode()
}

func (c *child) signal(t *testing.T, s os.Signal) {
	t.Helper()
	if err := c.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

func TestMain_BadInput(t *testing.T) {
	t.Parallel()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	cases := map[string]struct {
		reason string
		args   []string
		exit   int
		says   string
	}{
		"unknown flag":  {"names it", []string{"--slost=3"}, 2, "flag provided but not defined: -slost (-h lists the flags)\n"},
		"argument":      {"names it", []string{"slots=3"}, 1, "unexpected argument"},
		"identity":      {"says what there is", []string{"--identity=luck"}, 2, "want token, unique_name or none (-h lists the flags)\n"},
		"help":          {"lists the flags", []string{"-h"}, 0, "-drain-timeout"},
		"taken address": {"names it and the remedy", []string{"--listen=" + l.Addr().String()}, 1, "choose another --listen"},
		"no such file":  {"names it", []string{"--nats-creds=/nowhere"}, 1, "/nowhere"},
		"plain text":    {"is not sent beyond this host", []string{"--nats-url=nats://192.0.2.1:4222"}, 1, "--nats-allow-insecure"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := run(t, tc.args...)
			if got := c.wait(t); got != tc.exit {
				t.Errorf("%s: want exit code %d, have %d", tc.reason, tc.exit, got)
			}
			if text := c.output(); !strings.Contains(text, tc.says) {
				t.Errorf("%s: want %q in:\n%s", tc.reason, tc.says, text)
			}
		})
	}
}

// world is a bus, a cloud and the manager's side.
type world struct {
	t        *testing.T
	natsURL  string
	cloudURL string
	admin    *cloudapi.Admin
	caller   *caller.Caller
}

func newWorld(t *testing.T, knobs cloudapi.Knobs) *world {
	t.Helper()
	quiet, srv := bustest.Quiet(), bustest.Server(t, embedded.Options{})
	c, err := cloud.New(t.Context(), cloud.Options{Knobs: knobs, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(cloud.NewHandler(c, apiToken))
	t.Cleanup(server.CloseClientConnections)
	w := &world{t: t, natsURL: srv.URL(), cloudURL: server.URL}
	if w.admin, err = cloudapi.NewAdmin(server.URL, apiToken); err != nil {
		t.Fatal(err)
	}
	conn := bustest.Connect(t, bus.Config{URLs: []string{srv.URL()}})
	key, err := bus.NewSealKey()
	if err != nil {
		t.Fatal(err)
	}
	fetches, err := bus.ServeFetches(conn, "default", key, w, quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(fetches.Stop)
	if w.caller, err = caller.New(conn, caller.Config{Cluster: "default", Operations: &caller.StreamConfig{Memory: true}, Logger: quiet}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.caller.Close)

	return w
}

func (w *world) Class(context.Context, string, *driverv1.FetchClassRequest) (*driverv1.Class, error) {
	return &driverv1.Class{Reference: classRef, ProviderSpec: fmt.Appendf(nil, `{
		"apiVersion":"virtual.machinebus.io/v1alpha1", "kind":"VirtualMachineSpec",
		"endpoint":%q, "machineType":"small", "region":"moon"}`, w.cloudURL)}, nil
}

func (w *world) Secret(context.Context, string, *driverv1.FetchSecretRequest) (*driverv1.SecretContent, error) {
	return &driverv1.SecretContent{Reference: secretRef, Data: map[string][]byte{
		"apiToken": []byte(apiToken), "userData": []byte("join <<BOOTSTRAP_TOKEN>>"),
	}}, nil
}

func (w *world) Bootstrap(context.Context, string, *driverv1.FetchBootstrapRequest) (*driverv1.BootstrapContent, error) {
	return &driverv1.BootstrapContent{Values: map[string]string{"<<BOOTSTRAP_TOKEN>>": "abcdef.0123456789abcdef"}}, nil
}

var (
	classRef  = &driverv1.ObjectReference{Namespace: "ns", Name: "small", Uid: "c", ResourceVersion: "1"}
	secretRef = &driverv1.ObjectReference{Namespace: "ns", Name: "cloud", Uid: "s", ResourceVersion: "1"}
)

func (w *world) call(body *driverv1.Envelope, operationID string) (*caller.Outcome, error) {
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	out, err := w.caller.Call(ctx, caller.Request{
		Provider: "virtual", Namespace: "ns", Name: "m1", OperationID: operationID, Body: body, Timeout: patience,
	})
	if replica := out.Replica; replica != "" {
		_ = w.caller.Acknowledge("virtual", replica, operationID) // a read needs none
	}

	return out, err
}

func (w *world) replicas(n int) {
	w.t.Helper()
	bustest.Eventually(w.t, fmt.Sprintf("%d replicas", n), func() bool { return len(w.caller.Replicas()) == n })
}

func (w *world) stats() *cloudapi.Stats {
	w.t.Helper()
	stats, err := w.admin.Stats(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}

	return stats
}

func create() *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Create{Create: &driverv1.CreateRequest{Machine: m1(), Class: class()}}}
}

func m1() *driverv1.Machine { return &driverv1.Machine{Namespace: "ns", Name: "m1", Uid: "uid-m1"} }

func class() *driverv1.ClassReference {
	return &driverv1.ClassReference{Class: classRef, Secret: secretRef}
}

// One machine's life through the driver, on the bus and in the cloud.
func TestMain_Life(t *testing.T) {
	t.Parallel()
	w := newWorld(t, cloudapi.Knobs{})
	driver := run(t, "--nats-url", w.natsURL)
	w.replicas(1)

	made, err := w.call(create(), "uid-m1.create.0")
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	id := made.Result.GetCreate().GetInstance().GetProviderId()
	status := &driverv1.Envelope{Body: &driverv1.Envelope_Status{Status: &driverv1.StatusRequest{Machine: m1(), Class: class()}}}
	got, err := w.call(status, "status-1")
	if bus.CodeOf(err) != driverv1.Code_CODE_UNINITIALIZED || got.Result.GetInstanceStatus().GetInstance().GetProviderId() != id {
		t.Errorf("status before initialize: have %v, %v", got.Result, err)
	}
	initialize := &driverv1.Envelope{Body: &driverv1.Envelope_Initialize{
		Initialize: &driverv1.InitializeRequest{Machine: m1(), Class: class()},
	}}
	if _, err := w.call(initialize, "uid-m1.initialize.0"); err != nil {
		t.Errorf("initialize: %v", err)
	}
	status = &driverv1.Envelope{Body: &driverv1.Envelope_Status{Status: &driverv1.StatusRequest{Machine: m1(), Class: class()}}}
	if _, err := w.call(status, "status-2"); err != nil {
		t.Errorf("status after initialize: %v", err)
	}
	deletion := &driverv1.Envelope{Body: &driverv1.Envelope_Delete{Delete: &driverv1.DeleteRequest{Machine: m1(), Class: class()}}}
	if _, err := w.call(deletion, "uid-m1.delete.0"); err != nil || w.stats().Live != 0 {
		t.Errorf("delete: %v, %d left", err, w.stats().Live)
	}
	for _, secret := range []string{apiToken, "abcdef.0123456789abcdef"} {
		if strings.Contains(driver.output(), secret) {
			t.Errorf("the log shows a secret:\n%s", driver.output())
		}
	}
}

// A driver that is stopped during a create finishes it first.
func TestMain_Drain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, cloudapi.Knobs{Hold: []string{"*"}})
	driver := run(t, "--nats-url", w.natsURL)
	w.replicas(1)
	created := make(chan error, 1)
	go func() {
		_, err := w.call(create(), "uid-m1.create.0")
		created <- err
	}()
	bustest.Eventually(w.t, "a create held by the cloud", func() bool { return w.stats().Held == 1 })
	driver.signal(t, syscall.SIGTERM)
	bustest.Eventually(w.t, "draining", func() bool { return strings.Contains(driver.output(), "draining") })
	if _, err := w.admin.Release(t.Context(), "*"); err != nil {
		t.Fatal(err)
	}
	if err := <-created; err != nil {
		t.Errorf("the create that ran at the stop: %v", err)
	}
	if code := driver.wait(t); code != 0 {
		t.Errorf("want exit code 0, have %d", code)
	}
}

// A driver that is stopped twice cancels running operations.
func TestMain_HardStop(t *testing.T) {
	t.Parallel()
	w := newWorld(t, cloudapi.Knobs{Hold: []string{"*"}})
	driver := run(t, "--nats-url", w.natsURL)
	w.replicas(1)
	created := make(chan error, 1)
	go func() {
		_, err := w.call(create(), "uid-m1.create.0")
		created <- err
	}()
	bustest.Eventually(w.t, "a create held by the cloud", func() bool { return w.stats().Held == 1 })
	driver.signal(t, syscall.SIGTERM)
	bustest.Eventually(w.t, "draining", func() bool { return strings.Contains(driver.output(), "a stop signal cancels them") })
	driver.signal(t, os.Interrupt)
	if code := driver.wait(t); code != 0 {
		t.Errorf("want exit code 0, have %d", code)
	}
	// The cloud may have done it: the outcome must not be a failure.
	if err := <-created; bus.OriginOf(err) != bus.OriginTimeout {
		t.Errorf("the create that was cut off: want an unknown outcome, have %v (%v)", err, bus.OriginOf(err))
	}
}

// A replica is killed in the middle of a create: the other one finishes it, and
// there is one instance.
func TestMain_Kill(t *testing.T) {
	t.Parallel()
	w := newWorld(t, cloudapi.Knobs{Hold: []string{"*"}, CreateEffect: cloudapi.EffectStart})
	first := run(t, "--nats-url", w.natsURL)
	w.replicas(1)
	type outcome struct {
		out *caller.Outcome
		err error
	}
	created := make(chan outcome, 1)
	go func() {
		out, err := w.call(create(), "uid-m1.create.0")
		created <- outcome{out, err}
	}()
	bustest.Eventually(w.t, "a create held by the cloud", func() bool { return w.stats().Held == 1 })
	run(t, "--nats-url", w.natsURL)
	w.replicas(2)
	first.signal(t, syscall.SIGKILL)
	got := <-created
	if got.err != nil || got.out.Attempts < 2 {
		t.Errorf("want the second attempt's success, have %+v, %v", got.out, got.err)
	}
	if _, err := w.admin.Release(t.Context(), "*"); err != nil {
		t.Fatal(err)
	}
	if s := w.stats(); s.Live != 1 || s.DuplicatesEver != 0 {
		t.Errorf("want one instance, have %d live and %d duplicates", s.Live, s.DuplicatesEver)
	}
}
