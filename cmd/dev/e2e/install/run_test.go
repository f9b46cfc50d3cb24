package install

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

const namespace = "machinebus"

// TestRunWithEmbeddedNATS runs mcm and a driver as the folder install does, with
// the arguments, the NATS configuration and the roles from there, through all that
// mcm ever does.
func TestRunWithEmbeddedNATS(t *testing.T) {
	r := newRig(t, "kustomize/install")
	operator := r.startEmbedded(quick...)
	r.migrates(operator...)
	r.everything()
	r.nothingWasRefused()
	r.rolesFit()
}

// TestRunWithoutBootstrapTokens does without the right to make Secrets in
// kube-system, as deploy/README.md says.
func TestRunWithoutBootstrapTokens(t *testing.T) {
	r := newRig(t, "kustomize/install", "machinebus:bootstrap-tokens")
	r.startEmbedded("--bootstrap-tokens=false")
	r.createClass("no-token", "#cloud-config\nhostname: <<MACHINE_NAME>>\n")
	joins, stays := r.newMachine("joins", "no-token"), r.newMachine("stays", "no-token")
	_, err := r.cloud.Admin.Patch(t.Context(), cloudapi.KnobsPatch{NodeRefuse: &[]string{stays.Name}})
	r.must(err)
	r.must(shared.kube.Create(t.Context(), stays))
	r.run(joins)
	r.event(stays, "Created", 1)
	r.createClass("token", tokenUserData)
	refused := r.newMachine("refused", "token")
	r.must(shared.kube.Create(t.Context(), refused))
	r.event(refused, "FailedCreate", 1)
	r.eventually("it says what to do", func(ctx context.Context) error {
		err := shared.kube.Get(ctx, client.ObjectKeyFromObject(refused), refused)
		if text := refused.Status.LastOperation.Description; err == nil && !strings.Contains(text, "replace the placeholder by your own token") {
			err = fmt.Errorf("it says %q", text)
		}

		return err
	})
	for _, m := range []*v1alpha1.Machine{joins, stays, refused} {
		r.must(shared.kube.Delete(t.Context(), m))
		r.gone(m)
	}
	r.deleteClass("no-token")
	r.deleteClass("token")
	r.nothingWasRefused()
}

// TestRunWithExternalNATS does the same with the folder install-external-nats and
// the three servers of deploy/nats, all of which hold the operations stream; the
// second replica of mcm has to take over.
func TestRunWithExternalNATS(t *testing.T) {
	r := newRig(t, "kustomize/install-external-nats")
	ca := newAuthority(t)
	servers := strings.Join(startCluster(t, r.site, ca), ",")
	paths := func(commonName string) map[string]string {
		const mount = "/etc/machinebus/nats-client/"
		dir := ca.issue(filepath.Join(t.TempDir(), commonName), commonName)
		return map[string]string{
			"--nats-url=tls://nats.machinebus-nats.svc:4222": "--nats-url=" + servers,
			"--nats-ca=" + mount + "ca.crt":                  "--nats-ca=" + filepath.Join(dir, "ca.crt"),
			"--nats-cert=" + mount + "tls.crt":               "--nats-cert=" + filepath.Join(dir, "tls.crt"),
			"--nats-key=" + mount + "tls.key":                "--nats-key=" + filepath.Join(dir, "tls.key"),
		}
	}
	args := r.args("mcm", paths("mcm"))
	leader := r.startManager("mcm-1", servers, args)
	r.leads(leader)
	second := r.startManager("mcm-2", servers, args)
	forDriver := paths("driver-virtual")
	forDriver["--listen=:8081"] = "--listen=" + stack.Loopback(0)
	r.startDriver(r.args("driver-virtual", forDriver))

	operator := ca.issue(filepath.Join(t.TempDir(), "operator"), "operator")
	server, _, _ := strings.Cut(servers, ",")
	r.migrates("--nats-url="+server, "--nats-ca="+filepath.Join(operator, "ca.crt"),
		"--nats-cert="+filepath.Join(operator, "tls.crt"), "--nats-key="+filepath.Join(operator, "tls.key"))
	r.createClass("external", tokenUserData)
	m := r.newMachine("external", "external")
	r.run(m)
	mcm := ca.issue(filepath.Join(t.TempDir(), "mcm"), "mcm")
	r.onThreeServers(server, nats.RootCAs(filepath.Join(mcm, "ca.crt")),
		nats.ClientCert(filepath.Join(mcm, "tls.crt"), filepath.Join(mcm, "tls.key")))
	if err := leader.Stop(); err != nil {
		t.Fatal(err)
	}
	r.leads(second)
	r.must(shared.kube.Delete(t.Context(), m))
	r.gone(m)
	r.deleteClass("external")
	r.nothingWasRefused()
}

// accountKinds are the kinds of a ServiceAccount and what it may do.
var accountKinds = []string{"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}

// A rig is what it takes to run mcm as one of the folders of deploy/ does.
type rig struct {
	*testing.T

	objects    []*unstructured.Unstructured
	site       *stack.Site
	cloud      *stack.Cloud
	identity   client.Object // whose uid is that of the control cluster
	kubeconfig string        // of mcm's ServiceAccount
	recorder   *recorder
	refused    map[string]string
}

// newRig makes the roles and the ServiceAccount of a folder, without those of some
// names, in a cluster that has had no mcm yet.
func newRig(t *testing.T, dir string, without ...string) *rig {
	t.Helper()
	ensureNamespaces(t)
	r := &rig{
		T: t, objects: objects(t, dir), recorder: newRecorder(t), site: newSite(t),
		identity: &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceSystem}},
	}
	for _, o := range r.objects {
		switch {
		case slices.Contains(without, o.GetName()):
			r.must(client.IgnoreNotFound(shared.kube.Delete(t.Context(), o)))
		case slices.Contains(accountKinds, o.GetKind()):
			r.must(stack.Apply(t.Context(), shared.kube, o))
		}
	}
	for _, o := range []client.Object{
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "machinebus-control-plane-key"}},
		&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "machine-controller-manager"}},
	} {
		r.must(client.IgnoreNotFound(shared.kube.Delete(t.Context(), o)))
	}
	r.kubeconfig = r.accountKubeconfig("mcm")
	cloud, err := r.site.StartCloud(t.Context(), "virtual-cloud", shared.cluster.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	r.cloud = cloud
	r.refused = r.refusals()

	return r
}

func newSite(t *testing.T) *stack.Site {
	t.Helper()
	site, err := stack.NewSite(stack.SiteOptions{Bin: shared.bin, Dir: filepath.Join(shared.dir, t.Name())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := site.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("the logs of this test are in %s", site.Dir())
		}
	})

	return site
}

// accountKubeconfig logs in as a ServiceAccount, as a Pod would, with the recorder in
// between.
func (r *rig) accountKubeconfig(name string) string {
	r.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	token := &authenticationv1.TokenRequest{}
	if err := shared.kube.SubResource("token").Create(r.Context(), account, token); err != nil {
		r.Fatal(err)
	}
	config, err := clientcmd.LoadFromFile(shared.cluster.Kubeconfig)
	if err != nil {
		r.Fatal(err)
	}
	user := config.Contexts[config.CurrentContext].AuthInfo
	config.Clusters[config.Contexts[config.CurrentContext].Cluster] = r.recorder.cluster
	config.AuthInfos = map[string]*clientcmdapi.AuthInfo{user: {Token: token.Status.Token}}
	path := filepath.Join(r.TempDir(), name+".kubeconfig")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		r.Fatal(err)
	}

	return path
}

// args returns a Deployment's arguments, with what must differ here replaced; an
// empty replacement drops one.
func (r *rig) args(deployment string, replace map[string]string) []string {
	r.Helper()
	container := typed[appsv1.Deployment](r.T, r.objects, "Deployment", deployment).Spec.Template.Spec.Containers[0]
	left := maps.Clone(replace)
	var args []string
	for _, arg := range container.Args {
		if with, ok := replace[arg]; ok {
			delete(left, arg)
			arg = with
		}
		if arg != "" {
			args = append(args, strings.ReplaceAll(arg, "$(NAMESPACE)", namespace))
		}
	}
	if len(left) > 0 {
		r.Fatalf("%s has no arguments %v any more", deployment, slices.Sorted(maps.Keys(left)))
	}

	return args
}

func (r *rig) startManager(name, natsURL string, args []string) *stack.Manager {
	r.Helper()
	manager, err := r.site.StartManager(r.Context(), stack.ManagerOptions{
		Name: name, Control: r.kubeconfig, NATSURL: natsURL, Args: append(args, "--leader-elect", "-v=1"),
		// Older API servers cannot stream lists, and are asked for them.
		Env: []string{"KUBE_FEATURE_WatchListClient=false"},
	})
	if err != nil {
		r.Fatal(err)
	}

	return manager
}

// startEmbedded starts mcm with its own NATS, and a driver. It returns the flags with
// which people log in there.
func (r *rig) startEmbedded(more ...string) (operator []string) {
	r.Helper()
	ca := newAuthority(r.T)
	conf := embeddedConf(r.T, ca, map[string]string{"VIRTUAL_PASSWORD": driverHash, "OPERATOR_PASSWORD": driverHash})
	server := r.startEmbeddedManager(ca, conf, more...)
	r.startDriverAt(server)

	return server.login("operator")
}

// An embeddedNATS is the one in mcm, as it is reached from outside.
type embeddedNATS struct{ host, ca string }

// login returns the flags with which a user logs in.
func (n *embeddedNATS) login(user string) []string {
	address := url.URL{Scheme: "tls", User: url.UserPassword(user, driverPassword), Host: n.host}

	return []string{"--nats-url=" + address.String(), "--nats-ca=" + n.ca}
}

// startEmbeddedManager starts mcm with its own NATS.
func (r *rig) startEmbeddedManager(ca *authority, conf string, more ...string) *embeddedNATS {
	r.Helper()
	// Listener and store are the Site's.
	args := r.args("mcm", map[string]string{
		"--nats-listen=0.0.0.0:4222": "", "--nats-store-dir=/var/lib/machinebus/jetstream": "",
		"--nats-config=/etc/machinebus/nats/nats.conf": "--nats-config=" + conf,
	})
	manager := r.startManager("mcm", "", append(args, more...))
	server, err := url.Parse(manager.NATSURL)
	r.must(err)

	return &embeddedNATS{host: server.Host, ca: filepath.Join(ca.issue(r.TempDir(), "other"), "ca.crt")}
}

// startDriverAt starts a driver that logs in there.
func (r *rig) startDriverAt(server *embeddedNATS, more ...string) {
	r.Helper()
	args := r.args("driver-virtual", map[string]string{
		"--nats-ca=/etc/machinebus/nats-client/ca.crt": "", "--listen=:8081": "--listen=" + stack.Loopback(0),
	})
	r.startDriver(args, append(server.login("virtual"), more...)...)
}

// migrates has mcmctl, logged in as people are, get a driver's word on an old class.
func (r *rig) migrates(operator ...string) {
	r.Helper()
	args := append([]string{"migrate", "--cluster=default", "--provider=virtual", "-f", "../../../mcmctl/testdata/oldclass.yaml"}, operator...)
	r.eventually("mcmctl has migrated a class", func(ctx context.Context) error {
		out, err := exec.CommandContext(ctx, filepath.Join(shared.bin, "mcmctl"), args...).CombinedOutput()
		if err == nil && !strings.Contains(string(out), "kind: MachineClass") {
			err = errors.New("it is none")
		}
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}

		return err
	})
}

// onThreeServers checks where the operations stream is, as mcm's user may.
func (r *rig) onThreeServers(server string, login ...nats.Option) {
	r.Helper()
	nc, err := nats.Connect(server, append(login, nats.CustomInboxPrefix(bus.ManagerInboxPrefix))...)
	r.must(err)
	defer nc.Close()
	js, err := jetstream.New(nc)
	r.must(err)
	stream, err := js.Stream(r.Context(), bus.StreamName("default", "virtual"))
	r.must(err)
	if replicas := stream.CachedInfo().Config.Replicas; replicas != 3 {
		r.Errorf("the operations stream is on %d servers, want 3: if one of them dies, so do the replicas' leases", replicas)
	}
}

func (r *rig) startDriver(args []string, more ...string) {
	r.Helper()
	if _, err := r.site.Start("driver-virtual", "driver-virtual", append(args, more...)...); err != nil {
		r.Fatal(err)
	}
}

// leads waits until a replica of mcm is the leader.
func (r *rig) leads(manager *stack.Manager) {
	r.Helper()
	r.eventually(manager.Name+" leads", func(ctx context.Context) error {
		lines, err := scrape(ctx, "http://"+manager.Address+"/metrics", regexp.MustCompile(`^leader_election_master_status\{.*\} 1$`))
		if err == nil && len(lines) == 0 {
			err = errors.New("it does not lead")
		}

		return err
	})
}

// tokenUserData needs the rights to bootstrap tokens.
const tokenUserData = "#cloud-config\n# <<BOOTSTRAP_TOKEN>>\n"

// createClass makes a class, and a secret of its name.
func (r *rig) createClass(name, userData string) {
	r.Helper()
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		StringData: map[string]string{"userData": userData, "apiToken": r.cloud.APIToken},
	}
	list, err := stack.LoadYAML(deployDir + "/examples/machineclass.yaml")
	r.must(err)
	class := &v1alpha1.MachineClass{}
	r.must(runtime.DefaultUnstructuredConverter.FromUnstructured(list[0].Object, class))
	class.ObjectMeta = *secret.ObjectMeta.DeepCopy()
	class.SecretRef = &corev1.SecretReference{Namespace: namespace, Name: name}
	var spec map[string]any
	r.must(json.Unmarshal(class.ProviderSpec.Raw, &spec))
	spec["endpoint"] = r.cloud.Endpoint
	class.ProviderSpec.Raw, err = json.Marshal(spec)
	r.must(err)
	r.must(shared.kube.Create(r.Context(), secret))
	r.must(shared.kube.Create(r.Context(), class))
}

// deleteClass deletes what createClass made. mcm must let both go.
func (r *rig) deleteClass(name string) {
	r.Helper()
	meta := metav1.ObjectMeta{Namespace: namespace, Name: name}
	for _, o := range []client.Object{&v1alpha1.MachineClass{ObjectMeta: meta}, &corev1.Secret{ObjectMeta: meta}} {
		r.must(shared.kube.Delete(r.Context(), o))
		r.gone(o)
	}
}

func (r *rig) newMachine(name, class string) *v1alpha1.Machine {
	return &v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec:       v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: v1alpha1.KindMachineClass, Name: class}},
	}
}

// run makes a machine and waits until it has joined.
func (r *rig) run(machine *v1alpha1.Machine) {
	r.Helper()
	r.must(shared.kube.Create(r.Context(), machine))
	r.eventually("the machine is Running", func(ctx context.Context) error {
		if err := shared.kube.Get(ctx, client.ObjectKeyFromObject(machine), machine); err != nil {
			return err
		}
		if phase := machine.Status.CurrentStatus.Phase; phase != v1alpha1.MachineRunning {
			return fmt.Errorf("it is %q, last operation: %s", phase, machine.Status.LastOperation.Description)
		}

		return nil
	})
	r.event(machine, "Created", 1)
}

// nothingWasRefused fails the test when the API server or NATS denied anything
// since the rig was made.
func (r *rig) nothingWasRefused() {
	r.Helper()
	before := r.refused
	for series, count := range r.refusals() {
		if before[series] != count {
			r.Errorf("the API server refused: %s was %q and is %s", series, before[series], count)
		}
	}
	logs, err := filepath.Glob(filepath.Join(r.site.Dir(), "*.log"))
	if err != nil || len(logs) == 0 {
		r.Fatalf("no logs in %s: %v", r.site.Dir(), err)
	}
	refusal := regexp.MustCompile(`(?i)forbidden|permissions? violation|authorization violation`)
	for _, path := range logs {
		content, err := os.ReadFile(path)
		if err != nil {
			r.Fatal(err)
		}
		for line := range strings.Lines(string(content)) {
			if refusal.MatchString(line) {
				r.Errorf("%s: %s", filepath.Base(path), line)
			}
		}
	}
}

// refusals are the API server's own counters of requests that RBAC denied, by
// what was requested.
func (r *rig) refusals() map[string]string {
	r.Helper()
	text, err := kubectl(r.T, nil, "get", "--raw", "/metrics")
	if err != nil {
		r.Fatal(err)
	}
	counted := 0
	counts := map[string]string{}
	for line := range strings.Lines(string(text)) {
		series, count, ok := strings.Cut(strings.TrimSpace(line), "} ")
		if !ok || !strings.HasPrefix(series, "apiserver_request_total{") {
			continue
		}
		counted++
		if strings.Contains(series, `code="403"`) {
			counts[series] = count
		}
	}
	if counted == 0 {
		r.Fatal("the API server counts no requests under apiserver_request_total")
	}

	return counts
}

// eventually waits until check returns nil, and fails the test at once if a process dies.
func (r *rig) eventually(what string, check func(context.Context) error) {
	r.Helper()
	ctx, cancel := context.WithTimeoutCause(r.Context(), patience, fmt.Errorf("not within %s", patience))
	defer cancel()
	if err := r.site.Poll(ctx, what, check); err != nil {
		r.Fatal(err)
	}
}

func eventually(t *testing.T, what string, check func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), patience, fmt.Errorf("not within %s", patience))
	defer cancel()
	if err := stack.Poll(ctx, what, check); err != nil {
		t.Fatal(err)
	}
}

func answersOK(ctx context.Context, address string) error {
	_, err := scrape(ctx, address, nil)

	return err
}

// scrape returns the lines at an HTTP address that match.
func scrape(ctx context.Context, address string, match *regexp.Regexp) ([]string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body := &bytes.Buffer{}
	if _, err := body.ReadFrom(resp.Body); err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s: %s", address, resp.Status, body)
	}
	var lines []string
	for scanner := bufio.NewScanner(body); match != nil && scanner.Scan(); {
		if match.MatchString(scanner.Text()) {
			lines = append(lines, scanner.Text())
		}
	}

	return lines, nil
}
