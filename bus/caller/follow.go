package caller

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// follow watches one attempt from its publication to a verdict.
type follow struct {
	k      *call
	a      *attempt
	last   heard
	timer  *time.Timer // first for the accept timeout, then for the operation's
	gone   <-chan struct{}
	unbind func()
}

func (k *call) listener(a *attempt) func(*nats.Msg) {
	return func(m *nats.Msg) {
		if why := a.onMessage(m); why != "" {
			k.c.drop(m.Subject, why)
		}
	}
}

func (f *follow) run(ctx context.Context) (verdict, driverv1.BusyReason) {
	for {
		v, sure := gotEnd, true
		select {
		case <-f.a.notify:
			v, sure = f.onNews(ctx)
		case <-f.gone:
			v = gotDeath
			if f.hasResult() {
				v = gotResult
			}
		case <-f.timer.C:
			v, sure = f.onTimer(ctx)
		case <-ctx.Done():
		}
		if sure {
			return v, f.last.busy.GetReason()
		}
	}
}

// onNews judges what was heard.
func (f *follow) onNews(ctx context.Context) (v verdict, sure bool) {
	before := f.last
	f.last = f.a.heard()
	switch {
	case f.last.result != nil:
		f.answered()

		return gotResult, true
	case f.last.nobody && f.last.holder == "":
		return gotNobody, true
	case f.last.busy != nil && f.last.holder == "":
		return gotBusy, true
	}
	f.accepted()
	if f.last.progress != before.progress && f.k.req.OnProgress != nil {
		f.k.req.OnProgress(f.last.progress)
	}
	if f.last.doubt && bus.Mutates(f.k.op) {
		return f.askHolder(ctx)
	}

	return 0, false
}

// onTimer judges what was not heard in time.
func (f *follow) onTimer(ctx context.Context) (v verdict, sure bool) {
	switch {
	case f.hasResult():
		return gotResult, true
	case f.k.overdue():
		return gotLate, true
	case !f.k.c.conn.Up():
		f.timer.Reset(f.k.within(acceptTimeout)) // an outage is nobody's silence

		return 0, false
	case f.gone == nil:
		return gotSilence, true
	}
	if bus.Mutates(f.k.op) {
		if v, sure := f.askHolder(ctx); sure {
			return v, true
		}
	}

	return gotLate, true
}

// accepted notes the holder when it is first heard of.
func (f *follow) accepted() {
	if f.gone != nil || f.last.holder == "" {
		return
	}
	k := f.k
	f.gone, f.unbind = k.c.replicas.bind(f.a, k.req.Provider, f.last.holder)
	f.timer.Reset(k.within(k.req.Timeout + lateBy))
	f.taken()
}

// answered is accepted for a result: there is nothing left to watch.
func (f *follow) answered() {
	if f.gone == nil {
		f.taken()
	}
}

func (f *follow) taken() {
	k := f.k
	k.taken = time.Now()
	k.hasRun()
	if k.req.OnAccepted != nil {
		k.req.OnAccepted(k.number, f.last.holder)
	}
}

// hasResult looks whether a result came together with something else: select
// would choose one of both at random.
func (f *follow) hasResult() bool {
	h := f.a.heard()
	if h.result == nil {
		return false
	}
	f.last = h
	f.answered()

	return true
}

// askHolder settles a doubt: the holder's sessions no longer list the operation
// as running, but no result came.
func (f *follow) askHolder(ctx context.Context) (v verdict, sure bool) {
	k := f.k
	answer := k.c.ask(ctx, k.req.Provider, f.last.holder, k.req.OperationID, k.number)
	switch {
	case answer == nil:
		return 0, false // its sessions will tell whether it lives
	case answer.GetResult() != nil:
		f.last.result = answer.GetResult()

		return gotResult, true
	case len(answer.GetOperations()) == 0:
		return gotDenial, true
	default:
		return 0, false
	}
}
