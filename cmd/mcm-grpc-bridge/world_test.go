package main

import (
	"context"
	"fmt"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloud"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	apiToken       = "the-api-token-of-the-cloud"
	bootstrapToken = "abcdef.0123456789abcdef"
	// opLimit is how long an operation may take.
	opLimit = time.Minute
)

// A world has a bus, a manager's side of it, and a virtual cloud.
type world struct {
	t      *testing.T
	nats   *embedded.Server
	caller *caller.Caller
	store  *store
	url    string // of the cloud
	cloud  *cloudapi.Client
	admin  *cloudapi.Admin
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, nats: bustest.Server(t, embedded.Options{}), store: &store{secrets: map[string]*driverv1.SecretContent{}}}
	conn := bustest.Connect(t, bus.Config{URLs: []string{w.nats.URL()}, Name: "mcm"})
	fetches, err := bus.ServeFetches(conn, optest.Cluster, optest.NewKey(t), w.store, bustest.Quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(fetches.Stop)
	w.caller = optest.NewCaller(t, conn, caller.Config{Owner: "the-owner"})
	c, err := cloud.New(t.Context(), cloud.Options{Logger: bustest.Quiet()})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(cloud.NewHandler(c, apiToken))
	t.Cleanup(server.CloseClientConnections)
	w.url = server.URL
	if w.cloud, err = cloudapi.NewClient(server.URL, apiToken); err != nil {
		t.Fatal(err)
	}
	if w.admin, err = cloudapi.NewAdmin(server.URL, apiToken); err != nil {
		t.Fatal(err)
	}
	w.store.class = &driverv1.Class{
		Reference:    &driverv1.ObjectReference{Namespace: "shop", Name: "small", Uid: "uid-small", ResourceVersion: "7"},
		ProviderSpec: fmt.Appendf(nil, `{"endpoint":%q,"machineType":"small","region":"moon","tags":{"cluster":"shop"}}`, w.url),
	}
	w.store.setSecret("cloud", "1", apiToken)

	return w
}

// bridge starts the program and returns it and its address.
func (w *world) bridge(args ...string) (p *process, address string) {
	w.t.Helper()
	p = start(w.t, "bridge", []string{"NATS_URL=" + w.nats.URL()}, append([]string{
		"--grpc-listen=127.0.0.1:0", "--listen=127.0.0.1:0", "--log-format=json", "--kind=VirtualMachineClass=virtual,AWSMachineClass=aws,AzureMachineClass=azure", "--drain-timeout=20s",
	}, args...)...)

	address = p.await("serving drivers", "address")

	return p, address
}

// client starts a client and returns when its replica is on the bus.
func (w *world) client(form, address, kind string, env ...string) *process {
	w.t.Helper()
	before := w.caller.Replicas()
	p := start(w.t, form, append([]string{addressVariable + "=" + address, kindVariable + "=" + kind}, env...))
	bustest.Eventually(w.t, "the client's replica is on the bus", func() bool {
		for _, known := range w.caller.Replicas() {
			id := known.Session.GetReplica()
			if !slices.ContainsFunc(before, func(r caller.Replica) bool { return r.Session.GetReplica() == id }) {
				p.replica = id
			}
		}

		return p.replica != ""
	})

	return p
}

func (w *world) classReference(secret string) *driverv1.ClassReference {
	return &driverv1.ClassReference{Class: w.store.class.GetReference(), Secret: w.store.reference(secret)}
}

// create returns the request for a machine's create.
func (w *world) create(provider, machine string) caller.Request {
	req := optest.Create(machine)
	req.Provider, req.Timeout = provider, opLimit
	req.Body.GetCreate().Class = w.classReference("cloud")

	return req
}

// remove returns the request for the delete of a created machine.
func (w *world) remove(req caller.Request, providerID string) caller.Request {
	req = optest.Then(req, "delete", "0")
	req.Body.GetDelete().Class = w.classReference("cloud")
	req.Body.GetDelete().Machine.ProviderId = providerID

	return req
}

// list returns the machines' names that the class's list has, by provider id.
func (w *world) list(provider string) map[string]string {
	w.t.Helper()
	out := w.call(w.listRequest(provider, "cloud"))
	names := map[string]string{}
	for _, i := range out.Result.GetList().GetInstances() {
		names[i.GetProviderId()] = i.GetMachineName()
	}

	return names
}

func (w *world) listRequest(provider, secret string) caller.Request {
	return caller.Request{
		Provider: provider, Namespace: "shop", Name: "small", OperationID: fmt.Sprintf("list.%d", optest.Serial.Add(1)), Timeout: opLimit,
		Body: &driverv1.Envelope{Body: &driverv1.Envelope_List{List: &driverv1.ListRequest{Class: w.classReference(secret)}}},
	}
}

// call has an operation done that succeeds.
func (w *world) call(req caller.Request) *caller.Outcome {
	w.t.Helper()

	return optest.WantOK(w.t, w.insist(req))
}

// insist asks again as mcm does, where nothing ran or the outcome is unknown, and by a new operation
// where the driver was not there.
func (w *world) insist(req caller.Request) optest.Answer {
	for {
		room := w.caller.Room(req.Provider)
		out, err := w.caller.Call(w.t.Context(), req)
		switch {
		case bus.NothingRan(err):
			select {
			case <-room:
			case <-w.t.Context().Done():
				return optest.Answer{Out: out, Err: err}
			}
		case bus.OriginOf(err) == bus.OriginTimeout:
			req.Recover, req.Attempt, req.Until = true, out.Attempts, out.Until
		case bus.CodeOf(err) == driverv1.Code_CODE_UNAVAILABLE:
			id := req.OperationID
			req.OperationID = fmt.Sprintf("%s.%d", id[:strings.LastIndex(id, ".")], optest.Serial.Add(1))
			req.Recover, req.Attempt, req.Until = false, 0, time.Time{}
		default:
			return optest.Answer{Out: out, Err: err}
		}
	}
}

// A store is what the manager would read from its cluster.
type store struct {
	mu      sync.Mutex
	class   *driverv1.Class
	secrets map[string]*driverv1.SecretContent
}

func (s *store) setSecret(name, version, token string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.secrets[name] = &driverv1.SecretContent{
		Reference: &driverv1.ObjectReference{Namespace: "shop", Name: name, Uid: "uid-" + name, ResourceVersion: version},
		Data:      map[string][]byte{"apiToken": []byte(token), "userData": []byte("join by <<BOOTSTRAP_TOKEN>>")},
	}
}

func (s *store) reference(secret string) *driverv1.ObjectReference {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.secrets[secret].GetReference()
}

func (s *store) Class(context.Context, string, *driverv1.FetchClassRequest) (*driverv1.Class, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	return proto.CloneOf(s.class), nil
}

func (s *store) Secret(_ context.Context, _ string, req *driverv1.FetchSecretRequest) (*driverv1.SecretContent, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	return proto.CloneOf(s.secrets[req.GetSecret().GetName()]), nil
}

func (s *store) Bootstrap(context.Context, string, *driverv1.FetchBootstrapRequest) (*driverv1.BootstrapContent, error) {
	return &driverv1.BootstrapContent{Values: map[string]string{"<<BOOTSTRAP_TOKEN>>": bootstrapToken}}, nil
}
