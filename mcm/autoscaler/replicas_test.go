package autoscaler_test

import (
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"google.golang.org/grpc/codes"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// newPair returns a gateway and a second replica of it on the same caches, and what
// moves their clock.
func newPair(t *testing.T) (r *rig, other *autoscaler.Server, pass func(time.Duration)) {
	t.Helper()
	var later atomic.Int64
	var cfg autoscaler.Config
	r = newRig(t, func(_ *rig, c *autoscaler.Config) {
		c.Now = func() time.Time { return now.Add(time.Duration(later.Load())) }
		cfg = *c
	})

	return r, autoscaler.New(cfg), func(d time.Duration) { later.Add(int64(d)) }
}

// A connection that breaks between a Refresh and the end of its loop may go on at a
// replica that got no request for hours.
func TestReplica_IdleBefore(t *testing.T) {
	t.Parallel()
	r, other, pass := newPair(t)
	list := func() int {
		t.Helper()
		groups, err := other.NodeGroups(t.Context(), &externalgrpc.NodeGroupsRequest{})
		if err != nil {
			t.Fatal(err)
		}

		return len(groups.GetNodeGroups())
	}
	if n := list(); n != 0 {
		t.Fatalf("%d groups before there is one", n)
	}
	r.deployment("a", 1, size("0", "5"))
	r.refresh(1, 0)
	if n := list(); n != 0 {
		t.Errorf("%d groups, want those before: within a loop answers agree", n)
	}
	pass(time.Hour)
	if n := list(); n != 1 {
		t.Errorf("%d groups, want the one that was made since", n)
	}
	r.deployment("b", 1, size("0", "5"))
	r.refresh(2, 0)
	if n := list(); n != 1 {
		t.Errorf("%d groups, want those before: within a loop answers agree", n)
	}
}

// Nor is what has joined since the replica last looked given up for what has not.
func TestReplica_JoinedMeanwhile(t *testing.T) {
	t.Parallel()
	r, other, _ := newPair(t)
	r.deployment("a", 2, size("0", "5"))
	r.refresh(1, 0)
	if _, err := other.Refresh(t.Context(), &externalgrpc.RefreshRequest{}); err != nil {
		t.Fatal(err)
	}
	r.joined("a", "m1")
	r.joined("a", "m2")
	r.eventually("the caches have both and their Nodes", func() bool {
		r.refresh(1, 2)

		return !slices.ContainsFunc(r.instances(r.id("a")), func(i *externalgrpc.Instance) bool {
			return i.GetStatus().GetInstanceState() != externalgrpc.InstanceStatus_instanceRunning
		})
	})
	_, err := other.NodeGroupDecreaseTargetSize(t.Context(), &externalgrpc.NodeGroupDecreaseTargetSizeRequest{Id: r.id("a"), Delta: -1})
	r.wantCode(err, codes.FailedPrecondition)
	if got := r.stored("a").Spec.Replicas; got != 2 {
		t.Errorf("%d replicas, want 2: both run", got)
	}
}

// A group of --nodes whose deployment does not exist is logged once, and again after it
// was there.
func TestConfiguredGroupIsMissing(t *testing.T) {
	t.Parallel()
	var cfg autoscaler.Config
	r := newRig(t, func(r *rig, c *autoscaler.Config) {
		c.Groups = []autoscaler.Group{{Deployment: client.ObjectKey{Namespace: r.namespace, Name: "a"}, Max: 5}}
		cfg = *c
	})
	server := autoscaler.New(cfg)
	refresh := func() int {
		t.Helper()
		logged := 0
		log := funcr.New(func(_, args string) { logged += strings.Count(args, "configured node group does not exist") }, funcr.Options{})
		if _, err := server.Refresh(klog.NewContext(t.Context(), log), &externalgrpc.RefreshRequest{}); err != nil {
			t.Fatal(err)
		}

		return logged
	}
	want := func(when string, n int) {
		t.Helper()
		if got := refresh(); got != n {
			t.Errorf("%s: logged %d times, want %d", when, got, n)
		}
	}
	want("at first", 1)
	want("then", 0)
	d := r.deployment("a", 1, nil)
	r.refresh(1, 0)
	want("while it is there", 0)
	if err := r.Delete(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	r.refresh(0, 0)
	want("when it is gone", 1)
}
