package main

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// Only an mcm loses the other Lease along with its own: both programs of the machine controller
// manager bear the name of their Pod, and one may die without the other.
func TestIsMCM(t *testing.T) {
	t.Parallel()
	for holder, want := range map[string]bool{
		identity() + "_" + string(uuid.NewUUID()): true,
		"machine-controller-manager-6d9f-x7k2p":   false,
		"node-1.example.com":                      false,
		"":                                        false,
	} {
		if got := isMCM(holder); got != want {
			t.Errorf("%q counts as an mcm: %t, want %t", holder, got, want)
		}
	}
}

// A standby asks no more for the other Lease once another mcm leads, and must not stay unready
// for a program that is gone.
func TestStandbyIsReady(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		leader string
		ready  bool
	}{
		"another mcm leads":        {"host/1_uuid", true},
		"the former manager leads": {"machine-controller-manager-6d9f", false},
		"none leads":               {"", false},
	} {
		s := &sidecarLease{lock: &resourcelock.LeaseLock{LeaseMeta: metav1.ObjectMeta{Namespace: "ns", Name: sidecarLeaseName}}}
		holder := "machine-controller-manager-6d9f"
		s.holder.Store(&holder)
		s.leads(tc.leader)
		if err := s.check(nil); (err == nil) != tc.ready {
			t.Errorf("%s: the check says %v, want ready %t", name, err, tc.ready)
		}
	}
}
