package machinedeployment

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestUnderWay covers what the condition says of a rollout in which nothing has
// changed since the last look.
func TestUnderWay(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 8, 11, 7, 0, 0, 0, time.UTC)
	old := &v1alpha1.MachineSet{ObjectMeta: metav1.ObjectMeta{Name: "pool-old", UID: "old"}, Status: v1alpha1.MachineSetStatus{Replicas: 1}}
	latest := &v1alpha1.MachineSet{ObjectMeta: metav1.ObjectMeta{Name: "pool-new", UID: "new"}}
	cases := map[string]struct {
		reason string
		latest *v1alpha1.MachineSet
		before string
		status corev1.ConditionStatus
		age    time.Duration // of what the condition said before
		turned bool
		want   string
	}{
		"LongDone": {
			"a rollout may begin long after the last one, and its deadline is its own",
			latest, "NewMachineSetAvailable", "True", time.Hour, false, `True FoundNewMachineSet: Found new machine set "pool-new"`,
		},
		"LongDoneNoSet": {
			"before the new set is made, old machines go", nil, "NewMachineSetAvailable", "True", time.Hour, false,
			"True MachineSetUpdated: Removal of the earlier machine sets' machines is progressing.",
		},
		"First": {
			"a deployment without conditions", latest, "", "", 0, false, `True FoundNewMachineSet: Found new machine set "pool-new"`,
		},
		"InTime": {
			"the deadline has not passed", latest, "NewMachineSetCreated", "True", 9 * time.Second, false,
			`True NewMachineSetCreated: Created new machine set "pool-new"`,
		},
		"Late": {
			"the deadline has passed", latest, "MachineSetUpdated", "True", 10 * time.Second, false,
			`False ProgressDeadlineExceeded: MachineSet "pool-new" has timed out progressing.`,
		},
		"LateNoSet": {
			"old machines that do not go hold it up, too", nil, "MachineSetUpdated", "True", 10 * time.Second, false,
			"False ProgressDeadlineExceeded: Removal of the earlier machine sets' machines has timed out progressing.",
		},
		"Resumed": {
			"nothing has happened since", latest, "DeploymentResumed", "Unknown", 0, false, "Unknown DeploymentResumed: Deployment is resumed",
		},
		"GoneBack": {
			"the deadline that has passed was that of the set before", latest, "ProgressDeadlineExceeded", "False", time.Hour, true,
			`True FoundNewMachineSet: Found new machine set "pool-new"`,
		},
		"SetMade": {
			"the set could be made at last", latest, "MachineSetCreateError", "False", time.Second, false,
			`True MachineSetUpdated: MachineSet "pool-new" is progressing.`,
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := &v1alpha1.MachineDeployment{Spec: v1alpha1.MachineDeploymentSpec{Replicas: 1, ProgressDeadlineSeconds: new(int32(10))}}
			d.Status.Replicas = 1
			if tc.before != "" {
				d.Status.Conditions = []v1alpha1.MachineDeploymentCondition{{
					Type: v1alpha1.MachineDeploymentProgressing, Status: tc.status, Reason: tc.before, LastUpdateTime: metav1.NewTime(now.Add(-tc.age)),
				}}
			}
			p := &progress{turned: tc.turned, ownedSets: &ownedSets{
				object: &object{deployment: d, stored: d.DeepCopy(), now: now}, latest: tc.latest,
				sets: []*v1alpha1.MachineSet{old}, old: []*v1alpha1.MachineSet{old},
				machines: map[types.UID][]*v1alpha1.Machine{"old": {{
					Status: v1alpha1.MachineStatus{CurrentStatus: v1alpha1.CurrentStatus{Phase: v1alpha1.MachineRunning}},
				}}},
			}}
			p.reportProgress()
			c := conditionOf(&d.Status, v1alpha1.MachineDeploymentProgressing)
			if diff := cmp.Diff(tc.want, string(c.Status)+" "+c.Reason+": "+c.Message); diff != "" {
				t.Errorf("%s: -want, +got:\n%s", tc.reason, diff)
			}
			if overdue := c.Reason == v1alpha1.ReasonProgressDeadlineExceeded; overdue == (p.After() > 0) {
				t.Errorf("%s: the next look is in %s", tc.reason, p.After())
			}
		})
	}
}
