package e2e

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestMistakes makes mistakes of users, and checks the errors that they see. Nothing may be
// created or left behind.
func TestMistakes(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	e.startDrivers(1, manager.NATSURL, tap)
	cases := map[string]struct {
		reason string
		class  string
		make   func(class string)
		wants  []string
		// classWants: the driver's own look at the class says so, machines or not.
		classWants string
		// sent: the driver has had the request, so only the driver can report that
		// there is nothing to delete, and it must be able to read the class.
		sent bool
		// mend must be enough, without touching the machine.
		mend func(class string)
	}{
		"WrongField": {
			reason: "a field that the driver does not know is a typing mistake, not a wish to be ignored",
			class:  "wrong-field",
			make: func(class string) {
				e.must(e.kube.Create(e.ctx(), e.newSecret(class)))
				e.must(e.kube.Create(e.ctx(), e.newClass(class, map[string]any{"machineTyp": "small"})))
			},
			wants:      []string{"machineTyp", "InvalidArgument"},
			classWants: "unknown field providerSpec.machineTyp",
			sent:       true,
			mend: func(class string) {
				mended, old := e.newClass(class, nil), &v1alpha1.MachineClass{}
				e.must(e.kube.Get(e.ctx(), client.ObjectKeyFromObject(mended), old))
				mended.ResourceVersion = old.ResourceVersion
				e.must(e.kube.Update(e.ctx(), mended))
			},
		},
		"MissingClass": {
			reason: "the class may be applied after the machine",
			class:  "missing-class",
			make:   func(string) {},
			wants:  []string{"missing-class", "does not exist"},
			mend: func(class string) {
				e.must(e.kube.Create(e.ctx(), e.newSecret(class)))
				e.must(e.kube.Create(e.ctx(), e.newClass(class, nil)))
			},
		},
		"MissingSecret": {
			reason: "the secret may be applied after the class",
			class:  "missing-secret",
			make:   func(class string) { e.must(e.kube.Create(e.ctx(), e.newClass(class, nil))) },
			wants:  []string{"missing-secret", "does not exist"},
			mend:   func(class string) { e.must(e.kube.Create(e.ctx(), e.newSecret(class))) },
		},
		"NoUserData": {
			reason: "an instance without user data could not join",
			class:  "no-user-data",
			make: func(class string) {
				secret := e.newSecret(class)
				delete(secret.StringData, "userData")
				e.must(e.kube.Create(e.ctx(), secret))
				e.must(e.kube.Create(e.ctx(), e.newClass(class, nil)))
			},
			wants: []string{"userdata field not found"},
			mend: func(class string) {
				mended, old := e.newSecret(class), &corev1.Secret{}
				e.must(e.kube.Get(e.ctx(), client.ObjectKeyFromObject(mended), old))
				mended.ResourceVersion = old.ResourceVersion
				e.must(e.kube.Update(e.ctx(), mended))
			},
		},
	}
	mended := 0
	for name, c := range cases {
		c.make(c.class)
		if c.classWants != "" {
			e.waitEventOf(v1alpha1.KindMachineClass, c.class, corev1.EventTypeWarning, c.classWants)
		}
		machines := e.createMachines(2, c.class)
		for _, machine := range machines {
			for _, text := range c.wants {
				e.waitEvent(machine, corev1.EventTypeWarning, text)
			}
			e.eventually("the phase shows that the instance could not be created", func(ctx context.Context) error {
				return e.inPhase(ctx, machine, v1alpha1.MachineCrashLoopBackOff)
			})
		}
		e.wantInstances(mended)
		if !c.sent {
			e.deleteAll(machines[0]) // as it is, with whatever is missing
			machines = machines[1:]
		}
		c.mend(c.class)
		e.waitRunning(machines...)
		mended += len(machines)
		e.deleteAll(machines...)
		if t.Failed() {
			t.Fatalf("%s: %s", name, c.reason)
		}
	}
	e.wantInstances(mended)
}
