// Package join makes the instances of a virtual cloud join a Kubernetes cluster by acting
// as their kubelets. A booted instance registers its Node, renews the Node's Lease and
// updates its status. One that is switched off stops that, as a dead kubelet does, and
// leaves its Node object for others to delete.
//
// It runs no pods and has no kubelet API. It knows the cloud only as its listener.
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

	// workers limits the requests in flight for any number of nodes.
	workers = 32
	// requestTimeout is after how long a request is canceled and retried.
	requestTimeout = 10 * time.Second
	// The waits after a failure grow from first to last, which is a kubelet's as well.
	firstRetry, lastRetry = 200 * time.Millisecond, 7 * time.Second
	// complaintPeriod limits what is logged while the API server is away.
	complaintPeriod = 10 * time.Second
	jitter          = 0.1
)

// A Joiner acts as the kubelets of all instances. It is a cloud's listener: its methods
// do not block, and may be called before Run and concurrently.
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

// rules are the knobs about nodes: patterns of instance names.
type rules struct{ notReady, silent, refuse []string }

// kubelet is the kubelet of one instance. Only the worker that got its id from the queue
// uses it.
type kubelet struct {
	instance   cloudapi.Instance
	registered bool
	departed   bool // the Node object was deleted
	warned     bool // that another instance's Node has its name
	node       nodeIdentity
	beats      beats
}

// Client returns a client without rate limit, as the kubelets of all instances share it.
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

// New returns a Joiner whose kubelets renew their Leases about every period; 0 means
// [DefaultPeriod]. A nil logger means the default.
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

// stripped drops large unused fields of a cached object.
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

// Stopped ends an instance's kubelet, if it has one. A request in flight may still
// arrive.
func (j *Joiner) Stopped(id string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.kubelets, id)
}

// Knobs applies the knobs about nodes at once.
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

// Run runs the kubelets until ctx ends, and returns when all their requests have ended.
// It retries for ever if the API server cannot be reached. Run must be called only once.
func (j *Joiner) Run(ctx context.Context) {
	// Run does not wait for the informers: while the API server is away they sleep for up
	// to a minute and do not notice that ctx has ended (client-go's watch-list).
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

// next handles the next id in the queue, and reports whether there may be more.
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

// step does a kubelet's work, and reports whether to repeat it after the period.
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

// complain logs failures at most every complaintPeriod.
func (j *Joiner) complain(ctx context.Context, k *kubelet, err error) {
	if errors.Is(ctx.Err(), context.Canceled) || errors.Is(err, errNameTaken) {
		return // stopping, or already logged
	}
	j.failures.Add(1)
	j.complains.Do(func() {
		j.log.Warn("instances cannot update their Nodes; retrying", "err", err,
			"instance", k.instance.ID, "node", k.instance.NodeName, "failures", j.failures.Swap(0))
	})
}

func matchesAny(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		ok, err := path.Match(p, name)

		return err == nil && ok
	})
}
