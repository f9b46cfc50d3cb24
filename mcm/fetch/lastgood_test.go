package fetch_test

import (
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/lastgood"
)

// A driver that refuses an edited class is asked to delete with the version it
// accepted, and with that version's secrets.
func TestLastAcceptedClass(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	class := r.class("small", "Virtual")
	if err := r.Get(t.Context(), client.ObjectKeyFromObject(class), class); err != nil {
		t.Fatal(err)
	}
	if _, err := lastgood.Accept(class); err != nil {
		t.Fatal(err)
	}
	class.ProviderSpec.Raw, class.Provider, class.SecretRef, class.CredentialsSecretRef = []byte(`{"size":7}`), "aws", nil, nil
	if err := r.Update(t.Context(), class); err != nil {
		t.Fatal(err)
	}
	former, err := lastgood.LastAccepted(class)
	if err != nil {
		t.Fatal(err)
	}
	virtual, aws := r.driver(t, "virtual"), r.driver(t, "aws")
	ref := r.ref("small")
	ref.ResourceVersion = former.ResourceVersion
	bustest.Eventually(t, "class as it was accepted", func() bool {
		got, err := virtual.Class(t.Context(), clusterName, ref)

		return err == nil && string(got.GetProviderSpec()) == `{"size":"s"}` && got.GetReference().GetResourceVersion() == ref.GetResourceVersion()
	})
	if got, err := virtual.Secret(t.Context(), clusterName, ref, r.ref("boot")); err != nil || len(got.GetData()["userData"]) == 0 {
		t.Errorf("secret of the accepted class is %v", err)
	}
	// What a version names is that version's: neither provider gets the other's.
	if _, err := aws.Class(t.Context(), clusterName, ref); dispatch.CodeOf(err) != dispatch.NotFound {
		t.Errorf("former class for the provider of now: %v", err)
	}
	if _, err := virtual.Class(t.Context(), clusterName, r.ref("small")); dispatch.CodeOf(err) != dispatch.NotFound {
		t.Errorf("class as it stands for the provider of before: %v", err)
	}
	if got, err := aws.Class(t.Context(), clusterName, r.ref("small")); err != nil || string(got.GetProviderSpec()) != `{"size":7}` ||
		len(got.GetAnnotations()) != 0 {
		t.Errorf("class as it stands: %v, %v", got, err)
	}
	if _, err := aws.Secret(t.Context(), clusterName, r.ref("small"), r.ref("boot")); dispatch.CodeOf(err) != dispatch.PermissionDenied {
		t.Errorf("secret that only the former class refers to: %v", err)
	}
}

// A class or secret removed by force is served for the deletion of its machines, to
// whom it was served before.
func TestRemovedClass(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	m := &v1alpha1.Machine{Spec: v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: "MachineClass", Name: "small"}}}
	m.Namespace, m.Name = r.namespace, "m1"
	if err := r.Create(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	r.seen(t, m)
	for _, o := range []client.Object{r.secret("boot"), r.class("small", "")} {
		if err := r.Delete(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	bustest.Eventually(t, "class and secret removed", func() bool {
		key := client.ObjectKey{Namespace: r.namespace, Name: "small"}

		return r.removed.Class(key) != nil && r.removed.Secret(client.ObjectKey{Namespace: r.namespace, Name: "boot"}) != nil
	})
	virtual := r.driver(t, "virtual")
	if got, err := virtual.Class(t.Context(), clusterName, r.ref("small")); err != nil || string(got.GetProviderSpec()) != `{"size":"s"}` {
		t.Errorf("removed class is %v, %v", got, err)
	}
	if got, err := virtual.Secret(t.Context(), clusterName, r.ref("small"), r.ref("boot")); err != nil || len(got.GetData()) != 1 {
		t.Errorf("removed secret: %v", err)
	}
	if _, err := r.driver(t, "aws").Secret(t.Context(), clusterName, r.ref("small"), r.ref("boot")); dispatch.CodeOf(err) != dispatch.NotFound {
		t.Errorf("removed secret for another provider: %v", err)
	}
}
