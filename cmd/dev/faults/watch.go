package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// watchMachines passes every version of every Machine to the witness until ctx ends. It
// reads etcd's own history: a watch of the API server continues from the newest version
// after a restart, and misses Machines that came and went in between.
func (w *world) watchMachines(ctx context.Context) error {
	history, err := clientv3.New(clientv3.Config{Endpoints: []string{w.cluster.EtcdURL}, Logger: zap.NewNop()})
	if err != nil {
		return fmt.Errorf("watch the machines in etcd: %w", err)
	}
	w.keepers.Go(func() {
		const retry = 50 * time.Millisecond
		next := int64(1) // revision
		for ctx.Err() == nil {
			if w.fromStart.Swap(false) {
				next = 1
			}
			next, err = w.follow(ctx, history, next)
			if err != nil {
				w.witness.stop(err)
				break
			}
			_ = wait(ctx, retry)
		}
		_ = history.Close() // it can only report the end of its context
	})
	return nil
}

// followAgain restarts the watch from the first version.
func (w *world) followAgain() {
	w.fromStart.Store(true)
	if end := w.endFollow.Load(); end != nil {
		(*end)()
	}
}

// follow passes changes from a revision on to the witness until the watch ends. It returns
// the first revision that was not passed.
func (w *world) follow(ctx context.Context, history *clientv3.Client, next int64) (int64, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w.endFollow.Store(&cancel)
	// Custom resources are stored as JSON.
	prefix := "/registry/" + v1alpha1.GroupName + "/machines/" + w.name + "/"
	for r := range history.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithPrevKV(), clientv3.WithRev(next)) {
		for _, e := range r.Events {
			gone := e.Type == clientv3.EventTypeDelete
			stored := e.Kv
			if gone {
				stored = e.PrevKv
			}
			var m v1alpha1.Machine
			if err := json.Unmarshal(stored.Value, &m); err != nil {
				return next, fmt.Errorf("etcd's version %d of %s: %w", e.Kv.ModRevision, e.Kv.Key, err)
			}
			m.ResourceVersion = strconv.FormatInt(e.Kv.ModRevision, 10) // which is not stored with it
			w.witness.saw(&m, gone)
			next = e.Kv.ModRevision + 1
		}
		if r.CompactRevision != 0 {
			return next, fmt.Errorf("etcd has compacted its history up to revision %d, but machines were read only up to %d",
				r.CompactRevision, next)
		}
	}
	return next, nil
}
