package main

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestFlaws breaks one thing of a whole world.
func TestFlaws(t *testing.T) {
	t.Parallel()
	const uid = types.UID("uid")
	for name, tc := range map[string]struct {
		reason string
		spoil  func(*state)
		want   map[string]int
	}{
		"nothing": {"all is as it should be", func(*state) {}, nil},
		"pending": {
			"it may never join", func(s *state) { s.machines[uid].Status.CurrentStatus.Phase = v1alpha1.MachinePending },
			map[string]int{stuck: 1},
		},
		"going": {
			"it may never go", func(s *state) { s.machines[uid].DeletionTimestamp = &metav1.Time{Time: testTime} },
			map[string]int{stuck: 1},
		},
		"lost":    {"it says Running", func(s *state) { delete(s.instances, uid) }, map[string]int{lost: 1}},
		"doubled": {"two are surplus", func(s *state) { s.instances[uid] = make([]cloudapi.Instance, 3) }, map[string]int{doubled: 2}},
		"another": {
			"the number is right, and it is not the machine's", func(s *state) { s.instances[uid][0].ProviderID = "other" },
			map[string]int{lost: 1},
		},
		"no Node":      {"nothing runs there", func(s *state) { delete(s.nodes, "node") }, map[string]int{stuck: 1}},
		"another Node": {"it is of an instance before", func(s *state) { s.nodes["node"].Spec.ProviderID = "other" }, map[string]int{stuck: 1}},
		"dead Node": {
			"nothing runs there", func(s *state) { s.nodes["node"].Status.Conditions[0].Status = corev1.ConditionUnknown },
			map[string]int{stuck: 1},
		},
		"half a rollout": {
			"it has halted", func(s *state) { s.pools["pool"].Spec.Template.Labels = map[string]string{revisionLabel: "2"} },
			map[string]int{stuck: 1},
		},
		"too few":  {"they never come", func(s *state) { s.pools["pool"].Spec.Replicas = 3 }, map[string]int{stuck: 2}},
		"too many": {"they never go", func(s *state) { s.pools["pool"].Spec.Replicas = 0 }, map[string]int{stuck: 1}},
		"one too many that does not go": {
			"it is one machine, however one looks at it", func(s *state) {
				s.machines[uid].DeletionTimestamp = &metav1.Time{Time: testTime}
				s.pools["pool"].Spec.Replicas = 0
			},
			map[string]int{stuck: 1},
		},
		"a name used again": {
			"it is of no pool", func(s *state) {
				s.machines[uid].Labels = map[string]string{v1alpha1.LabelKeyNode: "node"}
				s.pools["pool"].Spec.Replicas = 0
			},
			nil,
		},
		"orphans": {
			"they belong to no Machine", func(s *state) { s.instances["gone"] = make([]cloudapi.Instance, 2) },
			map[string]int{leaked: 2},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := wholeWorld(uid)
			tc.spoil(s)
			if diff := cmp.Diff(tc.want, total(s.flaws()), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tc.reason, diff)
			}
		})
	}
}

// TestRemains leaves one thing of a world whose pools are gone.
func TestRemains(t *testing.T) {
	t.Parallel()
	const uid = types.UID("uid")
	for name, tc := range map[string]struct {
		reason string
		left   func(was *state) *state
		want   map[string]int
	}{
		"nothing":   {"all is as it should be", func(*state) *state { return &state{} }, nil},
		"a machine": {"it was deleted", func(was *state) *state { return &state{machines: was.machines} }, map[string]int{stuck: 1}},
		"an instance": {
			"it belongs to no Machine", func(was *state) *state { return &state{instances: was.instances} },
			map[string]int{leaked: 1},
		},
		"a Node": {
			"only mcm can release it", func(was *state) *state { return &state{nodes: was.nodes} },
			map[string]int{stuck: 1},
		},
		"a Node that mcm has let go": {
			"it is the cloud's controller's to remove", func(was *state) *state {
				was.nodes["node"].Finalizers = nil
				return &state{nodes: was.nodes}
			}, nil,
		},
		"all": {"the Node stays with its Machine", func(was *state) *state { return was }, map[string]int{stuck: 1}},
		"several Nodes": {
			"each counts", func(was *state) *state {
				return &state{nodes: map[string]*corev1.Node{"node": was.nodes["node"], "other": was.nodes["node"]}}
			}, map[string]int{stuck: 2},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			was := wholeWorld(uid)
			was.machines[uid].Name = "machine"
			was.nodes["node"].Labels = map[string]string{v1alpha1.LabelKeyMachineName: "machine"}
			was.nodes["node"].Finalizers = []string{v1alpha1.FinalizerNameNode}
			if diff := cmp.Diff(tc.want, total(tc.left(was).remains()), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tc.reason, diff)
			}
		})
	}
}

func wholeWorld(uid types.UID) *state {
	m := seenMachine(string(uid), time.Time{})
	m.Labels = map[string]string{v1alpha1.LabelKeyNode: "node", v1alpha1.LabelKeyMachineDeployment: "pool", revisionLabel: "1"}
	m.Spec.ProviderID = "id"
	m.Status.CurrentStatus.Phase = v1alpha1.MachineRunning
	pool := &v1alpha1.MachineDeployment{Spec: v1alpha1.MachineDeploymentSpec{Replicas: 1}}
	pool.Spec.Template.Labels = map[string]string{revisionLabel: "1"}
	return &state{
		pools:     map[string]*v1alpha1.MachineDeployment{"pool": pool},
		machines:  map[types.UID]*v1alpha1.Machine{uid: m},
		instances: map[types.UID][]cloudapi.Instance{uid: {{ProviderID: "id"}}},
		nodes: map[string]*corev1.Node{"node": {
			Spec:   corev1.NodeSpec{ProviderID: "id"},
			Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
		}},
	}
}
