// Package join makes the instances of a virtual cloud join a Kubernetes cluster:
// it plays their kubelets, as far as controllers can see. A booted instance
// registers its Node, keeps the Node's Lease renewed and its status true; one
// that is switched off falls silent, as a dead kubelet does, and leaves its Node
// object behind for others to remove.
//
// It runs no pods and answers no kubelet API. It knows the cloud only by what
// the cloud tells its listener.
package join

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/workqueue"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

const (
	// DefaultPeriod is how often a kubelet renews its Lease by default: a quarter
	// of the Lease's duration of 40 s.
	DefaultPeriod = 10 * time.Second

	// workers bounds the requests in flight, however many nodes there are.
	workers = 32
	// A request that takes longer is given up and made again.
	requestTimeout = 10 * time.Second
	// The waits after a failure grow from first to last; a kubelet's last is the same.
	firstRetry, lastRetry = 200 * time.Millisecond, 7 * time.Second
	// complaintPeriod bounds what is logged while the API server is away.
	complaintPeriod = 10 * time.Second
	jitter          = 0.1
)

// A Joiner plays the kubelets of all instances. It is a cloud's listener: its
// methods do not block, and may be called before Run and from everywhere.
type Joiner struct {
	client kubernetes.Interface
	period time.Duration
	log    *slog.Logger
	queue  workqueue.TypedRateLimitingInterface[string] // instance ids; never two workers on one

	informers informers.SharedInformerFactory
	nodes     corelisters.NodeLister
	synced    cache.InformerSynced

	mu       sync.Mutex
	kubelets map[string]*kubelet
	rules    rules

	failures  atomic.Int64 // since the last complaint
	complains rate.Sometimes
}

// rules are the knobs that concern nodes: patterns of instance names.
type rules struct{ notReady, silent, refuse []string }

// kubelet is one instance's. Only the worker that has its id from the queue
// touches it.
type kubelet struct {
	instance   cloudapi.Instance
	registered bool
	departed   bool // somebody removed the Node object
	told       bool // of a Node that is in the way
	node       nodeIdentity
	beats      beats
}

// Client reads a kubeconfig and makes a client that is not held back: as many
// kubelets as there are instances share it.
func Client(kubeconfig string) (kubernetes.Interface, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig of the cluster to join: %w", err)
	}
	config.QPS = -1 // the number of workers is the limit
	config.UserAgent = "virtual-cloud-kubelet"
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}

	return client, nil
}

// New makes a Joiner whose kubelets renew their Leases about every period; 0
// means [DefaultPeriod]. The logger may be nil for the default.
func New(client kubernetes.Interface, period time.Duration, logger *slog.Logger) *Joiner {
	if period <= 0 {
		period = DefaultPeriod
	}
	if logger == nil {
		logger = slog.Default()
	}
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTransform(stripped))
	nodes := factory.Core().V1().Nodes()

	return &Joiner{
		client: client, period: period, log: logger,
		queue: workqueue.NewTypedRateLimitingQueue(
			workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry)),
		informers: factory, nodes: nodes.Lister(), synced: nodes.Informer().HasSynced,
		kubelets:  map[string]*kubelet{},
		complains: rate.Sometimes{Interval: complaintPeriod},
	}
}

// stripped drops from a cached object what is large and never looked at.
func stripped(object any) (any, error) {
	if m, ok := object.(metav1.Object); ok {
		m.SetManagedFields(nil)
	}

	return object, nil
}

// Booted starts an instance's kubelet.
func (j *Joiner) Booted(i cloudapi.Instance) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.kubelets[i.ID] = &kubelet{instance: i}
	j.queue.Add(i.ID)
}

// Stopped ends an instance's kubelet, if it has one. A request on its way may
// still arrive.
func (j *Joiner) Stopped(id string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.kubelets, id)
}

// Knobs takes over the knobs that concern nodes. What they change is done at
// once.
func (j *Joiner) Knobs(k cloudapi.Knobs) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if slices.Equal(j.rules.notReady, k.NodeNotReady) && slices.Equal(j.rules.silent, k.NodeSilent) &&
		slices.Equal(j.rules.refuse, k.NodeRefuse) {
		return
	}
	j.rules = rules{notReady: k.NodeNotReady, silent: k.NodeSilent, refuse: k.NodeRefuse}
	for id := range j.kubelets {
		j.queue.Add(id)
	}
}

// Run plays the kubelets until ctx ends, and returns when all their requests have
// ended. An API server that cannot be reached is tried for ever. Run may be
// called once.
func (j *Joiner) Run(ctx context.Context) {
	// Nobody waits for the informers' end: while the API server is away they sleep for up
	// to a minute at a time and hear nothing meanwhile (client-go's watch-list).
	j.informers.Start(ctx.Done())
	defer j.queue.ShutDown()
	if !cache.WaitForCacheSync(ctx.Done(), j.synced) {
		return
	}
	var work sync.WaitGroup
	for range workers {
		work.Go(func() {
			for j.next(ctx) {
			}
		})
	}
	<-ctx.Done()
	j.queue.ShutDown()
	work.Wait()
}

// next does the next piece of work and reports whether there may be more.
func (j *Joiner) next(ctx context.Context) bool {
	id, down := j.queue.Get()
	if down {
		return false
	}
	defer j.queue.Done(id)
	j.mu.Lock()
	k, rules := j.kubelets[id], j.rules
	j.mu.Unlock()
	if k == nil {
		j.queue.Forget(id)

		return true
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	again, err := j.step(ctx, k, rules)
	switch {
	case err != nil:
		j.complain(ctx, k, err)
		j.queue.AddRateLimited(id)
	case again:
		j.queue.Forget(id)
		j.queue.AddAfter(id, wait.Jitter(j.period, jitter))
	default: // until a knob changes
		j.queue.Forget(id)
	}

	return true
}

// step does what a kubelet has to do now and reports whether there will be more
// to do after the period.
func (j *Joiner) step(ctx context.Context, k *kubelet, r rules) (again bool, _ error) {
	name := k.instance.Name
	if k.departed || matchesAny(r.silent, name) || !k.registered && matchesAny(r.refuse, name) {
		return false, nil
	}
	ready := !matchesAny(r.notReady, name)
	if !k.registered {
		if err := j.register(ctx, k, ready); err != nil {
			return false, err
		}
	} else if err := j.report(ctx, k, ready); err != nil || k.departed {
		return false, err
	}

	return true, j.renew(ctx, k)
}

// complain logs failures, but not each one of many nodes.
func (j *Joiner) complain(ctx context.Context, k *kubelet, err error) {
	if errors.Is(ctx.Err(), context.Canceled) || errors.Is(err, errInTheWay) {
		return // we are stopping, or it was told
	}
	j.failures.Add(1)
	j.complains.Do(func() {
		j.log.Warn("instances cannot reach their Nodes, trying again", "err", err,
			"instance", k.instance.ID, "node", k.instance.NodeName, "failures", j.failures.Swap(0))
	})
}

func matchesAny(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		ok, err := path.Match(p, name)

		return err == nil && ok
	})
}
