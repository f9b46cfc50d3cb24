package driversdk

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/optest"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A secret that is not sealed with the key that was given is refused here: the manager
// has refused nothing, and the text says how to fix it.
func TestServe_WrongPin(t *testing.T) {
	t.Parallel()
	pin := optest.NewKey(t).Public()
	w := start(t, &testDriver{}, func(c *Config) { c.ControlPlaneKeys = map[string]string{testCluster: pin} })
	got := w.ask(create(machine("m1"), &driverv1.ClassReference{
		Class:  w.store.setClass("c", "1", `{"size":"s"}`),
		Secret: w.store.setSecret("s", "1", map[string]string{"k": "v"}),
	})).result().GetStatus()
	if got.GetCode() != Unauthenticated {
		t.Errorf("want %v, have %v", Unauthenticated, got)
	}
	for _, word := range []string{"secret ns/s is needed", "the answer cannot be trusted", "is known by key " + pin, "--control-plane-key"} {
		if !strings.Contains(got.GetMessage(), word) {
			t.Errorf("want a text that says %q, have %q", word, got.GetMessage())
		}
	}
}

// A class says which versions it and its secrets have.
func TestServe_NamesVersions(t *testing.T) {
	t.Parallel()
	d := &testDriver{}
	w := start(t, d, nil)
	got := w.ask(create(machine("m1"), &driverv1.ClassReference{
		Class:             w.store.setClass("c", "1", `{"size":"s"}`),
		Secret:            w.store.setSecret("s", "2", map[string]string{"k": "v"}),
		CredentialsSecret: w.store.setSecret("t", "3", map[string]string{"k": "w"}),
	})).result().GetStatus()
	if got.GetCode() != OK {
		t.Fatal(got)
	}
	class := d.last(t).Class
	if class.UID != "uid-c" || class.ResourceVersion != "1" {
		t.Errorf("class %s in version %s", class.UID, class.ResourceVersion)
	}
	want := []SecretReference{{"ns", "s", "uid-s", "2"}, {"ns", "t", "uid-t", "3"}}
	if diff := cmp.Diff(want, []SecretReference{class.SecretRef, class.CredentialsSecretRef}); diff != "" {
		t.Errorf("secrets (-want +got):\n%s", diff)
	}
}

func TestFetchError(t *testing.T) {
	t.Parallel()
	ref := &driverv1.ObjectReference{Namespace: "ns", Name: "s"}
	for name, tc := range map[string]struct {
		reason string
		err    error
		code   Code
		text   string
	}{
		"gone":            {"must not look like a machine that is gone", bus.Errorf(NotFound, "no"), FailedPrecondition, "the manager refused secret ns/s: no"},
		"unauthenticated": {"the manager's own word", bus.Errorf(Unauthenticated, "who are you"), Unauthenticated, "the manager refused secret ns/s: who are you"},
		"untrusted": {
			"not the manager's word",
			bus.Errorf(Unauthenticated, "%w: x", bus.ErrUntrusted),
			Unauthenticated, "secret ns/s is needed: the answer cannot be trusted: x",
		},
		"odd": {"what has no meaning here", bus.Errorf(DataLoss, "lost"), Internal, "the manager refused secret ns/s: lost"},
	} {
		if err := fetchError("secret", ref, tc.err); CodeOf(err) != tc.code || err.Error() != tc.text {
			t.Errorf("%s: want %v %q, have %v %q: %s", name, tc.code, tc.text, CodeOf(err), err, tc.reason)
		}
	}
}
