package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus/chaos"
	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// identities are the ways to identify a repeated create. There is a provider for each,
// named after it.
var identities = []string{"token", uniqueName, "none"}

const uniqueName = "unique_name"

const (
	replicas = 2 // of each driver
	servers  = 3
)

// A world is everything that uses one bus.
type world struct {
	*options

	kind    string
	name    string // of the namespace, and of the control plane on the bus
	site    *stack.Site
	cluster *stack.DevCluster
	kube    client.WithWatch
	cloud   *stack.Cloud
	nats    *stack.NATSCluster
	busURL  string // without links
	tap     *stack.Tap
	tally   *tally
	witness *witness
	// fromStart makes the next watch of etcd begin at the first revision; endFollow ends the
	// current one.
	fromStart atomic.Bool
	endFollow atomic.Pointer[context.CancelFunc]
	foreign   map[types.UID]bool // Nodes of other worlds
	// patience is how long the judge may wait.
	patience time.Duration

	api         *target
	names       *target        // machines whose names the cloud allows only once
	lead        *target        // the current leader
	stray       *stack.Process // a manager that runs only during its fault; nil for none
	strayTarget *target
	other       *namesake // nil until its first fault
	otherTarget *target
	knobs       map[string]*target // of the cloud
	managers    []*stack.Manager
	managerSet  []*target
	driverSet   []*target
	cloudLinks  map[string]*target // by identity
	serverSet   []*target
	links       map[string][]*target // by their ends, such as mcm-nats
	all         []*target            // with links
	keepers     sync.WaitGroup
	atWork      sync.RWMutex // held by faults while they are made
}

// runWorld makes faults on one bus until enough machines have come and gone. Then it heals
// everything and judges.
func runWorld(ctx context.Context, o *options, out io.Writer, cluster *stack.DevCluster, tally *tally) (err error) {
	kind := tally.bus
	w := &world{
		options: o, kind: kind, name: "faults-" + kind, cluster: cluster, tally: tally, witness: newWitness(), patience: healLimit,
		api: &target{name: "the API server"}, lead: &target{name: "the mcm that leads"},
		names:       &target{name: "the pool of " + uniqueName},
		strayTarget: &target{name: "mcm-stray"}, otherTarget: &target{name: "mcm-namesake"}, knobs: map[string]*target{},
		cloudLinks: map[string]*target{}, links: map[string][]*target{},
	}
	for _, name := range []string{"errors", "latency", "rate"} {
		w.knobs[name] = &target{name: "the cloud"}
	}
	w.site, err = stack.NewSite(stack.SiteOptions{Bin: o.bin, Dir: filepath.Join(o.dir, "bus-"+kind)})
	if err != nil {
		return err
	}
	keep, letEnd := context.WithCancel(ctx)
	defer func() {
		if err != nil {
			err = errors.Join(err, w.salvage(ctx))
		}
		letEnd()
		w.keepers.Wait()
		err = errors.Join(err, w.site.Close())
		for _, t := range w.all {
			t.each((*chaos.Link).Close)
		}
	}()
	if err := w.start(ctx); err != nil {
		return err
	}
	defer w.tap.Close()
	if err := w.watchMachines(keep); err != nil {
		return err
	}
	for _, t := range append(append(append([]*target{}, w.managerSet...), w.driverSet...), w.serverSet...) {
		w.keepers.Go(func() { t.unit.keep(keep) })
	}
	fmt.Fprintf(out, "%s: up\n", kind)
	began := time.Now()
	if err := w.live(ctx, out); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s: made faults for %s; healing\n", kind, time.Since(began).Round(time.Second))
	w.heal()
	return w.judge(ctx)
}

func (w *world) start(ctx context.Context) (err error) {
	if w.kube, err = stack.NewClient(w.cluster.Kubeconfig); err != nil {
		return err
	}
	if err := w.kube.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.name}}); err != nil {
		return err
	}
	if err := w.noteForeign(ctx); err != nil {
		return err
	}
	if w.cloud, err = w.site.StartCloud(ctx, "virtual-cloud", w.cluster.Kubeconfig,
		"--create-latency="+createLatency.String(), "--delete-latency="+deleteLatency.String(), "--boot-delay="+bootDelay.String()); err != nil {
		return err
	}
	if w.kind == busCluster {
		if w.nats, err = w.site.StartNATSCluster(ctx, servers); err != nil {
			return err
		}
		w.busURL = w.nats.URL()
		for i, p := range w.nats.Pairs {
			w.add("nats-nats", &target{name: fmt.Sprintf("pair %d of NATS servers", i+1), link: p.Up, back: p.Down})
		}
		for _, n := range w.nats.Servers {
			w.serverSet = append(w.serverSet, &target{name: n.Name, unit: w.unit(n.Process)})
		}
	}
	if err := w.startManagers(ctx); err != nil {
		return err
	}
	if w.tap, err = stack.OpenTap(ctx, w.busURL, w.name); err != nil {
		return err
	}
	if err := w.startDrivers(ctx); err != nil {
		return err
	}
	return w.createPools(ctx)
}

// operationTimeout is how long one attempt may take.
const operationTimeout = 20 * time.Second

// creationTimeout is how long a machine may take to join.
const creationTimeout = 5 * time.Minute

// managerArgs returns flags that make mcm's timeouts and periods short enough for a run.
func managerArgs() []string {
	return []string{
		"-v=2", "--machine-operation-timeout=" + operationTimeout.String(), "--retry-short=1s", "--retry-medium=2s", "--retry-long=3s",
		"--resource-exhausted-retry=2s", "--machine-creation-timeout=" + creationTimeout.String(), "--machine-drain-timeout=20s",
		"--machine-health-timeout=1m", "--machine-safety-orphan-vms-period=3s", "--machine-safety-orphan-vms-grace=9s",
	}
}

func (w *world) startManagers(ctx context.Context) error {
	n, args := 1, managerArgs()
	if w.kind == busCluster {
		n = 2
		args = append(args, "--nats-stream-replicas=3", "--leader-elect=true", "--leader-elect-lease-duration=3s",
			"--leader-elect-renew-deadline=2s", "--leader-elect-retry-period=500ms")
		if err := w.startStray(ctx, append(managerArgs(), "--nats-stream-replicas=3")); err != nil {
			return err
		}
	}
	for i := range n {
		name := fmt.Sprintf("mcm-%d", i+1)
		kubeconfig, err := w.linkKube(ctx, name)
		if err != nil {
			return err
		}
		urls := ""
		if w.kind == busCluster {
			if urls, err = w.linkBus(ctx, "mcm-nats", name); err != nil {
				return err
			}
		}
		m, err := w.site.StartManager(ctx, stack.ManagerOptions{
			Name: name, Control: kubeconfig, Namespace: w.name, Cluster: w.name, NATSURL: urls, Args: args,
		})
		if err != nil {
			return err
		}
		w.managers = append(w.managers, m)
		u := w.unit(m.Process)
		u.mayEnd = orderly
		w.managerSet = append(w.managerSet, &target{name: name, unit: u})
		if w.kind == busEmbedded {
			w.busURL = m.NATSURL
		}
	}
	return nil
}

func (w *world) startDrivers(ctx context.Context) error {
	for _, identity := range identities {
		link, err := chaos.OpenLink(ctx, strings.TrimPrefix(w.cloud.Endpoint, "http://"))
		if err != nil {
			return err
		}
		t := &target{name: "the link of the drivers of " + identity + " to the cloud", link: link, noLateArrivals: true}
		w.cloudLinks[identity] = t
		w.add("driver-cloud", t)
		for i := range replicas {
			name := fmt.Sprintf("driver-%s-%d", identity, i+1)
			urls, err := w.linkBus(ctx, "driver-nats", name)
			if err != nil {
				return err
			}
			args := []string{"--provider", identity, "--identity", identity, "--settle-time", listLag.String(), "--slots", "8"}
			deaf := i+1 == deafReplica
			if deaf {
				args = append(args, "--mock-ignore-deadlines")
			}
			d, err := w.site.StartDriver(ctx, w.tap, stack.DriverOptions{Name: name, NATSURL: urls, Clusters: []string{w.name}, Args: args})
			if err != nil {
				return err
			}
			w.driverSet = append(w.driverSet, &target{name: name, identity: identity, deaf: deaf, unit: w.unit(d.Process)})
		}
	}
	return nil
}

// orderly matches the exit of an mcm that has lost its Lease, or finds no API server when
// it starts: exit status 1 and one of these errors as its last output. An mcm that logs
// the same and then panics or is killed has crashed.
var orderly = regexp.MustCompile(`^\S+ exited: exit status 1\n(?s:.*)\n *mcm: ` +
	`(?:run: (?s:.*)\bleader election lost\b|ask the control cluster at \S+ for |read (?:namespace|the control plane's key) [^\n]*\bGet "https://[^"]+": )`)

func (w *world) unit(p *stack.Process) *unit {
	return &unit{site: w.site, process: p, crashed: w.tally.crash}
}

func (w *world) add(between string, t *target) {
	w.links[between] = append(w.links[between], t)
	w.all = append(w.all, t)
}

// linkBus returns URLs of a program's own links to each server.
func (w *world) linkBus(ctx context.Context, between, name string) (string, error) {
	var urls []string
	for url := range strings.SplitSeq(w.busURL, ",") {
		l, err := chaos.OpenLink(ctx, strings.TrimPrefix(url, "nats://"))
		if err != nil {
			return "", err
		}
		w.add(between, &target{name: "the link of " + name + " to " + url, link: l})
		urls = append(urls, "nats://"+l.Address())
	}
	return strings.Join(urls, ","), nil
}

// linkKube returns a kubeconfig with a link to the API server.
func (w *world) linkKube(ctx context.Context, name string) (string, error) {
	cfg, err := clientcmd.LoadFromFile(w.cluster.Kubeconfig)
	if err != nil {
		return "", err
	}
	for _, c := range cfg.Clusters {
		l, err := chaos.OpenLink(ctx, strings.TrimPrefix(c.Server, "https://"))
		if err != nil {
			return "", err
		}
		w.add("mcm-api", &target{name: "the link of " + name + " to the API server", link: l})
		c.Server = "https://" + l.Address()
	}
	path := filepath.Join(w.site.Dir(), name+".kubeconfig")
	return path, clientcmd.WriteToFile(*cfg, path)
}
