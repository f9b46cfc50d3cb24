package overshoot

import (
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

func TestLimits(t *testing.T) {
	t.Parallel()
	deployment := func(strategy v1alpha1.MachineDeploymentStrategy) *v1alpha1.MachineDeployment {
		return &v1alpha1.MachineDeployment{Spec: v1alpha1.MachineDeploymentSpec{Replicas: 10, Strategy: strategy}}
	}
	rolling := func(surge *intstr.IntOrString) v1alpha1.MachineDeploymentStrategy {
		return v1alpha1.MachineDeploymentStrategy{
			Type: v1alpha1.RollingUpdateMachineDeploymentStrategyType,
			RollingUpdate: &v1alpha1.RollingUpdateMachineDeployment{
				UpdateConfiguration: v1alpha1.UpdateConfiguration{MaxSurge: surge},
			},
		}
	}
	number, percent, nonsense := intstr.FromInt32(3), intstr.FromString("15%"), intstr.FromString("a few")
	cases := map[string]struct {
		reason     string
		deployment *v1alpha1.MachineDeployment
		want       limits
	}{
		"alone":          {reason: "twice the set's own 4 replicas", want: limits{10, 9}},
		"surge":          {reason: "the deployment's 10 and its surge", deployment: deployment(rolling(&number)), want: limits{15, 14}},
		"percent":        {reason: "a surge is rounded up", deployment: deployment(rolling(&percent)), want: limits{14, 13}},
		"no surge":       {reason: "not set", deployment: deployment(rolling(nil)), want: limits{12, 11}},
		"nonsense":       {reason: "an invalid deployment has machines all the same", deployment: deployment(rolling(&nonsense)), want: limits{12, 11}},
		"half a rollout": {reason: "not set", deployment: deployment(v1alpha1.MachineDeploymentStrategy{Type: "RollingUpdate"}), want: limits{12, 11}},
		"recreate": {
			reason:     "Recreate has no surge, and needs none",
			deployment: deployment(v1alpha1.MachineDeploymentStrategy{Type: v1alpha1.RecreateMachineDeploymentStrategyType}),
			want:       limits{12, 11},
		},
		"in place": {
			reason: "it may add machines too",
			deployment: deployment(v1alpha1.MachineDeploymentStrategy{
				Type: v1alpha1.InPlaceUpdateMachineDeploymentStrategyType,
				InPlaceUpdate: &v1alpha1.InPlaceUpdateMachineDeployment{
					UpdateConfiguration: v1alpha1.UpdateConfiguration{MaxSurge: &number},
				},
			}),
			want: limits{15, 14},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			set := &v1alpha1.MachineSet{Spec: v1alpha1.MachineSetSpec{Replicas: 4}}
			if got := DefaultSettings().limitsOf(set, tc.deployment); got != tc.want {
				t.Errorf("limits are %+v, want %+v: %s", got, tc.want, tc.reason)
			}
		})
	}
}

func TestCounted(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 8, 11, 12, 0, 0, 0, time.UTC)
	at := func(second int) *metav1.Time {
		return &metav1.Time{Time: noon.Add(time.Duration(second) * time.Second)}
	}
	// n machines of one second each; gone is when they began to go, 0 for not.
	some := func(n, made, gone int) (machines []v1alpha1.Machine) {
		for range n {
			m := v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: *at(made)}}
			if gone > 0 {
				m.DeletionTimestamp = at(gone)
			}
			machines = append(machines, m)
		}

		return machines
	}
	for name, tc := range map[string]struct {
		reason   string
		machines [][]v1alpha1.Machine
		frozen   bool
		want     int
	}{
		"none":       {reason: "an empty set"},
		"at rest":    {reason: "all count", machines: [][]v1alpha1.Machine{some(3, 1, 0)}, want: 3},
		"scaled in":  {reason: "what goes only gets less", machines: [][]v1alpha1.Machine{some(2, 1, 0), some(8, 1, 5)}, want: 2},
		"to nothing": {reason: "none is left that stays", machines: [][]v1alpha1.Machine{some(4, 1, 5)}},
		"scaled in, and one replaced": {
			reason: "one was made beside those that go", machines: [][]v1alpha1.Machine{some(1, 1, 0), some(8, 1, 5), some(1, 1, 7), some(1, 7, 0)}, want: 3,
		},
		"scaled out again": {
			reason: "as many instances more than replicas as machines were made", machines: [][]v1alpha1.Machine{some(2, 1, 0), some(8, 1, 5), some(6, 9, 0)}, want: 14,
		},
		"one stuck for long": {
			reason:   "of all that was made since then one stands in for it, and none for those that go now",
			machines: [][]v1alpha1.Machine{some(1, 1, 2), some(10, 5, 0), some(50, 5, 9)}, want: 11,
		},
		"made and deleted in a loop": {
			reason:   "none of their instances is gone, and each stands in for another",
			machines: [][]v1alpha1.Machine{some(2, 1, 5), some(2, 5, 6), some(2, 6, 7), some(2, 7, 0)}, want: 8,
		},
		"frozen": {
			reason: "it waits for those that go", machines: [][]v1alpha1.Machine{some(2, 1, 0), some(8, 1, 5)}, frozen: true, want: 10,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := counted(slices.Concat(tc.machines...), tc.frozen); got != tc.want {
				t.Errorf("%d machines count, want %d: %s", got, tc.want, tc.reason)
			}
		})
	}
}

// A set must not swing between frozen and not while its machines stay as many.
func TestFrozenIsStable(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := Settings{Up: rapid.IntRange(0, 5).Draw(t, "up"), Down: rapid.IntRange(0, 5).Draw(t, "down"), Period: time.Minute}
		set := &v1alpha1.MachineSet{Spec: v1alpha1.MachineSetSpec{Replicas: rapid.Int32Range(0, 20).Draw(t, "replicas")}}
		l := s.limitsOf(set, nil)
		n, is := rapid.IntRange(0, 60).Draw(t, "machines"), rapid.Bool().Draw(t, "frozen")
		once := l.frozen(n, is)
		switch {
		case l.frozen(n, once) != once:
			t.Fatalf("with %d machines a set with limits %+v is %v, then %v", n, l, once, !once)
		case n >= l.freeze && !once:
			t.Fatal("not frozen")
		case n < l.freeze && n <= l.thaw && once:
			t.Fatal("frozen")
		}
	})
}

func TestValidate(t *testing.T) {
	t.Parallel()
	if err := DefaultSettings().Validate(); err != nil {
		t.Error(err)
	}
	for _, s := range []Settings{{Up: -1, Period: 1}, {Down: -1, Period: 1}, {}} {
		if s.Validate() == nil {
			t.Errorf("%+v is valid", s)
		}
	}
}
