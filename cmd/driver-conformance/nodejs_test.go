package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/chaos"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk/drivertest"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// narrow is the largest message of a server that takes small ones only.
const narrow = 16 << 10

// narrowServer runs one.
func narrowServer(t *testing.T) *embedded.Server {
	t.Helper()
	file := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(file, fmt.Appendf(nil, "max_payload: %d\n", narrow), 0o600); err != nil {
		t.Fatal(err)
	}

	return bustest.Server(t, embedded.Options{ConfigFile: file})
}

// A said is what a process writes. It is safe for concurrent use.
type said struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *said) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.text.Write(p)
}

func (s *said) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.text.String()
}

// startNodeJS starts an example until the test ends.
func startNodeJS(t *testing.T, example, natsURL string) *said {
	t.Helper()
	_, output := runNodeJS(t, example, natsURL)

	return output
}

// runNodeJS is startNodeJS for a test that ends it.
func runNodeJS(t *testing.T, example, natsURL string) (*driver, *said) {
	t.Helper()
	output := &said{}
	d := newDriver(nodeCommand(t, example), []string{"NATS_URL=" + natsURL}, output)
	d.env = append(d.env, tokenFile(t))
	if err := d.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.kill()
		if t.Failed() {
			t.Logf("output of the driver:\n%s", output)
		}
	})

	return d, output
}

// A result that NATS does not take is a failure that it takes, not silence.
func TestNodeJS_TooLarge(t *testing.T) {
	t.Parallel()
	for _, example := range []string{"driver-nodejs", "driver-nodejs-full"} {
		t.Run(example, func(t *testing.T) {
			t.Parallel()
			srv := narrowServer(t)
			url, _ := startCloud(t)
			client, err := cloudapi.NewClient(url, apiToken)
			if err != nil {
				t.Fatal(err)
			}
			var made []string
			for n := range 2 * narrow / 200 { // none takes less than 200 bytes in a list
				i, err := client.Create(t.Context(), cloudapi.CreateRequest{
					Name: fmt.Sprintf("%s-%d", strings.Repeat("m", 50), n), MachineType: "small", Region: "moon", Identity: cloudapi.IdentityNone,
					Tags: map[string]string{"machinebus.io/cluster": "default", "machinebus.io/class": "small", "machinebus.io/machine-uid": fmt.Sprint("uid-", n)},
				})
				if err != nil {
					t.Fatal(err)
				}
				made = append(made, i.ID)
			}
			startNodeJS(t, example, srv.URL())
			cfg := configFor(srv.URL(), url)
			cfg.Only = []string{"LIST-2"}
			if cfg.Key, err = bus.NewSealKey(); err != nil { // the driver trusts the first
				t.Fatal(err)
			}
			if _, err := drivertest.Check(t.Context(), cfg, nil); err == nil || !strings.Contains(err.Error(), `Internal: "the result cannot be sent`) {
				t.Errorf("a list that does not fit messages of %d bytes: %v", narrow, err)
			}
			for _, id := range made {
				if err := client.Delete(t.Context(), id); err != nil {
					t.Error(err)
				}
			}
			if report, err := drivertest.Check(t.Context(), cfg, nil); err != nil || !report.OK() {
				t.Errorf("a list that fits: %v, %v", err, report)
			}
		})
	}
}

// configFor checks an example in Node.js.
func configFor(natsURL, cloudURL string) drivertest.Config {
	return drivertest.Config{
		NATS: bus.Config{URLs: []string{natsURL}}, Provider: "nodejs", Repeat: 2,
		Class: drivertest.Class{
			Namespace: "ns", Name: "small", ProviderSpec: fmt.Appendf(nil, specFormat, cloudURL),
			SecretRef: drivertest.Reference{Namespace: "ns", Name: "cloud"},
		},
		Secrets: []drivertest.Secret{{Namespace: "ns", Name: "cloud", Data: map[string][]byte{"apiToken": []byte(apiToken)}}},
	}
}

// ask publishes a request of a machine's first operation and returns where it is answered.
func ask(t *testing.T, nc *nats.Conn, tree, machine string, env *driverv1.Envelope) *nats.Subscription {
	t.Helper()
	reply := "mcm.v1.default.reply.nodejs.test." + machine
	sub, err := nc.SubscribeSync(reply)
	if err != nil {
		t.Fatal(err)
	}
	env.Attempt, env.Timeout = 1, durationpb.New(time.Minute)
	if tree == "driver" && bus.Mutates(bus.OperationOf(env)) {
		env.ClaimTerms = &driverv1.ClaimTerms{Sequence: new(uint64)}
	}
	payload, err := bus.Encode(env, "")
	if err != nil {
		t.Fatal(err)
	}
	subject := "mcm.v1.default." + tree + ".nodejs." + bus.Verb(bus.OperationOf(env)) + ".ns." + machine
	if err := nc.PublishRequest(subject, reply, payload); err != nil {
		t.Fatal(err)
	}

	return sub
}

// resultOf waits for what a request is answered.
func resultOf(t *testing.T, sub *nats.Subscription) *driverv1.Result {
	t.Helper()
	for {
		m, err := sub.NextMsg(time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		env, err := bus.Decode(m.Data, "")
		if err != nil {
			t.Fatal(err)
		}
		if env.GetResult() != nil {
			return env.GetResult()
		}
	}
}

// serveClass answers fetches of the class, as mcm would, for a cloud.
func serveClass(t *testing.T, nc *nats.Conn, url string) {
	t.Helper()
	if _, err := nc.Subscribe("mcm.v1.default.fetch.nodejs.class", func(m *nats.Msg) {
		payload, err := bus.Encode(&driverv1.Envelope{Body: &driverv1.Envelope_FetchedClass{FetchedClass: &driverv1.FetchClassResponse{
			Class: &driverv1.Class{Reference: small.GetClass(), ProviderSpec: fmt.Appendf(nil, specFormat, url)},
		}}}, "")
		if err == nil {
			err = m.Respond(payload)
		}
		if err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
}

var small = &driverv1.ClassReference{Class: &driverv1.ObjectReference{Namespace: "ns", Name: "small", Uid: "small", ResourceVersion: "1"}}

// A replica that keeps more results than a session has room for goes on sending
// sessions, and says how many are not in them.
func TestNodeJS_Omitted(t *testing.T) {
	t.Parallel()
	srv := narrowServer(t)
	nc := bustest.Raw(t, srv.URL())
	newOperations(t, nc)
	sessions, err := nc.SubscribeSync("mcm.v1.default.session.nodejs.*")
	if err != nil {
		t.Fatal(err)
	}
	startNodeJS(t, "driver-nodejs-full", srv.URL())
	next := func() *driverv1.Session {
		m, err := sessions.NextMsg(time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		env, err := bus.Decode(m.Data, "")
		if err != nil {
			t.Fatal(err)
		}

		return env.GetSession()
	}
	next() // it is there
	const kept = narrow / 100
	for n := range kept { // no manager is there to be asked for the class
		name := fmt.Sprintf("%s-%d", strings.Repeat("m", 50), n)
		result := resultOf(t, ask(t, nc, "driver", name, &driverv1.Envelope{
			OperationId: name + ".delete.0", Body: &driverv1.Envelope_Delete{Delete: &driverv1.DeleteRequest{
				Machine: &driverv1.Machine{Namespace: "ns", Name: name, Uid: name}, Class: small,
			}},
		}))
		if code := result.GetStatus().GetCode(); code != driverv1.Code_CODE_UNAVAILABLE {
			t.Fatalf("a delete without a class was answered %s", code)
		}
	}
	bustest.Eventually(t, "a session lists all results, or how many it omits", func() bool {
		s := next()

		return s.GetOmitted() > 0 && len(s.GetOperations()) > 0 && int(s.GetOmitted())+len(s.GetOperations()) == kept
	})
}

// What could not be said while NATS was away is not said later.
func TestNodeJS_CutOff(t *testing.T) {
	t.Parallel()
	srv := bustest.Server(t, embedded.Options{})
	proxy := bustest.NewProxy(t, srv.URL())
	url, admin := startCloud(t)
	nc := bustest.Raw(t, srv.URL())
	serveClass(t, nc, url)
	output := startNodeJS(t, "driver-nodejs", proxy.URL())
	bustest.Eventually(t, "the driver serves", func() bool { return strings.Contains(output.String(), "serving") })
	cloud := lookInto(url, admin)
	release, err := cloud.Hold(t.Context(), "m1")
	if err != nil {
		t.Fatal(err)
	}
	lost := ask(t, nc, "plain", "m1", &driverv1.Envelope{OperationId: "u1.create.0", Body: &driverv1.Envelope_Create{
		Create: &driverv1.CreateRequest{Machine: &driverv1.Machine{Namespace: "ns", Name: "m1", Uid: "u1"}, Class: small},
	}})
	if err := cloud.Held(t.Context(), "m1"); err != nil {
		t.Fatal(err)
	}
	listens := func() bool {
		m, err := ask(t, nc, "plain", nuid.Next(), &driverv1.Envelope{
			OperationId: "READ", Body: &driverv1.Envelope_List{List: &driverv1.ListRequest{Class: small}},
		}).NextMsg(time.Second)

		return err == nil && len(m.Data) > 0
	}
	// Its client tries to connect again and hears nothing: what it is given now it
	// would send later.
	proxy.Hold(chaos.ToClient)
	proxy.Drop()
	bustest.Eventually(t, "the driver connects again", func() bool { return proxy.Clients() > 0 })
	release()
	bustest.Eventually(t, "the driver is done", func() bool { return strings.Contains(output.String(), "u1.create.0 OK") })
	proxy.Mend()
	bustest.Eventually(t, "the driver is back", listens) // behind whatever it kept
	if m, err := lost.NextMsg(time.Millisecond); err == nil {
		t.Errorf("a create that ended while the driver was cut off was answered afterwards: %q", m.Data)
	}
}

// Answers in JSON say so, and repeat none of the request's other headers.
func TestNodeJS_Headers(t *testing.T) {
	t.Parallel()
	for example, tree := range map[string]string{"driver-nodejs": "plain", "driver-nodejs-full": "driver"} {
		t.Run(example, func(t *testing.T) {
			t.Parallel()
			srv := bustest.Server(t, embedded.Options{})
			nc := bustest.Raw(t, srv.URL())
			output := startNodeJS(t, example, srv.URL())
			bustest.Eventually(t, "the driver serves", func() bool { return strings.Contains(output.String(), "serving") })
			const reply = "mcm.v1.default.reply.nodejs.test.headers"
			sub, err := nc.SubscribeSync(reply)
			if err != nil {
				t.Fatal(err)
			}
			json := []string{"application/json"}
			if err := nc.PublishMsg(&nats.Msg{
				Subject: "mcm.v1.default." + tree + ".nodejs.validate.ns.small", Reply: reply,
				Header: nats.Header{"Content-Type": json, "traceparent": {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}},
				Data:   []byte(`{"operationId":"READ","attempt":1,"timeout":"60s","validate":{"class":{"class":{"namespace":"ns","name":"small"}}}}`),
			}); err != nil {
				t.Fatal(err)
			}
			m, err := sub.NextMsg(time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(nats.Header{"Content-Type": json}, m.Header); diff != "" {
				t.Errorf("headers of %s (-want +got):\n%s", m.Data, diff)
			}
		})
	}
}

// PROTOCOL.md promises a plain driver of under a hundred lines that can be read, and
// the calls of its cloud beside it.
func TestNodeJS_Lines(t *testing.T) {
	t.Parallel()
	const most = 120
	for _, file := range []string{"driver.mjs", "cloud.mjs"} {
		text, err := os.ReadFile("../../deploy/examples/driver-nodejs/" + file)
		if err != nil {
			t.Fatal(err)
		}
		lines := 0
		for line := range strings.Lines(string(text)) {
			lines++
			if utf8.RuneCountInString(line) > most+len("\n") {
				t.Errorf("%s:%d is longer than %d columns", file, lines, most)
			}
		}
		if lines >= 100 {
			t.Errorf("%s has %d lines", file, lines)
		}
	}
}
