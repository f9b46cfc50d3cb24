package machinedeployment

import (
	"fmt"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A testSet is a set of running machines.
type testSet struct {
	running int
	marked  int // of them, that the autoscaler chose
	leaving int // beside them
	broken  int // beside them
}

// testScaling looks at sets whose replicas are as many as they have machines, the
// latest last, of a deployment that had so many replicas when they were annotated.
func testScaling(before, desired, surge int32, sets []testSet, change func(*scaling)) *scaling {
	const at = "2026-08-11T07:00:00Z"
	d := &v1alpha1.MachineDeployment{}
	d.Annotations = map[string]string{v1alpha1.AnnotationKeyLastReplicaChangeByScaler: at}
	d.Spec.Replicas = desired
	d.Spec.Strategy = v1alpha1.MachineDeploymentStrategy{
		Type: v1alpha1.RollingUpdateMachineDeploymentStrategyType,
		RollingUpdate: &v1alpha1.RollingUpdateMachineDeployment{UpdateConfiguration: v1alpha1.UpdateConfiguration{
			MaxSurge: new(intstr.FromInt32(surge)), MaxUnavailable: new(intstr.FromInt32(1)),
		}},
	}
	p := &scaling{&ownedSets{object: &object{deployment: d}, machines: map[types.UID][]*v1alpha1.Machine{}}}
	for i, s := range sets {
		set := &v1alpha1.MachineSet{}
		set.UID, set.Spec.Replicas = types.UID(fmt.Sprint(i)), int32(s.running+s.broken)
		set.Annotations = map[string]string{
			v1alpha1.AnnotationKeyDesiredReplicas: strconv.Itoa(int(before)),
			v1alpha1.AnnotationKeyMaxReplicas:     strconv.Itoa(int(before + surge)),
		}
		for n := range s.running + s.broken + s.leaving {
			m := &v1alpha1.Machine{}
			if n < s.running {
				m.Status.CurrentStatus.Phase = v1alpha1.MachineRunning
			}
			if n < s.marked {
				m.Annotations = map[string]string{
					v1alpha1.AnnotationKeyMachinePriority:       v1alpha1.MachinePriorityDelete,
					v1alpha1.AnnotationKeyMarkedForDeletionTime: at,
				}
			}
			if n >= s.running+s.broken {
				m.DeletionTimestamp = new(metav1.Now())
			}
			p.machines[set.UID] = append(p.machines[set.UID], m)
		}
		p.sets = append(p.sets, set)
	}
	last := len(p.sets) - 1
	p.old, p.latest = p.sets[:last], p.sets[last]
	if change != nil {
		change(p)
	}

	return p
}

func paused(p *scaling) { p.deployment.Spec.Paused = true }

// toBeMade is for a template that has no set yet.
func toBeMade(p *scaling) { p.old, p.latest = p.sets, nil }

// TestParts changes the replicas of a deployment whose sets are in the middle of a
// rollout, or about to be.
func TestParts(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason                 string
		before, desired, surge int32
		sets                   []testSet // oldest first
		change                 func(*scaling)
		want                   []int32 // of those that have replicas
	}{
		"broken": {
			"what does not work goes, and may leave the latest set nothing", 10, 5, 1,
			[]testSet{{running: 9}, {broken: 2}},
			nil,
			[]int32{6, 0},
		},
		"broken, out again": {
			"what is lacking then is the latest set's, once there is room", 5, 10, 1,
			[]testSet{{running: 6, leaving: 3}, {leaving: 2}},
			nil,
			[]int32{6},
		},
		"broken, out again, two old ones": {
			"the same", 5, 10, 1,
			[]testSet{{running: 4, leaving: 3}, {running: 2}, {leaving: 2}},
			nil,
			[]int32{4, 2},
		},
		"new template": {
			"no machine is made of the old one only to be replaced", 4, 10, 1, []testSet{{running: 4}}, toBeMade, []int32{4},
		},
		"new template, two old ones": {
			"the same", 4, 10, 1, []testSet{{running: 3}, {running: 1}}, toBeMade, []int32{3, 1},
		},
		"new template, fewer": {
			"fewer are fewer", 4, 2, 1, []testSet{{running: 4}}, toBeMade, []int32{2},
		},
		"last old ones drain": {
			"the chosen machine is not made up for, as long as there is no room", 3, 2, 0,
			[]testSet{{leaving: 1}, {running: 2, marked: 1}},
			nil,
			[]int32{1},
		},
		"last old ones drain, with room": {
			"the latest set gets what it may", 4, 5, 2, []testSet{{leaving: 1}, {running: 4}}, nil, []int32{5},
		},
		"complete": {
			"nothing is on its way out", 4, 6, 1, []testSet{{}, {running: 4}}, nil, []int32{6},
		},
		"paused": {
			"the latest set gets more, and waits for none", 4, 8, 1,
			[]testSet{{running: 3, leaving: 1}, {running: 2}},
			paused,
			[]int32{3, 6},
		},
		"paused before the new set is made": {
			"then the youngest", 4, 6, 0,
			[]testSet{{running: 3}, {running: 1}},
			func(p *scaling) { paused(p); toBeMade(p) },
			[]int32{3, 3},
		},
		"paused, one set": {
			"it gets all", 4, 6, 1, []testSet{{running: 4}, {}}, paused, []int32{6},
		},
		"paused, autoscaler": {
			"the surge that was not used is not used now", 4, 3, 1,
			[]testSet{{running: 3, marked: 1}, {running: 1}},
			paused,
			[]int32{2, 1},
		},
		"paused, autoscaler, fewer than wished for": {
			"what the rollout has not made yet stays lacking", 10, 8, 1,
			[]testSet{{running: 3, marked: 2}, {running: 4}},
			paused,
			[]int32{1, 4},
		},
		"paused, autoscaler, one set": {
			"the same", 4, 3, 0, []testSet{{running: 3, marked: 1, leaving: 1}, {}}, paused, []int32{2},
		},
		"paused, more chosen than fewer wished for": {
			"the others are made up for", 4, 3, 1,
			[]testSet{{running: 3, marked: 2}, {running: 1}},
			paused,
			[]int32{1, 2},
		},
		"paused, one set, more chosen": {
			"the same", 4, 3, 1, []testSet{{running: 4, marked: 2}, {}}, paused, []int32{3},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := testScaling(tc.before, tc.desired, tc.surge, tc.sets, tc.change)
			got := p.divideReplicas(p.activeSets(), max(0, tc.before-tc.desired))
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("%s: -want, +got:\n%s", tc.reason, diff)
			}
		})
	}
}
