package machineset

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

func TestChoosePreserved(t *testing.T) {
	t.Parallel()
	failed := phase(v1alpha1.MachineFailed)
	auto := annotated(v1alpha1.AnnotationKeyPreserve, v1alpha1.PreserveAuto)
	minutes := func(n int) change { return aged(time.Duration(n) * time.Minute) }
	for name, tc := range map[string]struct {
		reason      string
		most        int32
		machines    []*v1alpha1.Machine
		keep, letGo []string
	}{
		"none wanted": {reason: "the default", machines: []*v1alpha1.Machine{newMachine("a", failed)}},
		"negative": {
			reason: "it is no number of machines", most: -1,
			machines: []*v1alpha1.Machine{newMachine("a", failed), newMachine("b", failed, auto)}, letGo: []string{"b"},
		},
		"room for two": {
			reason: "the newest, and of those of one age the first by name", most: 2,
			machines: []*v1alpha1.Machine{
				newMachine("b", failed, minutes(3)), newMachine("a", failed, minutes(3)), newMachine("new", failed, minutes(1)), newMachine("old", failed),
			},
			keep: []string{"new", "a"},
		},
		"some are preserved": {
			reason: "those that are count, and are not moved for a newer one", most: 2,
			machines: []*v1alpha1.Machine{
				newMachine("old", failed, auto, preservedFor(time.Hour)), newMachine("a", failed, minutes(3)), newMachine("b", failed, minutes(2)),
			},
			keep: []string{"b"},
		},
		"lowered": {
			reason: "the oldest are let go", most: 1,
			machines: []*v1alpha1.Machine{
				newMachine("old", failed, auto, preservedFor(time.Hour)), newMachine("new", failed, auto, minutes(1)),
				newMachine("middle", failed, auto, minutes(5), preservedFor(time.Hour)),
			},
			letGo: []string{"middle", "old"},
		},
		"on the Node": {
			reason: "a Node's value is a person's choice, which the set neither counts nor can revoke", most: 1,
			machines: []*v1alpha1.Machine{
				newMachine("a", failed, onNode(v1alpha1.PreserveAuto), preservedFor(time.Hour)),
				newMachine("b", failed, onNode(v1alpha1.PreserveAuto), auto), newMachine("c", failed, minutes(1)),
			},
			keep: []string{"c"},
		},
		"not to be chosen": {
			reason: "users, Nodes, the autoscaler or the machine's own past have said something else", most: 9,
			machines: []*v1alpha1.Machine{
				newMachine("running"),
				newMachine("gone", failed, func(m *v1alpha1.Machine) { m.DeletionTimestamp = &metav1.Time{Time: noon} }),
				newMachine("forbidden", failed, annotated(v1alpha1.AnnotationKeyPreserve, "false")),
				newMachine("forbidden on the Node", failed, onNode("false")),
				newMachine("by the user", failed, annotated(v1alpha1.AnnotationKeyPreserve, "when-failed")),
				newMachine("misspelt", failed, annotated(v1alpha1.AnnotationKeyPreserve, "True")),
				newMachine("being released", failed, preservedFor(time.Hour)),
				newMachine("over", failed, preservedFor(-time.Hour)),
				newMachine("over, with annotation", failed, auto, preservedFor(-time.Hour)),
				newMachine("marked", failed, withPriority("1"), markedFor(-time.Hour)),
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			set := setOf(1)
			preserves(tc.most)(set)
			set.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler] = noon.Format(time.RFC3339)
			keep, letGo := choosePreserved(set, tc.machines, noon)
			for what, pair := range map[string][2][]string{"keeps": {tc.keep, namesOf(keep)}, "lets go": {tc.letGo, namesOf(letGo)}} {
				if diff := cmp.Diff(pair[0], pair[1], cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("%s (-want +got):\n%s%s", what, diff, tc.reason)
				}
			}
		})
	}
}

// carryOut has the machines be as their set has chosen.
func carryOut(set *v1alpha1.MachineSet, machines []*v1alpha1.Machine) {
	keep, letGo := choosePreserved(set, machines, noon)
	for _, m := range keep {
		m.Annotations[v1alpha1.AnnotationKeyPreserve] = v1alpha1.PreserveAuto
	}
	for _, m := range letGo {
		delete(m.Annotations, v1alpha1.AnnotationKeyPreserve)
	}
}

// TestChoiceSettles carries choices out: the next one must find nothing to do, and
// as many machines preserved as there may be.
func TestChoiceSettles(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		set := setOf(0)
		most := rapid.Int32Range(0, 9).Draw(t, "most")
		preserves(most)(set)
		machines := drawMachines(t, 20)
		if keep, letGo := choosePreserved(set, machines, noon); len(keep) > 0 && len(letGo) > 0 {
			t.Fatalf("keeps %q and lets %q go", namesOf(keep), namesOf(letGo))
		}
		carryOut(set, machines)
		if n := len(autoPreserved(set, machines, noon)); n > int(most) {
			t.Fatalf("preserves %d of at most %d", n, most)
		}
		if keep, letGo := choosePreserved(set, machines, noon); len(keep)+len(letGo) > 0 {
			t.Fatalf("then keeps %q and lets %q go", namesOf(keep), namesOf(letGo))
		}
	})
}
