package caller

import (
	"context"
	"time"

	"github.com/machinebus/machinebus/bus"
)

// follow watches one attempt from its publication to a verdict.
type follow struct {
	k          *call
	a          *attempt
	state      attemptState
	timer      *time.Timer // first for the accept timeout, then for the operation's
	holderDied <-chan struct{}
	unbind     func()
}

func (f *follow) run(ctx context.Context) verdict {
	for {
		v, sure := gotContextEnd, true
		select {
		case <-f.a.notify:
			v, sure = f.onUpdate(ctx)
		case <-f.holderDied:
			v = gotHolderDied
			if f.hasResult() {
				v = gotResult
			}
		case <-f.timer.C:
			v, sure = f.onTimer(ctx)
		case <-ctx.Done():
		}
		if sure {
			return v
		}
	}
}

// onUpdate handles new frames.
func (f *follow) onUpdate(ctx context.Context) (v verdict, sure bool) {
	before := f.state
	f.state = f.a.snapshot()
	switch {
	case f.state.result != nil:
		f.noteResult()

		return gotResult, true
	case f.state.noResponder && f.state.holder == "":
		return gotNoResponder, true
	case f.state.busy != nil && f.state.holder == "":
		return gotBusy, true
	}
	f.noteHolder()
	if f.state.progress != before.progress && f.k.req.OnProgress != nil {
		f.k.req.OnProgress(f.state.progress)
	}
	if f.state.doubted && bus.Mutates(f.k.op) {
		return f.askHolder(ctx)
	}

	return 0, false
}

// onTimer handles a timeout.
func (f *follow) onTimer(ctx context.Context) (v verdict, sure bool) {
	switch {
	case f.hasResult():
		return gotResult, true
	case f.k.readTimedOut():
		return gotOverdue, true
	case !f.k.c.conn.Up():
		f.timer.Reset(f.k.limitToRead(acceptTimeout)) // no replica can be heard during an outage

		return 0, false
	case f.holderDied == nil:
		return gotSilence, true
	}
	if bus.Mutates(f.k.op) {
		if v, sure := f.askHolder(ctx); sure {
			return v, true
		}
	}

	return gotOverdue, true
}

// noteHolder notes the holder at its first frame.
func (f *follow) noteHolder() {
	if f.holderDied != nil || f.state.holder == "" {
		return
	}
	k := f.k
	f.holderDied, f.unbind = k.c.replicas.bind(f.a, k.req.Provider, f.state.holder)
	f.timer.Reset(k.limitToRead(k.req.Timeout + overdueGrace))
	f.noteTaken()
}

// noteResult is noteHolder for a result: there is nothing left to watch.
func (f *follow) noteResult() {
	if f.holderDied == nil {
		f.noteTaken()
	}
}

func (f *follow) noteTaken() {
	k := f.k
	k.taken = time.Now()
	k.noteMayHaveRun()
	if k.req.OnAccepted != nil {
		k.req.OnAccepted(k.number, f.state.holder)
	}
}

// hasResult reports whether a result came together with another event. Select would
// choose one at random.
func (f *follow) hasResult() bool {
	h := f.a.snapshot()
	if h.result == nil {
		return false
	}
	f.state = h
	f.noteResult()

	return true
}

// askHolder asks the holder for the operation: its sessions no longer list it as
// running, but no result came.
func (f *follow) askHolder(ctx context.Context) (v verdict, sure bool) {
	k := f.k
	answer := k.c.ask(ctx, k.req.Provider, f.state.holder, k.req.OperationID, k.number)
	switch {
	case answer == nil:
		return 0, false // its sessions will show whether it lives
	case answer.GetResult() != nil:
		f.state.result = answer.GetResult()

		return gotResult, true
	case len(answer.GetOperations()) == 0:
		return gotDenial, true
	default:
		return 0, false
	}
}
