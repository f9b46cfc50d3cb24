package e2e

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// patience bounds every wait. It says nothing about how long things take: they
// are only given up then.
const patience = 2 * time.Minute

// secretMark is in the user data of every machine, and must show up nowhere.
const secretMark = "user-data-that-nobody-may-read"

// An env is what one test has for itself: a namespace, whose name is also that
// of its control plane on the bus, and a cloud. The test starts the rest.
type env struct {
	*testing.T

	name    string
	site    *stack.Site
	cluster *stack.DevCluster
	kube    client.Client
	cloud   *stack.Cloud
	secret  map[string]string // more secrets, by what they are
	atEnd   []func()          // called when the processes have ended
}

// newEnv makes an env that ends with the test. Tests that have one run in
// parallel.
func newEnv(t *testing.T) *env {
	t.Helper()
	t.Parallel()
	e := newPlane(t, nil)
	e.cloud = e.startCloud("virtual-cloud")
	return e
}

// newClusterEnv is newEnv with a cluster that the test has for itself, so that it
// may stop it.
func newClusterEnv(t *testing.T) *env {
	t.Helper()
	t.Parallel()
	e := newBareEnv(t)
	var err error
	e.cluster, e.kube, err = startCluster(e.ctx(), e.site)
	e.must(err)
	e.createNamespace()
	e.cloud = e.startCloud("virtual-cloud")
	return e
}

// newPlane makes an env without a cloud of its own: it uses the given one.
func newPlane(t *testing.T, cloud *stack.Cloud) *env {
	t.Helper()
	e := newBareEnv(t)
	e.cluster, e.kube, e.cloud = shared.cluster, shared.kube, cloud
	e.createNamespace()
	return e
}

// newBareEnv makes an env with a name and a folder.
func newBareEnv(t *testing.T) *env {
	t.Helper()
	base := strings.Trim(unfit.ReplaceAllString(strings.ToLower(strings.TrimPrefix(t.Name(), "Test")), "-"), "-")
	const most = 30
	name := fmt.Sprintf("%s-%04x", base[:min(len(base), most)], rand.IntN(1<<16))
	site, err := stack.NewSite(stack.SiteOptions{Bin: shared.bin, Dir: filepath.Join(shared.dir, name)})
	if err != nil {
		t.Fatal(err)
	}
	e := &env{T: t, name: name, site: site, secret: map[string]string{}}
	t.Cleanup(e.end)
	return e
}

func (e *env) createNamespace() {
	e.Helper()
	e.must(e.kube.Create(e.ctx(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: e.name}}))
}

// startCloud starts a cloud whose instances join the env's cluster.
func (e *env) startCloud(name string) *stack.Cloud {
	e.Helper()
	cloud, err := e.site.StartCloud(e.ctx(), name, e.cluster.Kubeconfig)
	e.must(err)
	return cloud
}

// unfit are the characters that names of namespaces cannot have.
var unfit = regexp.MustCompile(`[^a-z0-9]+`)

func (e *env) ctx() context.Context { return e.Context() }

// end ends the processes, each of which must do so properly, and looks for
// secrets in what they wrote.
func (e *env) end() {
	if err := e.site.Close(); err != nil {
		e.Error(err)
	}
	for _, do := range e.atEnd {
		do()
	}
	logs, err := filepath.Glob(filepath.Join(e.site.Dir(), "*"))
	if err != nil {
		e.Error(err)
	}
	for _, path := range logs {
		if info, err := os.Stat(path); err != nil || info.IsDir() {
			continue
		}
		content, err := os.ReadFile(path)
		if err != nil {
			e.Error(err)
			continue
		}
		for what, secret := range e.secrets() {
			if strings.Contains(string(content), secret) {
				e.Errorf("%s contains the %s", path, what)
			}
		}
	}
	if e.Failed() {
		e.Logf("the logs of this test are in %s", e.site.Dir())
	}
}

// secrets are the texts that must not show up in logs, Events or status.
func (e *env) secrets() map[string]string {
	secrets := maps.Clone(e.secret)
	secrets["user data"] = secretMark
	if e.cloud != nil {
		secrets["cloud's API token"] = e.cloud.APIToken
	}
	return secrets
}

// startManager starts an mcm for the env's namespace; with an empty natsURL it
// brings its own bus.
func (e *env) startManager(natsURL string, args ...string) (*stack.Manager, *stack.Tap) {
	e.Helper()
	manager, err := e.site.StartManager(e.ctx(), stack.ManagerOptions{
		Control: e.cluster.Kubeconfig, Namespace: e.name, Cluster: e.name, NATSURL: natsURL,
		Args: append([]string{"-v=2"}, args...),
	})
	if err != nil {
		e.Fatal(err)
	}
	return manager, e.tap(manager.NATSURL)
}

// tap listens to the env's control plane.
func (e *env) tap(natsURL string) *stack.Tap {
	e.Helper()
	tap, err := stack.OpenTap(e.ctx(), natsURL, e.name)
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(tap.Close)
	return tap
}

// startDrivers starts n replicas that serve the env's control plane.
func (e *env) startDrivers(n int, natsURL string, tap *stack.Tap, args ...string) []*stack.Driver {
	e.Helper()
	return e.startFleet(n, natsURL, tap, []string{e.name}, args...)
}

// startFleet starts n replicas that serve several control planes.
func (e *env) startFleet(n int, natsURL string, tap *stack.Tap, clusters []string, args ...string) []*stack.Driver {
	e.Helper()
	var drivers []*stack.Driver
	for i := range n {
		driver, err := e.site.StartDriver(e.ctx(), tap, stack.DriverOptions{
			Name: fmt.Sprintf("driver-virtual-%d", i+1), NATSURL: natsURL, Clusters: clusters, Args: args,
		})
		if err != nil {
			e.Fatal(err)
		}
		drivers = append(drivers, driver)
	}
	return drivers
}

// eventually fails the test when check still returns an error after all
// patience, or when a process has died meanwhile. What completes the sentence
// "waited until ...".
func (e *env) eventually(what string, check func(context.Context) error) {
	e.Helper()
	ctx, cancel := context.WithTimeoutCause(e.ctx(), patience, fmt.Errorf("not within %s", patience))
	defer cancel()
	if err := e.site.Poll(ctx, what, check); err != nil {
		e.Fatal(err)
	}
}

// must fails the test on an error.
func (e *env) must(err error) {
	e.Helper()
	if err != nil {
		e.Fatal(err)
	}
}
