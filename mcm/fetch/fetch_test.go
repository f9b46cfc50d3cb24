package fetch_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/bootstrap"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/fetch"
	"github.com/machinebus/machinebus/mcm/kubetest"
	"github.com/machinebus/machinebus/mcm/machine"
	"github.com/machinebus/machinebus/mcm/machineclass"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const clusterName = "default"

var (
	apiServer *rest.Config // of the API server that all tests share
	scheme    = kubetest.Scheme()
)

func TestMain(m *testing.M) {
	kubetest.Main(m, kubetest.Environment(), func(cfg *rest.Config) error {
		apiServer = cfg

		return nil
	})
}

// A rig is a namespace with a class and its secrets, and a manager's side of a
// bus that serves them.
type rig struct {
	client.Client

	namespace string
	srv       *embedded.Server
	key       *bus.SealKey
	flying    flying
	objects   cache.Cache // the manager's
	removed   *machineclass.Removed
}

// flying is the one operation under way; a dispatcher needs more to begin one.
type flying struct {
	provider, id string
	uid          types.UID
}

func (f flying) InFlight(provider, id string, uid types.UID) bool {
	return f == flying{provider: provider, id: id, uid: uid}
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{srv: bustest.Server(t, embedded.Options{}), flying: flying{"virtual", "u1.create.0", "u1"}}
	r.Client, r.namespace = kubetest.Namespace(t, apiServer)
	for _, o := range []client.Object{
		r.secret("boot"), r.secret("keys"), r.secret("other"), r.secret("seal"), r.class("small", "Virtual"), r.class("foreign", "aws"),
		r.greedy("nosy", "kube-system", "boot"), r.greedy("thief", r.namespace, "seal"),
	} {
		if err := r.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	objects, err := cache.New(apiServer, cache.Options{
		Scheme: scheme, DefaultNamespaces: map[string]cache.Config{r.namespace: {}},
	})
	if err != nil {
		t.Fatal(err)
	}
	conn := bustest.Connect(t, bus.Config{URLs: []string{r.srv.URL()}, Name: "mcm"})
	announcer, err := bus.NewAnnouncer(conn, clusterName)
	if err != nil {
		t.Fatal(err)
	}
	r.objects, r.removed = objects, machineclass.NewRemoved(objects)
	handler := &fetch.Handler{
		Reader: objects, Operations: r.flying, Live: r.Client, Removed: r.removed,
		Reserved: client.ObjectKey{Namespace: r.namespace, Name: "seal"}, UnderWay: machine.UnderWay,
	}
	ctx := startCache(t, objects)
	if err := handler.AnnounceChanges(ctx, objects, announcer); err != nil {
		t.Fatal(err)
	}
	if err := r.removed.Watch(ctx, objects); err != nil {
		t.Fatal(err)
	}
	if !objects.WaitForCacheSync(ctx) {
		t.Fatal("the caches do not fill")
	}
	if r.key, err = bus.NewSealKey(); err != nil {
		t.Fatal(err)
	}
	server, err := bus.ServeFetches(conn, clusterName, r.key, handler, bustest.Quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)

	return r
}

// startCache runs a cache until the test ends, and returns the context that ends then.
func startCache(t *testing.T, c cache.Cache) context.Context {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})

	return ctx
}

// seen waits until the manager has seen an object.
func (r *rig) seen(t *testing.T, o client.Object) {
	t.Helper()
	bustest.Eventually(t, "object in the cache", func() bool {
		copied, ok := o.DeepCopyObject().(client.Object)

		return ok && r.objects.Get(t.Context(), client.ObjectKeyFromObject(o), copied) == nil
	})
}

func (r *rig) secret(name string) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: name},
		Data:       map[string][]byte{"userData": []byte("boot " + name)},
	}
}

func (r *rig) class(name, provider string) *v1alpha1.MachineClass {
	return &v1alpha1.MachineClass{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: name, Labels: map[string]string{"l": "v"}},
		Provider:   provider, ProviderSpec: runtime.RawExtension{Raw: []byte(`{"size":"s"}`)},
		SecretRef:            &corev1.SecretReference{Namespace: r.namespace, Name: "boot"},
		CredentialsSecretRef: &corev1.SecretReference{Name: "keys"}, // in the class's namespace
		NodeTemplate: &v1alpha1.NodeTemplate{
			InstanceType: "s", Region: "r", Zone: "z", Architecture: new("arm64"),
			Capacity: corev1.ResourceList{"cpu": resource.MustParse("2"), "gpu": resource.MustParse("0"), "memory": resource.MustParse("4Gi")},
		},
	}
}

// greedy is a class that refers to a secret which it must not have.
func (r *rig) greedy(name, namespace, secret string) *v1alpha1.MachineClass {
	class := r.class(name, "virtual")
	class.SecretRef = &corev1.SecretReference{Namespace: namespace, Name: secret}

	return class
}

func (r *rig) ref(name string) *driverv1.ObjectReference {
	return &driverv1.ObjectReference{Namespace: r.namespace, Name: name}
}

// driver is the asking side of a provider's driver.
func (r *rig) driver(t *testing.T, provider string) *bus.FetchClient {
	t.Helper()
	conn := bustest.Connect(t, bus.Config{
		URLs: []string{r.srv.URL()}, Name: "driver", InboxPrefix: bus.InboxPrefix(provider),
	})
	c, err := bus.NewFetchClient(conn, provider, map[string]string{clusterName: r.key.Public()}, bustest.Quiet())
	if err != nil {
		t.Fatal(err)
	}

	return c
}

func TestClass(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	got, err := r.driver(t, "virtual").Class(t.Context(), clusterName, r.ref("small"))
	if err != nil {
		t.Fatal(err)
	}
	want := &driverv1.Class{
		Reference: r.ref("small"), Provider: "virtual", ProviderSpec: []byte(`{"size":"s"}`), Labels: map[string]string{"l": "v"},
		NodeTemplate: &driverv1.ClassNodeTemplate{
			InstanceType: "s", Region: "r", Zone: "z", Architecture: "arm64",
			Capacity: map[string]string{"cpu": "2", "gpu": "0", "memory": "4Gi"},
		},
	}
	if got.GetReference().GetUid() == "" || got.GetReference().GetResourceVersion() == "" {
		t.Errorf("reference %v lacks uid or version", got.GetReference())
	}
	diff := cmp.Diff(want, got, protocmp.Transform(),
		protocmp.IgnoreFields(&driverv1.ObjectReference{}, "uid", "resource_version"))
	if diff != "" {
		t.Errorf("class (-want +got):\n%s", diff)
	}
	for name, c := range map[string]struct {
		reason, provider, namespace, class string
	}{
		"other provider's":  {"a driver learns nothing of others", "virtual", r.namespace, "foreign"},
		"asked by another":  {"nor do they of it", "aws", r.namespace, "small"},
		"missing":           {"there is none", "virtual", r.namespace, "huge"},
		"missing namespace": {"none there either", "virtual", r.namespace, ""},
	} {
		ref := &driverv1.ObjectReference{Namespace: c.namespace, Name: c.class}
		_, err := r.driver(t, c.provider).Class(t.Context(), clusterName, ref)
		if dispatch.CodeOf(err) != dispatch.NotFound {
			t.Errorf("%s: error is %v, want NotFound: %s", name, err, c.reason)
		}
	}
}

func TestSecret(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for name, c := range map[string]struct {
		reason, provider, class, namespace, secret string
		code                                       dispatch.Code
	}{
		"secretRef":            {"the class refers to it", "virtual", "small", r.namespace, "boot", dispatch.OK},
		"credentialsSecretRef": {"the class's namespace counts", "virtual", "small", r.namespace, "keys", dispatch.OK},
		"not referred to":      {"no class does", "virtual", "small", r.namespace, "other", dispatch.PermissionDenied},
		"same name elsewhere":  {"a namespace is part of the name", "virtual", "small", "kube-system", "boot", dispatch.PermissionDenied},
		"other's class":        {"its secrets are the other's as well", "virtual", "foreign", r.namespace, "boot", dispatch.NotFound},
		"asked by another":     {"the class is not its own", "aws", "small", r.namespace, "boot", dispatch.NotFound},
		"elsewhere": {
			"who writes the class may not read that namespace", "virtual", "nosy", "kube-system", "boot", dispatch.PermissionDenied,
		},
		"control plane's key": {"it opens all that is sealed", "virtual", "thief", r.namespace, "seal", dispatch.PermissionDenied},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := r.driver(t, c.provider).Secret(t.Context(), clusterName, r.ref(c.class),
				&driverv1.ObjectReference{Namespace: c.namespace, Name: c.secret})
			if dispatch.CodeOf(err) != c.code {
				t.Fatalf("error is %v, want %v: %s", err, c.code, c.reason)
			}
			if err == nil && string(got.GetData()["userData"]) != "boot "+c.secret {
				t.Errorf("data are %v", got.GetData())
			}
		})
	}
	t.Run("missing", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		if err := r.Delete(t.Context(), r.secret("keys")); err != nil {
			t.Fatal(err)
		}
		d := r.driver(t, "virtual")
		bustest.Eventually(t, "NotFound for a secret that is gone", func() bool {
			_, err := d.Secret(t.Context(), clusterName, r.ref("small"), r.ref("keys"))

			return dispatch.CodeOf(err) == dispatch.NotFound
		})
	})
}

func TestBootstrap(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for name, c := range map[string]struct {
		reason, provider, id, uid string
		code                      dispatch.Code
	}{
		"under way":       {"its machine is about to boot", "virtual", "u1.create.0", "u1", dispatch.OK},
		"other provider":  {"the operation is not its own", "aws", "u1.create.0", "u1", dispatch.PermissionDenied},
		"other operation": {"it has ended, or never was", "virtual", "u1.create.1", "u1", dispatch.PermissionDenied},
		"a deletion":      {"it boots nothing", "virtual", "u1.delete.0", "u1", dispatch.PermissionDenied},
		"other machine":   {"the operation is of another one", "virtual", "u1.create.0", "u2", dispatch.PermissionDenied},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := r.driver(t, c.provider).Bootstrap(t.Context(), clusterName, c.id,
				&driverv1.Machine{Namespace: r.namespace, Name: "m1", Uid: c.uid})
			if dispatch.CodeOf(err) != c.code {
				t.Fatalf("error is %v, want %v: %s", err, c.code, c.reason)
			}
			if err == nil && !cmp.Equal(got, map[string]string{fetch.PlaceholderMachineName: "m1"}) {
				t.Errorf("values are %v", got)
			}
		})
	}
}

// Fetches go to any manager; only the leading one begins operations.
func TestBootstrapAtAnotherManager(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	m := &v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: r.namespace, Name: "m1",
			Annotations: map[string]string{v1alpha1.AnnotationKeyOperation: `{"settled":3,"operation":"create"}`},
		},
		Spec: v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: "MachineClass", Name: "small"}},
	}
	idle := m.DeepCopy()
	idle.Name, idle.Annotations[v1alpha1.AnnotationKeyOperation] = "m2", `{"settled":3}`
	fresh := m.DeepCopy()
	fresh.Name, fresh.Annotations[v1alpha1.AnnotationKeyOperation] = "m4", `{"settled":1,"operation":"initialize"}`
	running := fresh.DeepCopy()
	running.Name = "m5"
	for _, o := range []client.Object{m, idle, fresh, running} {
		if err := r.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	running.Status.CurrentStatus.Phase = v1alpha1.MachineRunning
	if err := r.Status().Update(t.Context(), running); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		reason, provider, id, machine string
		uid                           types.UID
		code                          dispatch.Code
	}{
		"initialize": {"it has begun", "virtual", string(fresh.UID) + ".initialize.1", "m4", fresh.UID, dispatch.OK},
		"initialized": {
			"the phase says that it has ended", "virtual", string(running.UID) + ".initialize.1", "m5", running.UID, dispatch.PermissionDenied,
		},
		"under way":       {"the journal says so", "virtual", string(m.UID) + ".create.3", "m1", m.UID, dispatch.OK},
		"other provider":  {"the class is not its own", "aws", string(m.UID) + ".create.3", "m1", m.UID, dispatch.PermissionDenied},
		"other operation": {"that one was settled", "virtual", string(m.UID) + ".create.2", "m1", m.UID, dispatch.PermissionDenied},
		"other uid":       {"an earlier machine of the name", "virtual", "u9.create.3", "m1", "u9", dispatch.PermissionDenied},
		"none":            {"nothing is under way", "virtual", string(idle.UID) + ".create.3", "m2", idle.UID, dispatch.PermissionDenied},
		"no machine":      {"there is none", "virtual", string(m.UID) + ".create.3", "m3", m.UID, dispatch.PermissionDenied},
	} {
		_, err := r.driver(t, c.provider).Bootstrap(t.Context(), clusterName, c.id,
			&driverv1.Machine{Namespace: r.namespace, Name: c.machine, Uid: string(c.uid)})
		if dispatch.CodeOf(err) != c.code {
			t.Errorf("%s: error is %v, want %v: %s", name, err, c.code, c.reason)
		}
	}
}

// What boots from user data must be let into the cluster as its node.
func TestBootstrapToken(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	m := &v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "m1"},
		Spec:       v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: "MachineClass", Name: "small"}},
	}
	if err := r.Create(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	id := dispatch.OperationID(m.UID, dispatch.Create, 0)
	h := &fetch.Handler{
		Reader: r.Client, Operations: flying{provider: "virtual", id: id, uid: m.UID},
		Tokens:          &bootstrap.Tokens{Target: r.Client},
		CreationTimeout: func(m *v1alpha1.Machine) time.Duration { return machine.CreationTimeout(m, time.Hour) },
	}
	ask := func(uid types.UID) (map[string]string, error) {
		h.Operations = flying{provider: "virtual", id: id, uid: uid}
		content, err := h.Bootstrap(t.Context(), "virtual", &driverv1.FetchBootstrapRequest{
			OperationId: id, Namespace: r.namespace, Machine: "m1", MachineUid: string(uid),
		})

		return content.GetValues(), err
	}
	first, err := ask(m.UID)
	if err != nil {
		t.Fatal(err)
	}
	if len(first[bootstrap.Placeholder]) != len("abcdef.0123456789abcdef") || first[fetch.PlaceholderMachineName] != "m1" {
		t.Errorf("values are %d long for %v", len(first[bootstrap.Placeholder]), first[fetch.PlaceholderMachineName])
	}
	if again, err := ask(m.UID); err != nil || !cmp.Equal(first, again) {
		t.Errorf("asked again, the values differ (%v): a create that is tried again would boot from others", err)
	}
	m.Finalizers = []string{"test/stays"}
	if err := errors.Join(r.Update(t.Context(), m), r.Delete(t.Context(), m)); err != nil {
		t.Fatal(err)
	}
	if _, err := ask(m.UID); dispatch.CodeOf(err) != dispatch.FailedPrecondition {
		t.Errorf("a machine that is being deleted got %v, want FailedPrecondition", err)
	}
	if _, err := ask("earlier"); dispatch.CodeOf(err) != dispatch.NotFound {
		t.Errorf("an earlier machine of that name got %v, want NotFound", err)
	}
}

// A stop is what ends an operation while a token is made for it.
type stop struct{ flying, ended bool }

func (s *stop) InFlight(string, string, types.UID) bool { return s.flying && !s.ended }

// slowTarget is a target cluster where a token's Create is stored late.
type slowTarget struct {
	client.Client

	meanwhile func()
	err       error // of the Create, which was stored all the same
}

func (s slowTarget) Create(ctx context.Context, o client.Object, opts ...client.CreateOption) error {
	s.meanwhile()

	return errors.Join(s.Client.Create(ctx, o, opts...), s.err)
}

// Who removes a machine looks for its token once, when no operation is under way any
// more: one that is stored only after that would be valid for as long as it lasts.
func TestBootstrapTokenOutlivesNoMachine(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for name, tc := range map[string]struct {
		reason                string
		flying, ends, deletes bool
		finalizer             string
		created               error
		kept                  bool
	}{
		"gone":          {reason: "no deletion looks for it any more", flying: true, ends: true, deletes: true},
		"elsewhere":     {reason: "the leading manager has withdrawn it", deletes: true},
		"going":         {reason: "it may have been looked for", flying: true, ends: true, deletes: true, finalizer: "test/stays"},
		"unconfirmed":   {reason: "an error does not say that it was not stored", flying: true, ends: true, deletes: true, created: errors.New("slow")},
		"still flying":  {reason: "it will be withdrawn after the operation", flying: true, deletes: true, finalizer: "test/stays", kept: true},
		"next attempt":  {reason: "the next create boots from the same", flying: true, ends: true, kept: true},
		"led elsewhere": {reason: "the machine is there", kept: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := &v1alpha1.Machine{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: r.namespace, GenerateName: "outlived-",
					Annotations: map[string]string{v1alpha1.AnnotationKeyOperation: `{"settled":3,"operation":"create"}`},
				},
				Spec: v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: "MachineClass", Name: "small"}},
			}
			if tc.finalizer != "" {
				m.Finalizers = []string{tc.finalizer}
			}
			if err := r.Create(t.Context(), m); err != nil {
				t.Fatal(err)
			}
			s := &stop{flying: tc.flying}
			meanwhile := func() {
				s.ended = tc.ends
				if tc.deletes {
					if err := r.Delete(t.Context(), m); err != nil {
						t.Error(err)
					}
				}
			}
			h := &fetch.Handler{
				Reader: r.Client, Live: r.Client, Operations: s, UnderWay: machine.UnderWay,
				Tokens:          &bootstrap.Tokens{Target: slowTarget{r.Client, meanwhile, tc.created}},
				CreationTimeout: func(*v1alpha1.Machine) time.Duration { return time.Hour },
			}
			_, err := h.Bootstrap(t.Context(), "virtual", &driverv1.FetchBootstrapRequest{
				OperationId: string(m.UID) + ".create.3", Namespace: m.Namespace, Machine: m.Name, MachineUid: string(m.UID),
			})
			tokens := &corev1.SecretList{}
			of := client.MatchingLabels{bootstrap.LabelKeyMachineUID: string(m.UID)}
			if err := r.List(t.Context(), tokens, client.InNamespace(metav1.NamespaceSystem), of); err != nil {
				t.Fatal(err)
			}
			if (len(tokens.Items) != 0) != tc.kept || (err == nil) != tc.kept {
				t.Errorf("%d tokens, error %v; want one and none: %t: %s", len(tokens.Items), err, tc.kept, tc.reason)
			}
		})
	}
}

// Where no tokens are made, user data that asks for one must not reach an instance.
func TestBootstrapWithoutTokens(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for name, c := range map[string]struct {
		reason, userData string
		code             dispatch.Code
	}{
		"no-placeholder": {"nothing is asked for", "#!/bin/sh", dispatch.OK},
		"name":           {"names are known", "hostname: <<MACHINE_NAME>>", dispatch.OK},
		"token":          {"its instance would never join", "token: <<BOOTSTRAP_TOKEN>>", dispatch.FailedPrecondition},
		"escaped":        {"the same in a URL", "t=%3C%3CBOOTSTRAP_TOKEN%3E%3E", dispatch.FailedPrecondition},
	} {
		secret, class := r.secret("boot-"+name), r.class(name, "virtual")
		secret.Data["userData"] = []byte(c.userData)
		class.SecretRef, class.CredentialsSecretRef = class.CredentialsSecretRef, &corev1.SecretReference{Name: secret.Name}
		m := &v1alpha1.Machine{
			ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: name},
			Spec:       v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: "MachineClass", Name: name}},
		}
		for _, o := range []client.Object{secret, class, m} {
			if err := r.Create(t.Context(), o); err != nil {
				t.Fatal(err)
			}
		}
		id := dispatch.OperationID(m.UID, dispatch.Create, 0)
		h := &fetch.Handler{Reader: r.Client, Operations: flying{provider: "virtual", id: id, uid: m.UID}}
		content, err := h.Bootstrap(t.Context(), "virtual", &driverv1.FetchBootstrapRequest{
			OperationId: id, Namespace: r.namespace, Machine: name, MachineUid: string(m.UID),
		})
		if dispatch.CodeOf(err) != c.code {
			t.Errorf("%s: error is %v, want %v: %s", name, err, c.code, c.reason)
		}
		if err == nil && !cmp.Equal(content.GetValues(), map[string]string{fetch.PlaceholderMachineName: name}) {
			t.Errorf("%s: values are %v", name, content.GetValues())
		}
	}
}

func TestChanged(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	raw := bustest.Raw(t, r.srv.URL())
	type notice struct{ Provider, Kind, Name string }
	var mu sync.Mutex
	heard := map[notice]int{}
	for _, provider := range []string{"virtual", "aws"} {
		conn := bustest.Connect(t, bus.Config{URLs: []string{r.srv.URL()}, Name: "driver", InboxPrefix: bus.InboxPrefix(provider)})
		server, err := replica.New(conn, replica.Config{
			Provider: provider, Logger: bustest.Quiet(), DrainTimeout: time.Millisecond,
			Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_LIST},
			OnChanged: func(_ string, c *driverv1.Changed) {
				mu.Lock()
				defer mu.Unlock()
				heard[notice{provider, c.GetKind().String(), c.GetReference().GetName()}]++
			},
		}, replica.HandlerFunc(func(context.Context, *replica.Task) *driverv1.Result { return nil }))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- server.Run(ctx) }()
		t.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		// A discovery answer shows that the replica has subscribed.
		bustest.Eventually(t, "replica of "+provider, func() bool {
			_, err := raw.Request("$SRV.PING.mcm-driver-"+provider, nil, time.Second)

			return err == nil
		})
	}
	touch := func(o client.Object) {
		patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"touched":"yes"}}}`))
		if err := r.Patch(t.Context(), o, patch); err != nil {
			t.Fatal(err)
		}
	}
	touch(r.secret("other")) // of no class: not announced
	touch(r.class("foreign", ""))
	touch(r.secret("boot"))
	count := func() int {
		mu.Lock()
		defer mu.Unlock()

		return len(heard)
	}
	// Only then: providers of a secret are those of the classes there are.
	bustest.Eventually(t, "notices of the secret and of a class", func() bool { return count() == 3 })
	if err := r.Delete(t.Context(), r.class("small", "")); err != nil {
		t.Fatal(err)
	}
	want := map[notice]int{
		{"aws", "KIND_CLASS", "foreign"}: 1, {"virtual", "KIND_CLASS", "small"}: 1,
		{"aws", "KIND_SECRET", "boot"}: 1, {"virtual", "KIND_SECRET", "boot"}: 1,
	}
	bustest.Eventually(t, "notice of the deleted class", func() bool { return count() == 4 })
	mu.Lock()
	defer mu.Unlock()
	if diff := cmp.Diff(want, heard); diff != "" {
		t.Errorf("notices (-want +got):\n%s", diff)
	}
}

func TestControlPlaneKey(t *testing.T) {
	t.Parallel()
	c, namespace := kubetest.Namespace(t, apiServer)
	name := client.ObjectKey{Namespace: namespace, Name: "key"}
	const managers = 8
	keys := make(chan string, managers)
	var all sync.WaitGroup
	for range managers {
		all.Go(func() {
			key, err := fetch.ControlPlaneKey(t.Context(), c, name)
			if err != nil {
				t.Error(err)

				return
			}
			keys <- key.Public()
		})
	}
	all.Wait()
	close(keys)
	different := map[string]bool{}
	for key := range keys {
		different[key] = true
	}
	if len(different) != 1 {
		t.Errorf("%d managers have %d different keys", managers, len(different))
	}
}

func TestControlPlaneKeyUnreadable(t *testing.T) {
	t.Parallel()
	c, namespace := kubetest.Namespace(t, apiServer)
	for name, data := range map[string]map[string][]byte{"garbage": {"seed": []byte("hush")}, "empty": nil} {
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Data: data}
		if err := c.Create(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
		_, err := fetch.ControlPlaneKey(t.Context(), c, client.ObjectKeyFromObject(secret))
		if err == nil {
			t.Errorf("%s: no error", name)

			continue
		}
		want := fmt.Sprintf("Secret %s/%s, key \"seed\": not the seed of a curve key (an nkeys seed that starts with SX) "+
			"(restore it from a backup; or delete the Secret, restart mcm, give pinned drivers the new public key, and restart all other drivers)", namespace, name)
		if err.Error() != want {
			t.Errorf("%s: error is %q, want %q", name, err, want)
		}
	}
}
