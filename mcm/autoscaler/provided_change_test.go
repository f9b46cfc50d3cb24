package autoscaler_test

import (
	"sync"
	"testing"

	"github.com/machinebus/machinebus/proto/externalgrpc"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// Of changes that run at the same time the one that is answered last need not have
// been the last: what is shown afterwards is what the driver has.
func TestProvidedGroupIsChangedFromBothSides(t *testing.T) {
	t.Parallel()
	isResize := func(req *driverv1.NodeGroupsRequest) bool { return req.GetResize() != nil }
	isDelete := func(req *driverv1.NodeGroupsRequest) bool { return req.GetDelete() != nil }
	grow := func(r *rig) error { return r.grow(poolID, 1) }
	shrink := func(r *rig) error {
		_, err := r.NodeGroupDeleteNodes(r.t.Context(), &externalgrpc.NodeGroupDeleteNodesRequest{
			Id: poolID, Nodes: []*externalgrpc.ExternalGrpcNode{{Name: "n", ProviderID: "acme:///1"}},
		})

		return err
	}
	for name, tc := range map[string]struct {
		reason      string
		late        func(*driverv1.NodeGroupsRequest) bool // whose answer takes long
		first, then func(*rig) error
	}{
		"late resize": {"its size is from before the delete", isResize, grow, shrink},
		"late delete": {"its size is from before the resize", isDelete, shrink, grow},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			story := func() int32 {
				f := newFleet(t)
				r := f.gateway(nil)
				did, answer := make(chan struct{}), make(chan struct{})
				tell := sync.OnceFunc(func() { close(did) })
				f.change(func() {
					f.leave = func(req *driverv1.NodeGroupsRequest) {
						if tc.late(req) {
							tell()
							<-answer
						}
					}
				})
				done := make(chan error, 1)
				go func() { done <- tc.first(r) }()
				<-did
				if err := tc.then(r); err != nil {
					t.Error(err)
				}
				close(answer)
				if err := <-done; err != nil {
					t.Error(err)
				}

				return r.sizeOf(poolID)
			}
			// The change waits for the driver's word for a second at most, and a machine that
			// stalls lets that pass. A size that is taken from the late answer is wrong each time.
			const tries, want = 3, 2 // 2 + 1 - 1
			got := story()
			for n := 1; n < tries && got != want; n++ {
				got = story()
			}
			if got != want {
				t.Errorf("size %d, want %d: %s", got, want, tc.reason)
			}
		})
	}
}
