package machinedeployment

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

func old(c counts, before int32) share { return share{counts: c, Max: before} }

func latest(c counts, before int32) share { return share{counts: c, Max: before, Grows: true} }

// room is what shares leave of what is allowed.
func room(allowed int32, shares []share) int32 {
	for _, s := range shares {
		allowed -= s.most()
	}

	return allowed
}

func TestDivide(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason  string
		desired int32
		surge   int32
		shares  []share
		want    []int32
	}{
		"Grow": {
			"more go to the latest set", 10, 2,
			[]share{old(full(4), 6), latest(full(2), 6)},
			[]int32{4, 8},
		},
		"GrowWithoutLatest": {
			"or to none, if the rollout to the latest has not started: it starts with them", 10, 0,
			[]share{old(full(4), 6), old(full(2), 6)},
			[]int32{4, 2},
		},
		"Shrink": {
			"fewer are taken in proportion", 5, 1,
			[]share{old(full(8), 12), latest(full(4), 12)},
			[]int32{4, 2},
		},
		"Broken": {
			"what does not work goes first, of the latest set, too", 5, 1,
			[]share{old(full(6), 11), latest(counts{Replicas: 5, Active: 5}, 11)},
			[]int32{6, 0},
		},
		"BrokenOld": {
			"and of old sets before the latest", 5, 1,
			[]share{latest(counts{Replicas: 3, Active: 3, Available: 1}, 9), old(counts{Replicas: 5, Active: 5, Available: 3}, 9)},
			[]int32{3, 3},
		},
		"Unknown": {
			"a set without the annotation is left to the rounding", 3, 1,
			[]share{old(full(4), 0), latest(full(2), 0)},
			[]int32{2, 2},
		},
		"Zero": {
			"nothing is left of nothing", 0, 1,
			[]share{old(full(4), 6), latest(full(2), 6)},
			[]int32{0, 0},
		},
		"Room": {
			"what is on its way out takes room", 6, 1,
			[]share{old(counts{Replicas: 3, Active: 3, Terminating: 1}, 5), latest(full(1), 5)},
			[]int32{3, 3},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			allowed := tc.desired + tc.surge
			if tc.desired == 0 {
				allowed = 0
			}
			got := divide(tc.desired, allowed, room(allowed, tc.shares), tc.shares)
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("%s: -want, +got:\n%s", tc.reason, diff)
			}
		})
	}
}

// TestDivide_Invariants says what holds for any change of replicas.
func TestDivide_Invariants(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		surge := rapid.Int32Range(0, 5).Draw(t, "surge")
		before, desired := rapid.Int32Range(1, 30).Draw(t, "before"), rapid.Int32Range(0, 30).Draw(t, "desired")
		left := before + surge
		var shares []share
		for range rapid.IntRange(1, 4).Draw(t, "sets") {
			n := rapid.Int32Range(0, left).Draw(t, "replicas")
			left -= n
			c := counts{Replicas: n, Active: n, Available: rapid.Int32Range(0, n).Draw(t, "available")}
			shares = append(shares, old(c, before+surge))
		}
		shares[rapid.IntRange(0, len(shares)-1).Draw(t, "latest")].Grows = true
		allowed := desired + surge
		if desired == 0 {
			allowed = 0
		}
		got := divide(desired, allowed, room(allowed, shares), shares)
		var was, sum, worked, work int32
		for i, s := range shares {
			was += s.Replicas
			sum += got[i]
			worked += s.Available
			work += min(s.Available, got[i])
			if got[i] < 0 {
				t.Fatalf("set %d gets %d replicas", i, got[i])
			}
			if !s.Grows && got[i] > s.Replicas {
				t.Fatalf("old set %d grows from %d to %d", i, s.Replicas, got[i])
			}
		}
		if work < min(worked, desired) {
			t.Fatalf("%d of %d available machines are left, though %d are needed: %v", work, worked, desired, got)
		}
		if sum > allowed {
			t.Fatalf("%d replicas, want at most %d: %v", sum, allowed, got)
		}
		if was > allowed && sum != allowed {
			t.Fatalf("%d replicas, want exactly %d left of %d: %v", sum, allowed, was, got)
		}
		if was <= allowed && sum < was {
			t.Fatalf("%d replicas of %d are left, though %d are allowed: %v", sum, was, allowed, got)
		}
	})
}

// TestUnmarked is about what a set is to have once it deletes what the
// cluster-autoscaler chose.
func TestUnmarked(t *testing.T) {
	t.Parallel()
	const before, last, after = "2026-08-11T07:00:00Z", "2026-08-11T07:00:05Z", "2026-08-11T07:00:06Z"
	for name, tc := range map[string]struct {
		reason   string
		replicas int32
		others   int // running machines beside the marked ones
		marks    []string
		want     counts
		phase    v1alpha1.MachinePhase // of the marked ones; Running if empty
	}{
		"none":    {"all stay", 2, 2, nil, full(2), ""},
		"one":     {"one goes, and its place with it", 3, 2, []string{last}, counts{Replicas: 2, Active: 2, Available: 2, Terminating: 1}, ""},
		"later":   {"the set will not have heard of that", 3, 2, []string{after}, full(3), ""},
		"surplus": {"the set has one too many and takes the marked one", 2, 2, []string{before}, counts{Replicas: 2, Active: 2, Available: 2, Terminating: 1}, ""},
		"both": {
			"one is surplus, for the other one there is a place", 3, 2,
			[]string{before, last},
			counts{Replicas: 2, Active: 2, Available: 2, Terminating: 2},
			"",
		},
		"incomplete": {"what the set has yet to make is still to come", 3, 1, []string{last}, counts{Replicas: 2, Active: 1, Available: 1, Terminating: 1}, ""},
		"all":        {"nothing is less than none", 0, 0, []string{before, last}, counts{Terminating: 2}, ""},
		"failed": {
			"the set deletes it, preserved or not, and misses it", 3, 2,
			[]string{last},
			counts{Replicas: 2, Active: 2, Available: 2, Terminating: 1},
			v1alpha1.MachineFailed,
		},
		"going": {"the set does not count it any more", 2, 2, []string{last}, counts{Replicas: 2, Active: 3, Available: 2}, v1alpha1.MachineTerminating},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, set := &v1alpha1.MachineDeployment{}, &v1alpha1.MachineSet{}
			d.Annotations = map[string]string{v1alpha1.AnnotationKeyLastReplicaChangeByScaler: last}
			set.UID, set.Spec.Replicas = "set", tc.replicas
			p := &ownedSets{object: &object{deployment: d}, machines: map[types.UID][]*v1alpha1.Machine{}}
			for i := range tc.others + len(tc.marks) {
				m := &v1alpha1.Machine{}
				m.Status.CurrentStatus.Phase = v1alpha1.MachineRunning
				if i < len(tc.marks) {
					if tc.phase != "" {
						m.Status.CurrentStatus.Phase = tc.phase
					}
					m.Annotations = map[string]string{
						v1alpha1.AnnotationKeyMachinePriority: v1alpha1.MachinePriorityDelete, v1alpha1.AnnotationKeyMarkedForDeletionTime: tc.marks[i],
					}
				}
				p.machines[set.UID] = append(p.machines[set.UID], m)
			}
			if diff := cmp.Diff(tc.want, p.countsWithoutMarked(set)); diff != "" {
				t.Errorf("%s: -want, +got:\n%s", tc.reason, diff)
			}
		})
	}
}
