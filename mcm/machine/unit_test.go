package machine

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

func TestJournal(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.Local) //nolint:gosmopolitan // what the decoder returns
	at := &metav1.Time{Time: now}
	for name, c := range map[string]struct {
		reason, want string
		journal      journal
	}{
		"new":     {"nothing was done", `{"settled":0}`, journal{}},
		"settled": {"a count alone", `{"settled":1}`, journal{Operation: dispatch.Create}.settle()},
		"begun": {
			"what is under way, since when, and who was asked",
			`{"settled":2,"operation":"create","begun":"` + at.UTC().Format(time.RFC3339) + `","provider":"virtual","first":true}`,
			journal{Settled: 2}.begin(dispatch.Create, "virtual", true, now),
		},
		"begun again": {
			"who was asked before may have something",
			`{"settled":2,"operation":"create","begun":"` + at.UTC().Format(time.RFC3339) + `","provider":"virtual"}`,
			journal{Settled: 2, Failed: dispatch.Create, carried: carried{Provider: "virtual"}}.begin(dispatch.Create, "virtual", true, now),
		},
		"begun of another manager's": {
			"that manager may have had something made",
			`{"settled":0,"operation":"create","begun":"` + at.UTC().Format(time.RFC3339) + `","provider":"virtual"}`,
			journal{}.begin(dispatch.Create, "virtual", false, now),
		},
		"discarded": {
			"no replica has it, and there is no instance",
			`{"settled":3}`, journal{Settled: 2}.begin(dispatch.Create, "virtual", true, now).discard(),
		},
		"return discarded": {
			"the instance must not join",
			`{"settled":3,"provider":"virtual","return":true}`,
			journal{Settled: 2, carried: carried{Provider: "virtual", Return: true}}.begin(dispatch.Delete, "virtual", false, now).discard(),
		},
		"failed": {
			"what failed, with which class, and until when to wait",
			`{"settled":3,"failed":"delete","notBefore":"` + at.UTC().Format(time.RFC3339) + `","class":"7/8"}`,
			journal{Settled: 2, Operation: dispatch.Delete}.fail(now, 0, "7/8"),
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := &v1alpha1.Machine{}
			if err := c.journal.write(m); err != nil {
				t.Fatal(err)
			}
			if text := m.Annotations[v1alpha1.AnnotationKeyOperation]; text != c.want {
				t.Errorf("journal is written as %s, want %s: %s", text, c.want, c.reason)
			}
			got, err := readJournal(m)
			if diff := cmp.Diff(c.journal, got, cmp.AllowUnexported(journal{})); err != nil || diff != "" {
				t.Errorf("read back: %v\n%s", err, diff)
			}
		})
	}
	if j, err := readJournal(&v1alpha1.Machine{}); err != nil || j != (journal{}) {
		t.Errorf("no journal is read as %+v, %v", j, err)
	}
	for _, text := range []string{"", "what?", "[]", `{"settled":"one"}`} {
		m := &v1alpha1.Machine{}
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.AnnotationKeyOperation, text)
		if _, err := readJournal(m); err == nil || !strings.Contains(err.Error(), v1alpha1.AnnotationKeyOperation) {
			t.Errorf("journal %q is read with error %v, want one that names the annotation", text, err)
		}
	}
}

// Mostly nothing else looks at a machine that runs.
func TestResync(t *testing.T) {
	t.Parallel()
	m := &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "1"}}
	newer := m.DeepCopy()
	newer.ResourceVersion = "2"
	if !outside().Update(event.UpdateEvent{ObjectOld: m, ObjectNew: m}) {
		t.Error("a resync is passed over")
	}
	if outside().Update(event.UpdateEvent{ObjectOld: m, ObjectNew: newer}) {
		t.Error("a change of nothing that matters is passed on")
	}
}

func TestJournalWait(t *testing.T) {
	t.Parallel()
	now := time.Now()
	failed := journal{Operation: dispatch.Create}.fail(now, time.Minute, "7")
	for name, c := range map[string]struct {
		reason, class string
		journal       journal
		kind          dispatch.Kind
		want          time.Duration
	}{
		"never failed":  {"nothing to wait for", "7", journal{Settled: 1}, dispatch.Create, 0},
		"same again":    {"it would fail again", "7", failed, dispatch.Create, time.Minute},
		"class changed": {"it may be mended", "8", failed, dispatch.Create, 0},
		"other kind":    {"a delete undoes what failed", "7", failed, dispatch.Delete, 0},
	} {
		if got := c.journal.wait(c.kind, now, c.class); got != c.want {
			t.Errorf("%s: wait is %v, want %v: %s", name, got, c.want, c.reason)
		}
	}
}

func TestRetry(t *testing.T) {
	t.Parallel()
	r := Retry{Short: 1, Medium: 2, Long: 3, ResourceExhausted: 4}
	for code := dispatch.Canceled; code <= dispatch.Uninitialized; code++ {
		create, remove := r.Medium, r.Long
		switch code {
		case dispatch.Canceled, dispatch.Unknown, dispatch.DeadlineExceeded, dispatch.Aborted, dispatch.Unavailable:
			create, remove = r.Short, r.Short
		case dispatch.ResourceExhausted:
			create = r.ResourceExhausted
		default:
		}
		if r.create(code) != create || r.delete(code) != remove {
			t.Errorf("%v: create is tried again in %d, delete in %d; want %d and %d",
				code, r.create(code), r.delete(code), create, remove)
		}
	}
}

func TestAddresses(t *testing.T) {
	t.Parallel()
	got := addresses(&dispatch.Instance{NodeName: "n", Addresses: []corev1.NodeAddress{
		{Type: corev1.NodeInternalIP, Address: "10.0.0.2"},
		{Type: corev1.NodeInternalIP, Address: "10.0.0.1"},
		{Type: corev1.NodeHostName, Address: "n"},
		{Type: corev1.NodeInternalIP, Address: "10.0.0.2"},
	}})
	want := []corev1.NodeAddress{
		{Type: corev1.NodeHostName, Address: "n"},
		{Type: corev1.NodeInternalIP, Address: "10.0.0.1"},
		{Type: corev1.NodeInternalIP, Address: "10.0.0.2"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
	if got := addresses(&dispatch.Instance{}); len(got) != 0 {
		t.Errorf("addresses of an instance without any are %v", got)
	}
}

func TestNodeHealth(t *testing.T) {
	t.Parallel()
	condition := func(kind string, status corev1.ConditionStatus) corev1.NodeCondition {
		return corev1.NodeCondition{Type: corev1.NodeConditionType(kind), Status: status, Reason: "R"}
	}
	ready := condition("Ready", corev1.ConditionTrue)
	for name, c := range map[string]struct {
		reason     string
		none       bool
		conditions []corev1.NodeCondition
		own        *string
		text       string
	}{
		"no node":      {"it is not there", true, nil, nil, "the node does not exist"},
		"silent":       {"a Node says nothing before its kubelet does", false, nil, nil, "no condition Ready"},
		"ready":        {"this is health", false, []corev1.NodeCondition{ready}, nil, ""},
		"not ready":    {"it says so", false, []corev1.NodeCondition{condition("Ready", corev1.ConditionFalse)}, nil, "Ready=False (R)"},
		"lost":         {"its kubelet is silent", false, []corev1.NodeCondition{condition("Ready", corev1.ConditionUnknown)}, nil, "Ready=Unknown (R)"},
		"watched":      {"a watched condition is true", false, []corev1.NodeCondition{ready, condition("DiskPressure", corev1.ConditionTrue)}, nil, "DiskPressure=True (R)"},
		"fine":         {"a watched condition is false", false, []corev1.NodeCondition{ready, condition("DiskPressure", corev1.ConditionFalse)}, nil, ""},
		"not watched":  {"its condition is not configured", false, []corev1.NodeCondition{ready, condition("Odd", corev1.ConditionTrue)}, nil, ""},
		"own":          {"the machine asks for it", false, []corev1.NodeCondition{ready, condition("Odd", corev1.ConditionTrue)}, new("Even,Odd"), "Odd=True (R)"},
		"own instead":  {"its list replaces the default", false, []corev1.NodeCondition{ready, condition("DiskPressure", corev1.ConditionTrue)}, new("Odd"), ""},
		"only watched": {"without Ready it is not healthy", false, []corev1.NodeCondition{condition("DiskPressure", corev1.ConditionFalse)}, nil, "no condition Ready"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			settings := DefaultSettings()
			p := &machineNode{object: &object{settings: &settings, machine: &v1alpha1.Machine{}}}
			p.machine.Spec.NodeConditions = c.own
			if !c.none {
				p.found = &corev1.Node{Status: corev1.NodeStatus{Conditions: c.conditions}}
			}
			healthy, text := p.nodeHealth()
			if healthy != (c.text == "") || text != c.text {
				t.Errorf("health is %v, %q; want %q: %s", healthy, text, c.text, c.reason)
			}
		})
	}
}
