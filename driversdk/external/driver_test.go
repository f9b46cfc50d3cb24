package external_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/driversdk"
	"github.com/machinebus/machinebus/driversdk/external"
)

func testClass() *driversdk.Class[json.RawMessage] {
	return &driversdk.Class[json.RawMessage]{
		Namespace: "ns", Name: "small", UID: "1", ResourceVersion: "7", Labels: map[string]string{"a": "b"},
		Spec:      json.RawMessage(`{"size":"small","kind":"ShelfSpec"}`),
		Secret:    driversdk.Secret{"token": []byte(testToken), "userData": []byte("<<BOOTSTRAP_TOKEN>>")},
		SecretRef: driversdk.SecretReference{Namespace: "ns", Name: "cloud", UID: "2", ResourceVersion: "8"},
	}
}

func request(machine string) *driversdk.Request[json.RawMessage] {
	return &driversdk.Request[json.RawMessage]{
		Machine: driversdk.Machine{Namespace: "ns", Name: machine}, Class: testClass(), UserData: []byte("join as " + machine),
	}
}

func TestDriver_Create(t *testing.T) {
	t.Parallel()
	c := newCloud()
	d := newDriver(c)
	made, err := d.Create(t.Context(), request("m1"))
	if diff := cmp.Diff(&driversdk.Instance{ProviderID: "shelf:///ns/1", NodeName: "m1.shelf.internal"}, made); diff != "" || err != nil {
		t.Fatalf("%v; made (-want +got):\n%s", err, diff)
	}
	if got := c.userData[made.ProviderID]; got != "join as m1" {
		t.Errorf("the instance got user data %q, want the machine's own", got)
	}
	// The answer of the first create was lost.
	again, err := d.Create(t.Context(), request("m1"))
	want := &driversdk.Instance{ProviderID: "shelf:///ns/1", NodeName: "m1", MachineName: "m1"}
	if diff := cmp.Diff(want, again); diff != "" || err != nil || c.made != 1 {
		t.Errorf("%v, %d instances made; found (-want +got):\n%s", err, c.made, diff)
	}
	c.instances["shelf:///ns/twin"] = "m1"
	if _, err := d.Create(t.Context(), request("m1")); driversdk.CodeOf(err) != driversdk.OutOfRange || c.made != 1 {
		t.Errorf("two instances of the name: %v, want OutOfRange", err)
	}
}

func TestDriver_Delete(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason     string
		providerID string
		left       int
	}{
		"by provider id":         {"the usual case", "shelf:///ns/1", 1},
		"by name":                {"the answer of the create was lost", "", 1},
		"absent, by provider id": {"its NotFound is success", "shelf:///ns/9", 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCloud()
			c.instances["shelf:///ns/1"], c.instances["shelf:///ns/2"] = "m1", "m2"
			req := request("m1")
			req.Machine.ProviderID = tc.providerID
			if err := newDriver(c).Delete(t.Context(), req); err != nil || len(c.instances) != tc.left {
				t.Errorf("%s: %v, left %v", tc.reason, err, c.instances)
			}
		})
	}
	c := newCloud()
	if err := newDriver(c).Delete(t.Context(), request("m1")); err != nil {
		t.Errorf("absent, by name: %v", err)
	}
	c.failure = errors.New("rpc error: code = Unavailable desc = the cloud is away")
	if err := newDriver(c).Delete(t.Context(), request("m1")); driversdk.CodeOf(err) != driversdk.Unavailable || err.Error() != "the cloud is away" {
		t.Errorf("the cloud is away: %v (%v)", err, driversdk.CodeOf(err))
	}
}

func TestDriver_List(t *testing.T) {
	t.Parallel()
	c := newCloud()
	c.instances["shelf:///ns/2"], c.instances["shelf:///ns/1"] = "m2", "m1"
	got, err := newDriver(c).List(t.Context(), testClass())
	want := []*driversdk.Instance{
		{ProviderID: "shelf:///ns/1", NodeName: "m1", MachineName: "m1"},
		{ProviderID: "shelf:///ns/2", NodeName: "m2", MachineName: "m2"},
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v; listed (-want +got):\n%s", err, diff)
	}
}

// The revision is the same for one version of class and secrets, and another for the next.
func TestDriver_Revision(t *testing.T) {
	t.Parallel()
	seen := map[int32]string{}
	for name, change := range map[string]func(*driversdk.Class[json.RawMessage]){
		"first":                func(*driversdk.Class[json.RawMessage]) {},
		"class changed":        func(c *driversdk.Class[json.RawMessage]) { c.ResourceVersion = "9" },
		"class made again":     func(c *driversdk.Class[json.RawMessage]) { c.UID = "3" },
		"secret changed":       func(c *driversdk.Class[json.RawMessage]) { c.SecretRef.ResourceVersion = "9" },
		"second secret":        func(c *driversdk.Class[json.RawMessage]) { c.CredentialsSecretRef.ResourceVersion = "8" },
		"version moved fields": func(c *driversdk.Class[json.RawMessage]) { c.UID, c.ResourceVersion = "17", "" },
	} {
		c := newCloud()
		d := newDriver(c)
		for _, machine := range []string{"m1", "m2"} {
			req := request(machine)
			change(req.Class)
			if _, err := d.Create(t.Context(), req); err != nil {
				t.Fatal(err)
			}
		}
		revision := c.revisions[0]
		if c.revisions[1] != revision || revision <= 0 {
			t.Errorf("%s: revisions %v, want one that is positive", name, c.revisions)
		}
		if other, ok := seen[revision]; ok {
			t.Errorf("%s has the revision %d of %s", name, revision, other)
		}
		seen[revision] = name
	}
}

// A caller is a provider that does what a test wants during List.
type caller func(ctx context.Context, class *external.MachineClassMeta, credentials string) error

func (c caller) WithContext(ctx context.Context) external.ExternalDriverProvider {
	return bound{c, ctx}
}

func (c caller) Create(*external.MachineClassMeta, string, string, string) (id, node string, err error) {
	return "", "", errors.ErrUnsupported
}

func (c caller) Delete(*external.MachineClassMeta, string, string) error {
	return errors.ErrUnsupported
}

func (c caller) List(*external.MachineClassMeta, string, string) (map[string]string, error) {
	return nil, errors.ErrUnsupported
}

type bound struct {
	caller

	ctx context.Context
}

func (b bound) List(class *external.MachineClassMeta, credentials, _ string) (map[string]string, error) {
	return nil, b.caller(b.ctx, class, credentials)
}

// TestDriver_Data has a provider ask for what is its own, and for all that is not.
func TestDriver_Data(t *testing.T) {
	t.Parallel()
	var d *external.Driver
	var cancel context.CancelFunc
	var meta external.MachineClassMeta
	secretMeta := external.SecretMeta{SecretName: "cloud", SecretNameSpace: "ns", Revision: 1}
	lists := func(_ context.Context, class *external.MachineClassMeta, credentials string) error {
		meta = *class
		if credentials != "ns/cloud" {
			t.Errorf("credentials are %q", credentials)
		}
		text, err := d.GetMachineClass(&external.MachineClassMeta{Name: class.Name})
		want := `{"apiVersion":"machine.sapcloud.io/v1alpha1","kind":"ShelfMachineClass",` +
			`"metadata":{"name":"small","namespace":"ns","uid":"1","resourceVersion":"7","labels":{"a":"b"}},` +
			`"spec":{"kind":"ShelfSpec","secretRef":{"name":"cloud","namespace":"ns"},"size":"small"}}`
		if diff := cmp.Diff(want, text); diff != "" || err != nil {
			t.Errorf("%v; class (-want +got):\n%s", err, diff)
		}
		secret, err := d.GetSecret(&secretMeta)
		want = `{"apiVersion":"v1","kind":"Secret","metadata":{"name":"cloud","namespace":"ns","uid":"2","resourceVersion":"8"},` +
			`"type":"Opaque","data":{"token":"YS10b2tlbi10aGF0LXN0YXlzLXNlY3JldA==","userData":"PDxCT09UU1RSQVBfVE9LRU4+Pg=="}}`
		if diff := cmp.Diff(want, secret); diff != "" || err != nil {
			t.Errorf("%v; secret (-want +got):\n%s", err, diff)
		}
		for name, other := range map[string]external.SecretMeta{
			"other name":      {SecretName: "other", SecretNameSpace: "ns"},
			"other namespace": {SecretName: "cloud", SecretNameSpace: "kube-system"},
			"no name":         {},
		} {
			wantNothing(t, d, name, &meta, &other)
		}
		for name, other := range map[string]string{
			"other class": strings.Replace(class.Name, "small", "large", 1), "path of a secret": "/api/v1/namespaces/ns/secrets/cloud", "no name": "",
		} {
			if text, err := d.GetMachineClass(&external.MachineClassMeta{Name: other}); err == nil {
				t.Errorf("%s: got %v", name, text)
			}
		}
		cancel()
		wantNothing(t, d, "after the operation", &meta, &secretMeta)

		return nil
	}
	d = external.New(external.ClassType{APIVersion: "machine.sapcloud.io/v1alpha1", Kind: "ShelfMachineClass"}, caller(lists))
	wantNothing(t, d, "before any operation", &meta, &secretMeta)
	ctx, stop := context.WithCancel(t.Context())
	cancel = stop
	if _, err := d.List(ctx, testClass()); err != nil {
		t.Fatal(err)
	}
	wantNothing(t, d, "between operations", &meta, &secretMeta)
	wantNothing(t, d, "no name at all", nil, nil)
	if !strings.HasSuffix(meta.Name, "/namespaces/ns/shelfmachineclasses/small") {
		t.Errorf("the class is called %q", meta.Name)
	}
}

// wantNothing wants an error for the secret, and for the class too unless an operation has it.
func wantNothing(t *testing.T, d *external.Driver, when string, class *external.MachineClassMeta, secret *external.SecretMeta) {
	t.Helper()
	if text, err := d.GetSecret(secret); err == nil {
		t.Errorf("%s: got the secret %q", when, text)
	}
	if strings.HasPrefix(when, "other") || when == "no name" {
		return
	}
	if text, err := d.GetMachineClass(class); err == nil {
		t.Errorf("%s: got the class %v", when, text)
	}
}

// The second operation waits for the first, and its context ends the wait.
func TestDriver_OneAtATime(t *testing.T) {
	t.Parallel()
	running, release := make(chan struct{}), make(chan struct{})
	d := external.New(external.ClassType{}, caller(func(context.Context, *external.MachineClassMeta, string) error {
		running <- struct{}{}
		<-release

		return nil
	}))
	first := make(chan error, 1)
	go func() {
		_, err := d.List(t.Context(), testClass())
		first <- err
	}()
	bustest.Receive(t, "the first call", running)
	ctx, cancel := context.WithCancel(t.Context())
	second := make(chan error, 1)
	go func() {
		_, err := d.List(ctx, testClass())
		second <- err
	}()
	cancel()
	if err := bustest.Receive(t, "the end of the second call", second); driversdk.CodeOf(err) != driversdk.Canceled {
		t.Errorf("the call that waited: %v, want Canceled", err)
	}
	close(release)
	if err := bustest.Receive(t, "the end of the first call", first); err != nil {
		t.Error(err)
	}
}

// A class of 2018 becomes a MachineClass, from which the provider gets its own again.
func TestDriver_MigrateClass(t *testing.T) {
	t.Parallel()
	d := newDriver(newCloud())
	old := driversdk.OldClass{Kind: "ShelfMachineClass", APIVersion: "machine.sapcloud.io/v1alpha1", Object: json.RawMessage(
		`{"kind":"ShelfMachineClass","metadata":{"name":"small","namespace":"ns"},` +
			`"spec":{"size":"small","secretRef":{"name":"cloud","namespace":"ns"},"credentialsSecretRef":{"name":"keys"}}}`)}
	got, err := d.MigrateClass(t.Context(), old)
	want := `{"apiVersion":"machine.sapcloud.io/v1alpha1","credentialsSecretRef":{"name":"keys"},"kind":"MachineClass",` +
		`"metadata":{"name":"small","namespace":"ns"},"providerSpec":{"size":"small"},"secretRef":{"name":"cloud","namespace":"ns"}}`
	if diff := cmp.Diff(want, string(got)); diff != "" || err != nil {
		t.Errorf("%v; class (-want +got):\n%s", err, diff)
	}
	old.Kind = "AWSMachineClass"
	if got, err := d.MigrateClass(t.Context(), old); driversdk.CodeOf(err) != driversdk.InvalidArgument {
		t.Errorf("another kind: %s, %v", got, err)
	}
	old.Kind, old.Object = "ShelfMachineClass", json.RawMessage(`{"spec":[]}`)
	if got, err := d.MigrateClass(t.Context(), old); driversdk.CodeOf(err) != driversdk.InvalidArgument {
		t.Errorf("no object as spec: %s, %v", got, err)
	}
}
