package replica

import (
	"context"
	"sync"
)

// readQueue are the reads that were taken and that no goroutine has begun yet.
//
// There is a goroutine for each, so that none waits for another's cloud call; but
// whoever has ended one goes on with the next. Goroutines that ended after one
// answer each would hand the processor to the connection's flusher every time, and
// each answer would be a write to the socket of its own.
type readQueue struct {
	mu    sync.Mutex
	queue []queuedRead
}

type queuedRead struct {
	ctx context.Context //nolint:containedctx // the operation's, on its way to its goroutine
	h   *operation
}

func (r *readQueue) add(ctx context.Context, h *operation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.queue = append(r.queue, queuedRead{ctx, h})
}

func (r *readQueue) next() (queuedRead, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queue) == 0 {
		return queuedRead{}, false
	}
	first := r.queue[0]
	r.queue[0] = queuedRead{} // the array behind it lives longer
	r.queue = r.queue[1:]

	return first, true
}

// runReads does what is to be done. It must be started once for each read that
// is added.
func (w *worker) runReads() {
	for {
		r, ok := w.waiting.next()
		if !ok {
			return
		}
		w.run(r.ctx, r.h)
	}
}
