package machinedeployment

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

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
			[]share{{counts: full(4), Max: 6}, {counts: full(2), Max: 6, Latest: true}},
			[]int32{4, 8},
		},
		"GrowWithoutLatest": {
			"or to the youngest, when the rollout to the latest has not begun", 10, 0,
			[]share{{counts: full(4), Max: 6}, {counts: full(2), Max: 6}},
			[]int32{4, 6},
		},
		"Shrink": {
			"fewer are taken in proportion", 5, 1,
			[]share{{counts: full(8), Max: 12}, {counts: full(4), Max: 12, Latest: true}},
			[]int32{4, 2},
		},
		"Marked": {
			"the autoscaler's choice goes first", 5, 1,
			[]share{{counts: full(4), Max: 7}, {counts: full(3), Max: 7, Latest: true, Marked: 1}},
			[]int32{4, 2},
		},
		"Unknown": {
			"a set without the annotation is left to the rounding", 3, 1,
			[]share{{counts: full(4)}, {counts: full(2), Latest: true}},
			[]int32{2, 2},
		},
		"Zero": {
			"nothing is left of nothing", 0, 1,
			[]share{{counts: full(4), Max: 6}, {counts: full(2), Max: 6, Latest: true}},
			[]int32{0, 0},
		},
		"Room": {
			"what is on its way out takes room", 6, 1,
			[]share{{counts: counts{Replicas: 3, Active: 3, Terminating: 1}, Max: 5}, {counts: full(1), Max: 5, Latest: true}},
			[]int32{3, 3},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := divide(tc.desired, limits{surge: tc.surge}, tc.shares)
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
		l := limits{surge: rapid.Int32Range(0, 5).Draw(t, "surge")}
		before, desired := rapid.Int32Range(1, 30).Draw(t, "before"), rapid.Int32Range(0, 30).Draw(t, "desired")
		left := before + l.surge
		var shares []share
		for range rapid.IntRange(1, 4).Draw(t, "sets") {
			n := rapid.Int32Range(0, left).Draw(t, "replicas")
			left -= n
			shares = append(shares, share{counts: full(n), Max: before + l.surge, Marked: rapid.Int32Range(0, n).Draw(t, "marked")})
		}
		shares[len(shares)-1].Latest = true
		got := divide(desired, l, shares)
		var was, sum int32
		for i, s := range shares {
			was += s.Replicas
			sum += got[i]
			if got[i] < 0 {
				t.Fatalf("set %d gets %d replicas", i, got[i])
			}
			if !s.Latest && got[i] > s.Replicas {
				t.Fatalf("old set %d grows from %d to %d", i, s.Replicas, got[i])
			}
		}
		allowed := desired + l.surge
		if desired == 0 {
			allowed = 0
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
