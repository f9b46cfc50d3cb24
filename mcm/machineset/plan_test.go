package machineset

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

func setOf(replicas int32) *v1alpha1.MachineSet {
	return &v1alpha1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{}, Annotations: map[string]string{}},
		Spec:       v1alpha1.MachineSetSpec{Replicas: replicas},
	}
}

func TestPlan(t *testing.T) {
	t.Parallel()
	failed := phase(v1alpha1.MachineFailed)
	chosen := func(d time.Duration) change {
		return func(m *v1alpha1.Machine) { withPriority("1")(m); markedFor(d)(m) }
	}
	scaled := func(set *v1alpha1.MachineSet) {
		set.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler] = noon.Format(time.RFC3339)
	}
	cases := map[string]struct {
		reason   string
		replicas int32
		set      func(*v1alpha1.MachineSet)
		machines []*v1alpha1.Machine
		create   int
		delete   []string
		recheck  time.Time
	}{
		"nothing": {reason: "an empty set that is to be empty"},
		"grow":    {reason: "what lacks is made", replicas: 3, machines: []*v1alpha1.Machine{newMachine("a")}, create: 2},
		"burst":   {reason: "no more than 100 at once", replicas: 250, create: 100},
		"enough": {
			reason: "machines that are not ready count", replicas: 2,
			machines: []*v1alpha1.Machine{newMachine("a", phase("Unknown")), newMachine("b", phase(""))},
		},
		"leaving": {
			reason: "machines that are going do not count, and are not deleted twice", replicas: 1,
			machines: []*v1alpha1.Machine{
				newMachine("a", phase("Terminating")),
				newMachine("b", func(m *v1alpha1.Machine) { m.DeletionTimestamp = &metav1.Time{Time: noon} }),
			},
			create: 1,
		},
		"shrink": {
			reason: "the oldest goes", replicas: 1,
			machines: []*v1alpha1.Machine{newMachine("young", aged(time.Minute)), newMachine("old")}, delete: []string{"old"},
		},
		"failed": {
			reason: "a Failed machine is replaced at once", replicas: 2,
			machines: []*v1alpha1.Machine{newMachine("a"), newMachine("b", failed)}, create: 1, delete: []string{"b"},
		},
		"failed and surplus": {
			reason: "a Failed machine goes and does not count", replicas: 1,
			machines: []*v1alpha1.Machine{newMachine("a"), newMachine("b", failed)}, delete: []string{"b"},
		},
		"preserved": {
			reason: "a preserved machine is kept and counts, until its time is up", replicas: 1,
			machines: []*v1alpha1.Machine{newMachine("a", failed, preservedFor(time.Hour))}, recheck: noon.Add(time.Hour),
		},
		"preserved no more": {
			reason: "its time is up", replicas: 1,
			machines: []*v1alpha1.Machine{
				newMachine("a", failed, preservedFor(-time.Second), annotated(v1alpha1.AnnotationKeyPreserve, "when-failed")),
			},
			create: 1, delete: []string{"a"},
		},
		"to be preserved": {
			reason: "the request is not answered yet", replicas: 1,
			machines: []*v1alpha1.Machine{newMachine("a", failed, annotated(v1alpha1.AnnotationKeyPreserve, "when-failed"))},
		},
		"not to be preserved": {
			reason: "false is no request", replicas: 1,
			machines: []*v1alpha1.Machine{newMachine("a", failed, annotated(v1alpha1.AnnotationKeyPreserve, "false"))},
			create:   1, delete: []string{"a"},
		},
		"to be preserved, as its Node says": {
			reason: "what the Node says is noted on the machine", replicas: 1,
			machines: []*v1alpha1.Machine{newMachine("a", failed, onNode("when-failed"))},
		},
		"not to be preserved, as its Node says": {
			reason: "what the Node says wins", replicas: 1,
			machines: []*v1alpha1.Machine{
				newMachine("a", failed, onNode("false"), annotated(v1alpha1.AnnotationKeyPreserve, "now")),
			},
			create: 1, delete: []string{"a"},
		},
		"to be chosen": {
			reason: "there is room for one, and it is the newest", replicas: 2, set: preserves(1),
			machines: []*v1alpha1.Machine{newMachine("old", failed), newMachine("new", failed, aged(time.Minute))},
			create:   1, delete: []string{"old"},
		},
		"chosen before, and its time is over": {
			reason: "it is not chosen again", replicas: 1, set: preserves(1),
			machines: []*v1alpha1.Machine{newMachine("a", failed, preservedFor(-time.Second))},
			create:   1, delete: []string{"a"},
		},
		"surplus": {
			reason: "one that is about to be preserved is as good as preserved", replicas: 1,
			machines: []*v1alpha1.Machine{newMachine("a", failed, annotated(v1alpha1.AnnotationKeyPreserve, "now")), newMachine("b")},
			delete:   []string{"b"},
		},
		"preserved, but too many": {
			reason: "preservation is no reason for more machines than replicas", replicas: 1,
			machines: []*v1alpha1.Machine{newMachine("a", failed, preservedFor(time.Hour)), newMachine("b", preservedFor(2*time.Hour))},
			delete:   []string{"a"}, recheck: noon.Add(time.Hour),
		},
		"chosen": {
			reason: "the autoscaler chose b, and the replicas it set have come down", replicas: 1, set: scaled,
			machines: []*v1alpha1.Machine{newMachine("a"), newMachine("b", chosen(0), aged(time.Second))}, delete: []string{"b"},
		},
		"chosen for later": {
			reason: "the replicas that go with the mark have not come yet", replicas: 2, set: scaled,
			machines: []*v1alpha1.Machine{newMachine("a"), newMachine("b", chosen(time.Second))},
		},
		"chosen, never scaled": {
			reason: "no time of the autoscaler has reached the set", replicas: 2,
			machines: []*v1alpha1.Machine{newMachine("a"), newMachine("b", chosen(-time.Hour))},
		},
		"chosen, and scaled up again": {
			reason: "the chosen one goes all the same, and is replaced", replicas: 2, set: scaled,
			machines: []*v1alpha1.Machine{newMachine("a"), newMachine("b", chosen(-time.Minute))}, create: 1, delete: []string{"b"},
		},
		"low priority alone": {
			reason: "priority 1 without a mark is only first in the order", replicas: 2, set: scaled,
			machines: []*v1alpha1.Machine{newMachine("a"), newMachine("b", withPriority("1"))},
		},
		"frozen": {
			reason: "a frozen set makes no machine", replicas: 3,
			set:      func(set *v1alpha1.MachineSet) { set.Labels[v1alpha1.LabelKeyFreeze] = "True" },
			machines: []*v1alpha1.Machine{newMachine("a", failed)}, delete: []string{"a"},
		},
		"not quite frozen": {
			reason: "only True freezes", replicas: 1,
			set: func(set *v1alpha1.MachineSet) { set.Labels[v1alpha1.LabelKeyFreeze] = "true" }, create: 1,
		},
		"frozen, too many": {
			reason: "a frozen set deletes", replicas: 0,
			set:      func(set *v1alpha1.MachineSet) { set.Labels[v1alpha1.LabelKeyFreeze] = "True" },
			machines: []*v1alpha1.Machine{newMachine("a")}, delete: []string{"a"},
		},
		"old set of an update in place": {
			reason: "it makes no machine, whatever the label's value", replicas: 2,
			set: func(set *v1alpha1.MachineSet) { set.Labels[v1alpha1.LabelKeyScaleUpDisabled] = "" },
		},
		"updated in place": {
			reason: "the one that moves to the new set is not surplus here", replicas: 1,
			machines: []*v1alpha1.Machine{
				newMachine("a"),
				newMachine("b", func(m *v1alpha1.Machine) { m.Labels[v1alpha1.LabelKeyNodeUpdateResult] = "successful" }),
			},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			set := setOf(tc.replicas)
			if tc.set != nil {
				tc.set(set)
			}
			got := planFor(set, tc.machines, noon)
			if diff := cmp.Diff(tc.delete, namesOf(got.delete), cmpopts.EquateEmpty()); diff != "" || got.create != tc.create {
				t.Errorf("creates %d, want %d; deletes (-want +got):\n%s%s", got.create, tc.create, diff, tc.reason)
			}
			if !got.recheck.Equal(tc.recheck) {
				t.Errorf("looks again at %s, want %s: %s", got.recheck, tc.recheck, tc.reason)
			}
		})
	}
}

// TestPlanInvariants holds plans against what must be true of each.
func TestPlanInvariants(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		set := setOf(int32(rapid.IntRange(0, 130).Draw(t, "replicas")))
		frozen := rapid.Bool().Draw(t, "frozen")
		if frozen {
			set.Labels[v1alpha1.LabelKeyFreeze] = "True"
		}
		if rapid.Bool().Draw(t, "scaled") {
			set.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler] = noon.Format(time.RFC3339)
		}
		machines := drawMachines(t, 130)
		p := planFor(set, machines, noon)

		replicas, active := int(set.Spec.Replicas), 0
		surplus := map[*v1alpha1.Machine]bool{}
		for _, m := range machines {
			if !leaving(m) && !discarded(set, m, noon) {
				active++
			}
		}
		for i, m := range p.delete {
			if leaving(m) || slices.Contains(p.delete[:i], m) {
				t.Fatalf("%s is deleted twice", m.Name)
			}
			if !discarded(set, m, noon) {
				surplus[m] = true
			}
		}
		switch {
		case frozen && p.create > 0:
			t.Fatal("a frozen set makes machines")
		case p.create > 0 && len(surplus) > 0:
			t.Fatal("makes machines and deletes good ones")
		case p.create > burst || len(p.delete) > burst:
			t.Fatalf("creates %d and deletes %d at once", p.create, len(p.delete))
		case active+p.create > max(active, replicas):
			t.Fatalf("%d machines and %d new ones for %d replicas", active, p.create, replicas)
		case len(surplus) > 0 && active-len(surplus) < replicas:
			t.Fatalf("%d of %d machines deleted for %d replicas", len(surplus), active, replicas)
		}
		for _, m := range machines {
			if leaving(m) || discarded(set, m, noon) || surplus[m] || m.Labels[v1alpha1.LabelKeyNodeUpdateResult] != "" {
				continue
			}
			for gone := range surplus {
				if deletedBefore(m, gone, noon) < 0 {
					t.Fatalf("%s is deleted and %s is kept", gone.Name, m.Name)
				}
			}
		}
	})
}

// TestPlansEnd carries plans out until there is nothing to do.
func TestPlansEnd(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		set := setOf(int32(rapid.IntRange(0, 350).Draw(t, "replicas")))
		preserves(rapid.Int32Range(0, 3).Draw(t, "preserved at most"))(set)
		machines := drawMachines(t, 350)
		for round := 0; ; round++ {
			p := planFor(set, machines, noon)
			if p.nothing() {
				break
			}
			if p.preserve {
				carryOut(set, machines)
				p = planFor(set, machines, noon)
			}
			if round > 10 {
				t.Fatalf("still creates %d and deletes %d after %d rounds", p.create, len(p.delete), round)
			}
			machines = slices.DeleteFunc(machines, func(m *v1alpha1.Machine) bool { return slices.Contains(p.delete, m) })
			for i := range p.create {
				machines = append(machines, newMachine(fmt.Sprintf("n%d-%d", round, i)))
			}
		}
		active, updated := 0, 0
		for _, m := range machines {
			if leaving(m) {
				continue
			}
			active++
			if m.Labels[v1alpha1.LabelKeyNodeUpdateResult] != "" {
				updated++
			}
		}
		if replicas := int(set.Spec.Replicas); active < replicas || active > replicas+updated {
			t.Fatalf("%d machines, %d of them updated in place, for %d replicas", active, updated, replicas)
		}
	})
}
