package cloud

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

const testToken = "an-api-token"

// bundle is a cloud behind a real HTTP server, and what its users have.
type bundle struct {
	cloud  *Cloud
	server *httptest.Server
	client *cloudapi.Client
	admin  *cloudapi.Admin
	stop   context.CancelFunc
	log    *bytes.Buffer // read it after the calls of interest have ended
	slog   *syncBuffer
}

func setup(t *testing.T, o Options) *bundle {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	b := &bundle{stop: stop, log: &bytes.Buffer{}, slog: &syncBuffer{}}
	if o.Log == nil {
		o.Log = b.log
	}
	o.Logger = slog.New(slog.NewTextHandler(b.slog, nil))
	var err error
	if b.cloud, err = New(ctx, o); err != nil {
		t.Fatal(err)
	}
	b.server = httptest.NewServer(NewHandler(b.cloud, testToken))
	t.Cleanup(func() {
		stop() // before Close, which waits for calls
		b.server.Close()
	})
	b.client = b.clientWith(t, testToken)
	if b.admin, err = cloudapi.NewAdmin(b.server.URL, testToken, cloudapi.WithHTTPClient(b.server.Client())); err != nil {
		t.Fatal(err)
	}

	return b
}

func (b *bundle) clientWith(t *testing.T, token string) *cloudapi.Client {
	t.Helper()
	client, err := cloudapi.NewClient(b.server.URL, token, cloudapi.WithHTTPClient(b.server.Client()))
	if err != nil {
		t.Fatal(err)
	}

	return client
}

func (b *bundle) patch(t *testing.T, p cloudapi.KnobsPatch) {
	t.Helper()
	if _, err := b.admin.Patch(t.Context(), p); err != nil {
		t.Fatal(err)
	}
}

func (b *bundle) mustCreate(t *testing.T, req cloudapi.CreateRequest) *cloudapi.Instance {
	t.Helper()
	i, err := b.client.Create(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}

	return i
}

// events are the log's as "op event code", without the first, which is the start.
func (b *bundle) events(t *testing.T) []string {
	t.Helper()
	entries, err := b.admin.Log(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	var events []string
	for _, e := range entries {
		event := e.Op + " " + e.Event
		if e.Code != "" {
			event += " " + e.Code
		}
		events = append(events, event)
	}

	return events
}

// eventually polls until ok, and fails the test when that takes too long.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(10 * time.Second)
	for !ok() {
		select {
		case <-time.After(time.Millisecond):
		case <-deadline:
			t.Fatalf("not in time: %s", what)
		}
	}
}

func machine(name string) cloudapi.CreateRequest {
	return cloudapi.CreateRequest{
		Name: name, MachineType: "small", Region: "here", Zone: "a",
		Tags: map[string]string{cloudapi.TagMachineUID: "uid-of-" + name}, UserData: []byte("secret user data"),
	}
}

func withToken(req cloudapi.CreateRequest, token string) cloudapi.CreateRequest {
	req.IdempotencyToken = token

	return req
}

// lines decodes a log as it was written.
func lines(t *testing.T, log io.Reader) []cloudapi.LogEntry {
	t.Helper()
	var entries []cloudapi.LogEntry
	for decoder := json.NewDecoder(log); ; {
		var e cloudapi.LogEntry
		switch err := decoder.Decode(&e); {
		case errors.Is(err, io.EOF):
			return entries
		case err != nil:
			t.Fatal(err)
		}
		entries = append(entries, e)
	}
}

func codeOf(err error) string {
	if err == nil {
		return "OK"
	}
	if code := cloudapi.CodeOf(err); code != "" {
		return code
	}

	return fmt.Sprintf("no code: %v", err)
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.b.String()
}
