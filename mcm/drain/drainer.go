package drain

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// A Drainer runs drains, one at a time for each machine. It is safe for
// concurrent use.
type Drainer struct {
	client   kubernetes.Interface
	settings Settings
	metrics  *metrics
	slots    chan struct{}   // one for each request under way
	ctx      context.Context // drains end with the drainer, not with who started them

	mu      sync.Mutex
	drains  map[types.UID]*entry
	notify  func(types.NamespacedName)
	running sync.WaitGroup
}

// An entry is a machine's drain. Its state is guarded by Drainer.mu.
type entry struct {
	req    Request
	cancel context.CancelFunc
	ended  chan struct{}
	state  State
}

// New returns a Drainer for the cluster that the Nodes are in. Its drains stop
// where they are when ctx ends: the next manager starts them anew.
func New(ctx context.Context, client kubernetes.Interface, settings Settings) *Drainer {
	settings = settings.withDefaults()

	return &Drainer{
		client: client, settings: settings, metrics: newMetrics(), ctx: ctx,
		slots:  make(chan struct{}, settings.Requests),
		drains: map[types.UID]*entry{}, notify: func(types.NamespacedName) {},
	}
}

// Notify sets who is told that a machine's drain has ended or is held up. It must
// be called before the first Start; f must not block.
func (d *Drainer) Notify(f func(types.NamespacedName)) { d.notify = f }

// Wait returns when all drains have stopped after New's ctx ended.
func (d *Drainer) Wait() { d.running.Wait() }

// Start begins a drain, unless the machine has one already, and returns what is
// known of it. It never blocks. A drain that is Done stays so until Forget. Two
// things change something then and now: by Force one that is under way, or has
// failed, begins anew as a forced one; and one that empties a Node to stay is none
// for a Node that is to go, nor the other way round, and the new one takes its place.
func (d *Drainer) Start(req Request) State {
	d.mu.Lock()
	defer d.mu.Unlock()
	before, ok := d.drains[req.UID]
	if ok {
		succeeded := before.state.Phase == Done && before.state.Err == nil
		sameEnd := before.req.Stays == req.Stays
		if sameEnd && (before.state.Forced || succeeded || !req.Force) {
			return before.state
		}
		before.cancel()
		if sameEnd {
			d.log(&before.req).Info("drain is forced from now on")
		}
	}
	ctx, cancel := context.WithCancel(d.ctx)
	e := &entry{req: req, cancel: cancel, ended: make(chan struct{}), state: State{Forced: req.Force}}
	d.drains[req.UID] = e
	d.running.Go(func() {
		defer close(e.ended)
		defer cancel()
		if before != nil {
			<-before.ended
		}
		d.run(ctx, e)
	})

	return e.state
}

// State returns what is known of a machine's drain; false when there is none.
func (d *Drainer) State(uid types.UID) (State, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e, ok := d.drains[uid]
	if !ok {
		return State{}, false
	}

	return e.state, true
}

// Forget stops a machine's drain and drops what is remembered of it.
func (d *Drainer) Forget(uid types.UID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if e, ok := d.drains[uid]; ok {
		e.cancel()
		delete(d.drains, uid)
	}
}

// run drains, for as long as it takes, and tells how it went unless nobody wants
// to know any more.
func (d *Drainer) run(ctx context.Context, e *entry) {
	defer d.metrics.started()()
	log := d.log(&e.req)
	log.Info("drain begins", "timeout", e.req.Timeout.String(), "max_evict_retries", e.req.MaxEvictRetries)
	started := time.Now()
	r := &run{
		Drainer: d, req: e.req, log: log,
		say: func(reason string, held, news bool) { d.progress(e, reason, held, news) },
	}
	err := safely(log, func() error { return r.drain(ctx) })
	if ctx.Err() != nil {
		return // shut down, forgotten, or replaced by a forced one
	}
	took := time.Since(started)
	d.metrics.finished(&e.req, took)
	if err != nil {
		log.Info("drain failed", "err", err.Error(), "took", took.String())
	} else {
		log.Info("drain succeeded", "took", took.String())
	}
	d.mu.Lock()
	current := d.drains[e.req.UID] == e
	e.state = State{Phase: Done, Forced: e.req.Force, Err: err, Ended: time.Now(), Took: took}
	d.mu.Unlock()
	if current {
		d.notify(e.req.Machine)
	}
}

// progress notes what a drain waits for, and notifies when that is news.
func (d *Drainer) progress(e *entry, reason string, held, news bool) {
	d.mu.Lock()
	e.state.Reason, e.state.Held = reason, held
	current := d.drains[e.req.UID] == e
	d.mu.Unlock()
	if news && current {
		d.notify(e.req.Machine)
	}
}

// take waits for the right to send a request; give it back.
func (d *Drainer) take(ctx context.Context) (giveBack func(), err error) {
	select {
	case d.slots <- struct{}{}:
		return func() { <-d.slots }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (d *Drainer) log(req *Request) logr.Logger {
	return logr.FromContextOrDiscard(d.ctx).WithValues("machine", req.Machine, "node", req.Node.Name, "forced", req.Force)
}

// safely turns a panic into an error: it would end the whole manager, and other
// drains are fine.
func safely(log logr.Logger, f func() error) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("panic: %v", cause)
			log.Error(err, "drain panicked", "stack", string(debug.Stack()))
		}
	}()

	return f()
}
