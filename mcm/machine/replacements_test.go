package machine

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

func TestReplaced(t *testing.T) {
	t.Parallel()
	now := metav1.Now()
	for name, row := range map[string]struct {
		reason              string
		phase               v1alpha1.MachinePhase
		deleting, preserved bool
		want                bool
	}{
		"new":                  {"it may be to replace another one", v1alpha1.MachinePhaseNew, false, false, true},
		"pending":              {"it may be to replace another one", v1alpha1.MachinePending, false, false, true},
		"crashing":             {"it may be to replace another one, which does not work", v1alpha1.MachineCrashLoopBackOff, false, false, true},
		"running":              {"nothing is wrong", v1alpha1.MachineRunning, false, false, false},
		"running, deleted":     {"its word is still to come", v1alpha1.MachineRunning, true, false, true},
		"unknown":              {"it may recover", v1alpha1.MachineUnknown, false, false, false},
		"unknown, deleted":     {"it will not", v1alpha1.MachineUnknown, true, false, true},
		"failed":               {"its set deletes it", v1alpha1.MachineFailed, false, false, true},
		"failed, preserved":    {"it is not replaced for days", v1alpha1.MachineFailed, false, true, false},
		"preserved, deleted":   {"not any more", v1alpha1.MachineFailed, true, true, true},
		"terminating":          {"it goes", v1alpha1.MachineTerminating, true, false, true},
		"updating":             {"it is of no use meanwhile", v1alpha1.MachineInPlaceUpdating, false, false, true},
		"update has failed":    {"it waits for its turn, like an unhealthy one", v1alpha1.MachineInPlaceUpdateFailed, false, false, false},
		"of a later version's": {"the phase is unknown", "Hibernating", false, false, true},
	} {
		m := &v1alpha1.Machine{Status: v1alpha1.MachineStatus{CurrentStatus: v1alpha1.CurrentStatus{Phase: row.phase}}}
		if row.deleting {
			m.DeletionTimestamp = &now
		}
		if row.preserved {
			m.Status.CurrentStatus.PreserveExpiryTime = &metav1.Time{Time: now.Add(time.Hour)}
		}
		if got := replaced(m); got != row.want {
			t.Errorf("%s counts: %t, want %t: %s", name, got, row.want, row.reason)
		}
	}
}

func TestRoom(t *testing.T) {
	t.Parallel()
	machine := func(name, deployment string, phase v1alpha1.MachinePhase) v1alpha1.Machine {
		m := v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, UID: types.UID("uid of " + name)}}
		m.Labels = map[string]string{v1alpha1.LabelKeyMachineDeployment: deployment}
		m.Status.CurrentStatus.Phase = phase

		return m
	}
	const self = "self"
	own := pool{namespace: "n", deployment: "d"}
	failed, pending := machine("f", "d", v1alpha1.MachineFailed), machine("p", "d", v1alpha1.MachinePending)
	for name, row := range map[string]struct {
		reason   string
		machines []v1alpha1.Machine
		taken    []string // of the pool
		most     int
		other    string
		free     bool
	}{
		"none":            {"there is room", nil, nil, 1, "", true},
		"one":             {"one is enough", []v1alpha1.Machine{failed}, nil, 1, "f", false},
		"one of two":      {"there is room for another", []v1alpha1.Machine{failed}, nil, 2, "f", true},
		"two of two":      {"who goes and who comes", []v1alpha1.Machine{pending, failed}, nil, 2, "f", false},
		"itself":          {"it does not wait for itself", []v1alpha1.Machine{machine(self, "d", v1alpha1.MachineFailed)}, []string{self}, 1, "", true},
		"of another":      {"each deployment is its own", []v1alpha1.Machine{machine("a", "e", v1alpha1.MachineFailed)}, nil, 1, "", true},
		"healthy":         {"it is not replaced", []v1alpha1.Machine{machine("a", "d", v1alpha1.MachineRunning)}, nil, 1, "", true},
		"just taken":      {"no cache shows it yet", []v1alpha1.Machine{machine("a", "d", v1alpha1.MachineUnknown)}, []string{"a"}, 1, "a", false},
		"taken and seen":  {"it is one machine", []v1alpha1.Machine{failed}, []string{"f"}, 2, "f", true},
		"taken and other": {"these are two", []v1alpha1.Machine{failed}, []string{"a"}, 2, "a", false},
	} {
		r := &replacements{taken: map[types.UID]taken{"elsewhere": {pool: pool{namespace: "m", deployment: "d"}}}}
		for _, n := range row.taken {
			r.taken[types.UID("uid of "+n)] = taken{pool: own, name: types.NamespacedName{Namespace: "n", Name: n}}
		}
		other, free := r.roomLocked(own, "uid of "+self, row.machines, row.most)
		if other != row.other || free != row.free {
			t.Errorf("%s: room is %t beside %q, want %t beside %q: %s", name, free, other, row.free, row.other, row.reason)
		}
	}
}

func TestPoolOf(t *testing.T) {
	t.Parallel()
	owner := []metav1.OwnerReference{{Kind: "MachineSet", Name: "s", UID: "7", Controller: new(true)}}
	label := map[string]string{v1alpha1.LabelKeyMachineDeployment: "d"}
	for name, row := range map[string]struct {
		reason string
		meta   metav1.ObjectMeta
		want   pool
		ok     bool
	}{
		"alone":    {"no set replaces it", metav1.ObjectMeta{Namespace: "n"}, pool{}, false},
		"labelled": {"as users do", metav1.ObjectMeta{Namespace: "n", Labels: label}, pool{namespace: "n", deployment: "d"}, true},
		"of a set": {"the label is not set", metav1.ObjectMeta{Namespace: "n", OwnerReferences: owner}, pool{namespace: "n", set: "7"}, true},
		"both": {
			"a deployment has several sets",
			metav1.ObjectMeta{Namespace: "n", Labels: label, OwnerReferences: owner},
			pool{namespace: "n", deployment: "d"},
			true,
		},
	} {
		if got, ok := poolOf(&v1alpha1.Machine{ObjectMeta: row.meta}); got != row.want || ok != row.ok {
			t.Errorf("%s is in %+v, %t: want %+v, %t: %s", name, got, ok, row.want, row.ok, row.reason)
		}
	}
}

func TestNewer(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		reason, version, than string
		want                  bool
	}{
		"the same":  {"the write may be on its way", "9", "9", false},
		"older":     {"the pass has written something else before", "9", "10", false},
		"newer":     {"the write has been seen, or can only fail", "10", "9", true},
		"no number": {"who cannot compare must not wait for ever", "x", "9", true},
	} {
		if got := newer(row.version, row.than); got != row.want {
			t.Errorf("%s: newer(%q, %q) is %t, want %t: %s", name, row.version, row.than, got, row.want, row.reason)
		}
	}
}
