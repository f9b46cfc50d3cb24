package drivertest

import (
	"context"
	"errors"
	"testing"
)

// A process is a replica that can be stopped and started. The suite uses it from
// one goroutine.
type process struct {
	t       *testing.T
	url     string
	traits  traits
	cloud   *cloud
	replica *replica
}

func startProcess(t *testing.T, url string, tr traits) *process {
	t.Helper()
	p := &process{t: t, url: url, traits: tr, cloud: newCloud(tr.fault)}
	p.replica = newReplica(t, url, tr, p.cloud)

	return p
}

// Stop has the replica end what runs, and then itself.
func (p *process) Stop(context.Context) error {
	r := p.replica
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.draining {
		return errors.New("it was told to stop already")
	}
	r.draining = true
	go func() {
		if !r.plain {
			r.renew()
		}
		r.running.Wait()
		r.mu.Lock()
		r.stopped = true
		r.mu.Unlock()
		close(r.ended)
		if !r.plain {
			r.renew()
		}
		r.nc.Close()
		close(r.gone)
	}()

	return nil
}

// Wait returns when the replica has ended.
func (p *process) Wait(ctx context.Context) error {
	select {
	case <-p.replica.gone:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Start has another replica of the same cloud come.
func (p *process) Start(context.Context) error {
	p.replica = newReplica(p.t, p.url, p.traits, p.cloud)

	return nil
}
