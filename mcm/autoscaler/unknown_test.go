package autoscaler_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// A troubled client's patches go through after; what that returns comes of them.
type troubled struct {
	client.Client

	after func(o client.Object, err error) error
}

func (c troubled) Patch(ctx context.Context, o client.Object, patch client.Patch, opts ...client.PatchOption) error {
	return c.after(o, c.Client.Patch(ctx, o, patch, opts...))
}

func withTrouble(after func(client.Object, error) error) func(*rig, *autoscaler.Config) {
	return func(_ *rig, c *autoscaler.Config) { c.Control = troubled{c.Control, after} }
}

// A write whose answer is lost may have been stored: done again it would count twice.
func TestWriteOfUnknownOutcome(t *testing.T) {
	t.Parallel()
	var sent atomic.Int64
	r := newRig(t, withTrouble(func(_ client.Object, err error) error {
		sent.Add(1)

		return errors.Join(err, errors.New("connection lost"))
	}))
	r.deployment("a", 2, size("0", "9"))
	node := r.joined("a", "m1")
	r.refresh(1, 1)
	r.wantCode(r.increase("a", 2), codes.Unavailable)
	if got := r.stored("a").Spec.Replicas; got != 4 || sent.Load() != 1 {
		t.Errorf("%d replicas after %d writes, want 4 and one", got, sent.Load())
	}
	r.eventually("what was stored is seen", func() bool { r.refresh(1, 1); return r.target("a") == 4 })
	r.wantCode(r.deleteNodes("a", node), codes.Unavailable)
	if got := r.stored("a").Spec.Replicas; got != 3 || sent.Load() != 2 {
		t.Errorf("%d replicas after %d writes, want 3 and two", got, sent.Load())
	}
	// The cluster-autoscaler asks for the same again: that the machine is marked is known by then.
	r.eventually("that it goes is seen", func() bool { r.refresh(1, 1); return r.deleteNodes("a", node) == nil })
	if got := r.stored("a").Spec.Replicas; got != 3 {
		t.Errorf("%d replicas, want 3", got)
	}
}

// A write that takes long holds up neither other groups nor, beyond its caller's time,
// others at the same group.
func TestWriteBlocksNoOtherGroup(t *testing.T) {
	t.Parallel()
	stuck, free := make(chan struct{}), make(chan struct{})
	reached := sync.OnceFunc(func() { close(stuck) })
	r := newRig(t, withTrouble(func(o client.Object, err error) error {
		if o.GetName() == "slow" {
			reached()
			<-free
		}

		return err
	}))
	r.deployment("slow", 1, size("0", "9"))
	r.deployment("other", 1, size("0", "9"))
	r.refresh(2, 0)
	done := make(chan error, 1)
	go func() { done <- r.increase("slow", 1) }()
	<-stuck
	grow := func(name string, within time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		_, err := r.NodeGroupIncreaseSize(ctx, &externalgrpc.NodeGroupIncreaseSizeRequest{Id: r.id(name), Delta: 1})

		return err
	}
	if err := grow("other", patience); err != nil || r.target("other") != 2 || r.target("slow") != 1 {
		t.Errorf("%v, sizes %d and %d; want 2, and 1 as long as it is not known", err, r.target("other"), r.target("slow"))
	}
	r.wantCode(grow("slow", 200*time.Millisecond), codes.DeadlineExceeded)
	close(free)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if got := r.stored("slow").Spec.Replicas; got != 2 || r.target("slow") != 2 {
		t.Errorf("%d replicas, target %d; want 2: no caller waits for the second any more", got, r.target("slow"))
	}
}
