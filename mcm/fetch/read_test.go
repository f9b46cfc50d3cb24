package fetch_test

import (
	"bytes"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/bootstrap"
	"github.com/machinebus/machinebus/mcm/fetch"
	"github.com/machinebus/machinebus/mcm/kubetest"
	"github.com/machinebus/machinebus/mcm/machine"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A manager that does not lead hears later of what the leading one has referred to.
func TestBehind(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	proxy := kubetest.NewProxy(t, apiServer)
	objects, err := cache.New(proxy.Config(), cache.Options{
		Scheme: scheme, DefaultNamespaces: map[string]cache.Config{r.namespace: {}},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx := startCache(t, objects)
	for _, o := range []client.Object{&v1alpha1.Machine{}, &v1alpha1.MachineClass{}, &corev1.Secret{}} {
		if _, err := objects.GetInformer(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	if !objects.WaitForCacheSync(ctx) {
		t.Fatal("the caches do not fill")
	}
	proxy.Hold("machines", "machineclasses", "secrets")
	t.Cleanup(func() { proxy.Release("machines", "machineclasses", "secrets") })
	h := &fetch.Handler{
		Reader: objects, Operations: r.flying, Live: r.Client, UnderWay: machine.UnderWay, Tokens: &bootstrap.Tokens{Target: r.Client},
		CreationTimeout: func(*v1alpha1.Machine) time.Duration { return time.Hour },
	}

	boot, small, fresh := r.secret("fresh-boot"), &v1alpha1.MachineClass{}, r.class("fresh", "virtual")
	fresh.SecretRef.Name = boot.Name
	m := &v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: r.namespace, Name: "fresh", Annotations: map[string]string{v1alpha1.AnnotationKeyOperation: `{"settled":3,"operation":"create"}`},
		},
		Spec: v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: "MachineClass", Name: fresh.Name}},
	}
	for _, o := range []client.Object{boot, fresh, m} {
		if err := r.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Get(t.Context(), client.ObjectKey{Namespace: r.namespace, Name: "small"}, small); err != nil {
		t.Fatal(err)
	}
	small.ProviderSpec.Raw = []byte(`{"size":"m"}`)
	if err := r.Update(t.Context(), small); err != nil {
		t.Fatal(err)
	}

	for _, want := range []*v1alpha1.MachineClass{small, fresh} {
		got, err := h.Class(t.Context(), "virtual", &driverv1.FetchClassRequest{Class: &driverv1.ObjectReference{
			Namespace: want.Namespace, Name: want.Name, Uid: string(want.UID), ResourceVersion: want.ResourceVersion,
		}})
		if err != nil || !bytes.Equal(got.GetProviderSpec(), want.ProviderSpec.Raw) {
			t.Errorf("class %s is %s, %v, want %s", want.Name, got.GetProviderSpec(), err, want.ProviderSpec.Raw)
		}
	}
	secret, err := h.Secret(t.Context(), "virtual", &driverv1.FetchSecretRequest{Class: r.ref("fresh"), Secret: r.ref("fresh-boot")})
	if err != nil || secret.GetReference().GetUid() != string(boot.UID) {
		t.Errorf("secret is %v, %v, want the new one", secret.GetReference(), err)
	}
	values, err := h.Bootstrap(t.Context(), "virtual", &driverv1.FetchBootstrapRequest{
		OperationId: string(m.UID) + ".create.3", Namespace: m.Namespace, Machine: m.Name, MachineUid: string(m.UID),
	})
	if err != nil || values.GetValues()[bootstrap.Placeholder] == "" {
		t.Errorf("bootstrap values: %v, want a token", err)
	}
}
