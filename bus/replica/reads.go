package replica

import (
	"context"
	"sync"
)

// A readQueue holds reads that were taken and that no goroutine runs yet.
//
// Each read has a goroutine, so that none waits for another's cloud call. A goroutine that
// has ended a read goes on with the next. If it exited instead, it would wake the
// connection's flusher, and each answer would be a socket write of its own.
type readQueue struct {
	mu    sync.Mutex
	queue []queuedRead
}

type queuedRead struct {
	ctx context.Context //nolint:containedctx // the operation's, until a goroutine runs it
	op  *operation
}

func (r *readQueue) add(ctx context.Context, op *operation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.queue = append(r.queue, queuedRead{ctx, op})
}

func (r *readQueue) next() (queuedRead, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queue) == 0 {
		return queuedRead{}, false
	}
	first := r.queue[0]
	r.queue[0] = queuedRead{} // the backing array lives longer
	r.queue = r.queue[1:]

	return first, true
}

// runReads runs queued reads. Start it once for each read that is added.
func (w *worker) runReads() {
	for {
		r, ok := w.waiting.next()
		if !ok {
			return
		}
		w.run(r.ctx, r.op)
	}
}
