package drain

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

func TestPolicy(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	policy := Policy{Timeout: time.Hour, MaxEvictRetries: 100}
	ill := func(kind corev1.NodeConditionType, status corev1.ConditionStatus, ago time.Duration) []corev1.NodeCondition {
		return []corev1.NodeCondition{{Type: kind, Status: status, LastTransitionTime: metav1.NewTime(now.Add(-ago))}}
	}
	type want struct {
		Force   bool
		Timeout time.Duration
		Retries int
		Again   time.Duration
	}
	for name, tc := range map[string]struct {
		reason     string
		deletedAgo time.Duration
		label      string
		spec       v1alpha1.MachineConfiguration
		conditions []corev1.NodeCondition
		want       want
	}{
		"defaults": {
			reason: "the policy's", want: want{Timeout: time.Hour, Retries: 100, Again: time.Hour},
		},
		"half the time is over": {
			reason: "the time runs from the deletion, across drains and managers", deletedAgo: 30 * time.Minute,
			want: want{Timeout: 30 * time.Minute, Retries: 100, Again: 30 * time.Minute},
		},
		"the machine's own": {
			reason: "the machine wins",
			spec:   v1alpha1.MachineConfiguration{MachineDrainTimeout: &metav1.Duration{Duration: 10 * time.Minute}, MaxEvictRetries: new(int32(7))},
			want:   want{Timeout: 10 * time.Minute, Retries: 7, Again: 10 * time.Minute},
		},
		"retries beyond the time": {
			reason: "one in 20 s at most",
			spec:   v1alpha1.MachineConfiguration{MachineDrainTimeout: &metav1.Duration{Duration: time.Minute}},
			want:   want{Timeout: time.Minute, Retries: 3, Again: time.Minute},
		},
		"the time is over": {
			reason: "the machine goes anyway", deletedAgo: 61 * time.Minute,
			want: want{Force: true, Timeout: time.Minute, Retries: 1},
		},
		"label": {
			reason: "the user wants it", label: "True", want: want{Force: true, Timeout: time.Minute, Retries: 1},
		},
		"label as a digit": {
			reason: "any true value that strconv.ParseBool knows", label: "1", want: want{Force: true, Timeout: time.Minute, Retries: 1},
		},
		"label says no": {
			reason: "false is not true", label: "false", want: want{Timeout: time.Hour, Retries: 100, Again: time.Hour},
		},
		"label makes no sense": {
			reason: "yes is not true", label: "yes", want: want{Timeout: time.Hour, Retries: 100, Again: time.Hour},
		},
		"not ready for a moment": {
			reason: "it may become ready", conditions: ill(corev1.NodeReady, corev1.ConditionUnknown, time.Minute),
			want: want{Timeout: time.Hour, Retries: 100, Again: 4 * time.Minute},
		},
		"not ready for long": {
			reason: "its pods cannot end in order", conditions: ill(corev1.NodeReady, corev1.ConditionUnknown, 5*time.Minute),
			want: want{Force: true, Timeout: time.Hour, Retries: 100},
		},
		"not ready for who knows how long": {
			reason: "force needs a known time", conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionFalse}},
			want: want{Timeout: time.Hour, Retries: 100, Again: time.Hour},
		},
		"read-only for long": {
			reason: "its pods cannot end in order", conditions: ill("ReadonlyFilesystem", corev1.ConditionTrue, 6*time.Minute),
			want: want{Force: true, Timeout: time.Hour, Retries: 100},
		},
		"ready for long": {
			reason: "all is well", conditions: ill(corev1.NodeReady, corev1.ConditionTrue, time.Hour),
			want: want{Timeout: time.Hour, Retries: 100, Again: time.Hour},
		},
		"not ready and little time": {
			reason: "what comes first", deletedAgo: 59 * time.Minute, conditions: ill(corev1.NodeReady, corev1.ConditionFalse, 0),
			want: want{Timeout: time.Minute, Retries: 100, Again: time.Minute},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			machine := &v1alpha1.Machine{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: "ns", Name: "m", UID: "uid", DeletionTimestamp: &metav1.Time{Time: now.Add(-tc.deletedAgo)},
					Labels: map[string]string{"name": "workers"},
				},
				Spec: v1alpha1.MachineSpec{MachineConfiguration: tc.spec},
			}
			if tc.label != "" {
				machine.Labels["force-deletion"] = tc.label
			}
			node := &corev1.Node{Status: corev1.NodeStatus{Conditions: tc.conditions}}
			req, again := policy.Request(machine, node, true, now)
			got := want{Force: req.Force, Timeout: req.Timeout, Retries: req.MaxEvictRetries, Again: again}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("%s, -want +got:\n%s", tc.reason, diff)
			}
			rest := Request{UID: "uid", Machine: req.Machine, Deployment: "workers", Node: node, Failed: true}
			if diff := cmp.Diff(rest, req, cmpopts.IgnoreFields(Request{}, "Force", "Timeout", "MaxEvictRetries")); diff != "" {
				t.Errorf("the rest, -want +got:\n%s", diff)
			}
		})
	}
}

// TestStayPolicy is about Nodes that are emptied and stay.
func TestStayPolicy(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	policy := Policy{Timeout: time.Hour, MaxEvictRetries: 100}
	for name, tc := range map[string]struct {
		reason string
		ago    time.Duration
		labels map[string]string
		want   Request
		again  time.Duration
	}{
		"begins": {reason: "all the time is left", want: Request{Timeout: time.Hour, MaxEvictRetries: 100}, again: time.Hour},
		"half the time is over": {
			reason: "it runs from when the machine was Failed and preserved", ago: 30 * time.Minute,
			want: Request{Timeout: 30 * time.Minute, MaxEvictRetries: 100}, again: 30 * time.Minute,
		},
		"the time is over": {
			reason: "its pods are needed elsewhere", ago: time.Hour, want: Request{Force: true, Timeout: time.Minute, MaxEvictRetries: 1},
		},
		"label": {
			reason: "the user wants it", labels: map[string]string{"force-drain": "True"},
			want: Request{Force: true, Timeout: time.Minute, MaxEvictRetries: 1},
		},
		"label in another spelling": {
			reason: "only True counts", labels: map[string]string{"force-drain": "true"},
			want: Request{Timeout: time.Hour, MaxEvictRetries: 100}, again: time.Hour,
		},
		"label of a deletion": {
			reason: "it is not deleted", labels: map[string]string{"force-deletion": "true"},
			want: Request{Timeout: time.Hour, MaxEvictRetries: 100}, again: time.Hour,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			machine := &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m", UID: "uid", Labels: tc.labels}}
			node := &corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{
				Type: corev1.NodeReady, Status: corev1.ConditionFalse, LastTransitionTime: metav1.NewTime(now.Add(-time.Hour)),
			}}}}
			got, again := policy.StayRequest(machine, node, now.Add(-tc.ago), now)
			tc.want.UID, tc.want.Machine.Namespace, tc.want.Machine.Name, tc.want.Node, tc.want.Stays = "uid", "ns", "m", node, true
			if diff := cmp.Diff(tc.want, got); diff != "" || again != tc.again {
				t.Errorf("again in %s, want %s; %s, -want +got:\n%s", again, tc.again, tc.reason, diff)
			}
		})
	}
}
