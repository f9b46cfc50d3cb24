package e2e

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/bootstrap"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// What is secret about a machine, as the markers of these tests are called.
const (
	credentials    = "credentials"
	userData       = "user data"
	bootstrapToken = "bootstrap token"
)

// Where the tests look for markers.
const (
	onTheBus = "messages on the bus"
	onDisk   = "files of the JetStream store"
	inLogs   = "logs"
	inKube   = "Machines, classes, Nodes and Events"
)

// TestSecrecy takes a machine from create to Running to gone, records everything
// that crosses the bus, also on disk, and looks for what is secret about it.
func TestSecrecy(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("", "-v=4")
	capture := e.capture(manager.NATSURL)
	e.startDrivers(1, manager.NATSURL, tap, "--log-level=debug")
	markers := e.createMarkedClass(virtualProvider)
	e.must(e.cloud.Hold(e.ctx(), "*"))
	name := e.createMachines(1, className)[0]
	markers[bootstrapToken] = e.bootstrapSecret(name)
	objects := e.objects()
	e.must(e.cloud.Hold(e.ctx()))

	found := e.finish(name, capture, markers, objects)
	if diff := cmp.Diff(map[string][]string{}, found); diff != "" {
		t.Errorf("secrets can be read (-want +got):\n%s", diff)
	}
	if capture.count("fetched_secret") == 0 || capture.count("fetched_bootstrap") == 0 {
		t.Error("no secret crossed the bus, so that this test shows nothing")
	}
}

// TestSecrecyUnsealed shows that the look of TestSecrecy finds what can be read:
// the driver here cannot open seals, and the operator allows that.
func TestSecrecyUnsealed(t *testing.T) {
	e := newEnv(t)
	config, ca := e.tlsConfig()
	manager, err := e.site.StartManager(e.ctx(), stack.ManagerOptions{
		Control: shared.cluster.Kubeconfig, Namespace: e.name, Cluster: e.name,
		Args: []string{"-v=4", "--nats-config", config, "--unsealed-providers=x," + plainProvider},
	})
	e.must(err)
	capture := e.capture(manager.NATSURL, nats.RootCAs(ca))
	conn, err := nats.Connect(manager.NATSURL, nats.RootCAs(ca), nats.CustomInboxPrefix(bus.InboxPrefix(plainProvider)))
	e.must(err)
	e.Cleanup(conn.Close)
	fetcher := &openFetcher{cluster: e.name, conn: conn}
	driver := &plainDriver{env: e, instances: map[string]*driverv1.Instance{}, onCreate: fetcher.fetch}
	driver.serve(manager.NATSURL, nats.RootCAs(ca))
	markers := e.createMarkedClass(plainProvider)
	name := e.createMachines(1, className)[0]
	e.waitRunning(name)
	token := fetcher.token()
	if token == "" {
		t.Fatal("the driver got no bootstrap token")
	}
	markers[bootstrapToken] = token

	want := map[string][]string{}
	for _, place := range []string{onTheBus, onDisk} {
		want[place] = []string{bootstrapToken, credentials, userData}
	}
	if diff := cmp.Diff(want, e.finish(name, capture, markers, e.objects())); diff != "" {
		t.Errorf("what can be read, and where (-want +got):\n%s", diff)
	}
}

// finish takes a machine to its end, stops everything, and looks for markers. It
// returns those found in each place.
func (e *env) finish(name string, capture *capture, markers map[string]string, objects []string) map[string][]string {
	e.Helper()
	e.waitRunning(name)
	objects = append(objects, e.objects()...)
	e.deleteAll(name)
	objects = append(objects, e.objects()...) // its Events outlive it
	texts := map[string][]string{onTheBus: capture.stop(), inKube: objects}
	e.must(e.site.Close()) // so that all has been written
	texts[onDisk] = e.files("mcm.nats")
	texts[inLogs] = e.files("mcm.log", "mcm.out", "driver-virtual-1.log", "driver-virtual-1.out")
	found := map[string][]string{}
	for place, all := range texts {
		if len(all) == 0 {
			e.Errorf("there are no %s to look at", place)
		}
		for what, marker := range markers {
			if slices.ContainsFunc(all, newNeedle(marker).in) {
				found[place] = append(found[place], what)
			}
		}
		slices.Sort(found[place])
	}
	// What a look at the disk would miss if the store wrote in another way.
	if !slices.ContainsFunc(texts[onDisk], newNeedle(name).in) {
		e.Error("the JetStream store does not name the machine: nothing was recorded in it, or not as it was sent")
	}
	return found
}

// virtualProvider is the provider of deploy/examples.
const virtualProvider = "virtual"

// createMarkedClass makes a class of the provider whose secret is full of
// markers, and returns these.
func (e *env) createMarkedClass(provider string) map[string]string {
	e.Helper()
	markers := map[string]string{
		credentials: "credentials-" + strings.ToLower(rand.Text()), userData: "userdata-" + strings.ToLower(rand.Text()),
	}
	secret, class := e.newSecret(className), e.newClass(className, nil)
	class.Provider = provider
	secret.StringData["password"] = markers[credentials]
	secret.StringData["userData"] = "#cloud-config\n# " + markers[userData] + "\ntoken: " + bootstrap.Placeholder + "\n"
	e.must(e.kube.Create(e.ctx(), secret))
	e.must(e.kube.Create(e.ctx(), class))
	return markers
}

// bootstrapSecret waits for a machine's bootstrap token and returns what is
// secret of it: the other half is its public name.
func (e *env) bootstrapSecret(machine string) string {
	e.Helper()
	m, err := e.machine(e.ctx(), machine)
	e.must(err)
	secrets := &corev1.SecretList{}
	e.eventually("the machine has a bootstrap token", func(ctx context.Context) error {
		err := e.kube.List(ctx, secrets, client.InNamespace(metav1.NamespaceSystem),
			client.MatchingLabels{bootstrap.LabelKeyMachineUID: string(m.UID)})
		if err == nil && len(secrets.Items) == 0 {
			err = errors.New("there is none")
		}
		return err
	})
	return string(secrets.Items[0].Data["token-secret"])
}

// objects returns everything that people look at in Kubernetes: what a Machine
// leads to, and what is said about it.
func (e *env) objects() []string {
	e.Helper()
	var texts []string
	for _, list := range []client.ObjectList{
		&v1alpha1.MachineList{}, &v1alpha1.MachineClassList{}, &corev1.EventList{}, &corev1.NodeList{},
	} {
		var opts []client.ListOption
		if _, ok := list.(*corev1.NodeList); !ok {
			opts = append(opts, client.InNamespace(e.name))
		}
		e.must(e.kube.List(e.ctx(), list, opts...))
		text, err := json.Marshal(list)
		e.must(err)
		texts = append(texts, string(text))
	}
	return texts
}

// files returns the content of files and folders of the env, as far as there are
// any.
func (e *env) files(names ...string) []string {
	e.Helper()
	var texts []string
	for _, name := range names {
		err := filepath.WalkDir(filepath.Join(e.site.Dir(), name), func(path string, entry os.DirEntry, err error) error {
			if errors.Is(err, os.ErrNotExist) || err == nil && !entry.Type().IsRegular() {
				return nil
			}
			if err != nil {
				return err
			}
			content, err := os.ReadFile(path)
			texts = append(texts, string(content))
			return err
		})
		e.must(err)
	}
	return texts
}

// tlsConfig writes a configuration with which NATS requires TLS, and returns its
// path and that of the authority to trust.
func (e *env) tlsConfig() (config, ca string) {
	e.Helper()
	web := httptest.NewTLSServer(nil) // for its certificate, which is valid for 127.0.0.1
	defer web.Close()
	pair := web.TLS.Certificates[0]
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	e.must(err)
	dir := e.TempDir()
	write := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		e.must(os.WriteFile(path, content, 0o600))
		return path
	}
	ca = write("cert.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}))
	keyFile := write("key.pem", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}))
	return write("nats.conf", fmt.Appendf(nil, "tls { cert_file: %q, key_file: %q }\n", ca, keyFile)), ca
}

// An openFetcher gets secrets as a driver does that cannot open seals.
type openFetcher struct {
	conn    *nats.Conn
	cluster string

	mu   sync.Mutex
	seen string
}

// token returns the secret half of the bootstrap token that was fetched.
func (f *openFetcher) token() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.seen
}

// fetch gets what a create needs, by requests that name no key.
func (f *openFetcher) fetch(id string, req *driverv1.CreateRequest) error {
	secret, err := f.ask("secret", &driverv1.Envelope{Body: &driverv1.Envelope_FetchSecret{
		FetchSecret: &driverv1.FetchSecretRequest{Class: req.GetClass().GetClass(), Secret: req.GetClass().GetSecret()},
	}})
	if err != nil {
		return err
	}
	if content := secret.GetFetchedSecret().GetUnsealed(); len(content.GetData()) == 0 {
		return fmt.Errorf("fetch secret: %s", secret.GetFetchedSecret().GetStatus().GetMessage())
	}
	m := req.GetMachine()
	answer, err := f.ask("bootstrap", &driverv1.Envelope{Body: &driverv1.Envelope_FetchBootstrap{
		FetchBootstrap: &driverv1.FetchBootstrapRequest{
			OperationId: id, Namespace: m.GetNamespace(), Machine: m.GetName(), MachineUid: m.GetUid(),
		},
	}})
	if err != nil {
		return err
	}
	token, ok := answer.GetFetchedBootstrap().GetUnsealed().GetValues()[bootstrap.Placeholder]
	if !ok {
		return fmt.Errorf("fetch bootstrap values: %s", answer.GetFetchedBootstrap().GetStatus().GetMessage())
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	_, f.seen, _ = strings.Cut(token, ".")
	return nil
}

func (f *openFetcher) ask(what string, env *driverv1.Envelope) (*driverv1.Envelope, error) {
	payload, err := bus.Encode(env, "")
	if err != nil {
		return nil, err
	}
	m, err := f.conn.Request("mcm.v1."+f.cluster+".fetch."+plainProvider+"."+what, payload, 10*time.Second)
	if err != nil {
		return nil, err
	}
	return bus.Decode(m.Data, "")
}
