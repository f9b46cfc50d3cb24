package machine

import (
	"reflect"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// A manager must read what an earlier version of it has written, and write the same.
func TestJournalText(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		`{"settled":0}`,
		`{"settled":0,"operation":"create","begun":"2026-01-02T03:04:05Z","provider":"virtual","first":true}`,
		`{"settled":7,"operation":"delete","begun":"2026-01-02T03:04:05Z","failed":"create","notBefore":"2026-01-02T03:05:05Z",` +
			`"class":"0123abcd.3/815","lost":"2026-01-02T03:14:05Z","provider":"virtual","first":true,"stateOf":"other",` +
			`"lastGood":true,"return":true,"token":true}`,
	} {
		m := &v1alpha1.Machine{}
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.AnnotationKeyOperation, text)
		j, err := readJournal(m)
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if err := j.write(m); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if got := m.Annotations[v1alpha1.AnnotationKeyOperation]; got != text {
			t.Errorf("it is written as %s, want %s as it was", got, text)
		}
	}
}

// TestJournalCarries sets every carried field, and requires that each transition keeps
// all but those that it is known to drop. A new field is kept unless a row says otherwise.
func TestJournalCarries(t *testing.T) {
	t.Parallel()
	now := time.Now()
	full := journal{Settled: 7, Operation: dispatch.Delete, Failed: dispatch.Delete}
	fields := reflect.ValueOf(&full.carried).Elem()
	for i := range fields.NumField() {
		switch f := fields.Field(i); f.Interface().(type) {
		case bool:
			f.SetBool(true)
		case string:
			f.SetString("set")
		case *metav1.Time:
			f.Set(reflect.ValueOf(&metav1.Time{Time: now}))
		default:
			t.Fatalf("field %s has a type that this test cannot set: add it", fields.Type().Field(i).Name)
		}
	}
	notFirst := full
	notFirst.First = false
	for name, c := range map[string]struct {
		reason string
		next   journal
		drops  []string
	}{
		"begin":             {"it is the same operation again", full.begin(dispatch.Delete, "other", true, now), []string{"First"}},
		"begin another":     {"the last good class was for what failed", full.begin(dispatch.Create, "other", true, now), []string{"First", "LastGood"}},
		"overtake":          {"it is the same operation behind another", full.overtake(dispatch.Delete, "other", 9, now), []string{"First"}},
		"settle":            {"the operation is over", full.settle(), []string{"First", "LastGood", "Return"}},
		"settle as another": {"the operation is over", full.settleAs(9), []string{"First", "LastGood", "Return"}},
		"discard":           {"no driver has had it", notFirst.discard(), []string{"First", "LastGood"}},
		"discard the first": {"no driver has anything", full.discard(), []string{"First", "LastGood", "Provider"}},
		"fail":              {"it is tried again", full.fail(now, time.Minute, "7"), []string{"First", "LastGood"}},
		"returned":          {"the provider has nothing any more", full.returned(now, time.Minute, "7"), []string{"First", "LastGood", "Return", "Provider"}},
	} {
		got := reflect.ValueOf(c.next.carried)
		for i := range got.NumField() {
			field := got.Type().Field(i).Name
			want := fields.Field(i).Interface()
			if slices.Contains(c.drops, field) {
				want = reflect.Zero(got.Field(i).Type()).Interface()
			}
			if got.Field(i).Interface() != want {
				t.Errorf("%s: %s is %v: %s", name, field, got.Field(i), c.reason)
			}
		}
	}
}
