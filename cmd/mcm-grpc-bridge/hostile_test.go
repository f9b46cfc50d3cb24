package main

import (
	"encoding/base64"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/cmd/mcm-grpc-bridge/infrapb"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

const classPath = "/apis/machine.sapcloud.io/v1alpha1/namespaces/shop/virtualmachineclasses/small"

// foreign are names of what a client has no business with. The first of each exist.
var foreign = struct{ classes, secrets []string }{
	classes: []string{
		classPath, "/apis/machine.sapcloud.io/v1alpha1/namespaces/shop/virtualmachineclasses/none",
		"/api/v1/namespaces/shop/secrets/cloud", "/api/v1/namespaces/kube-system/secrets", "small", "",
	},
	secrets: []string{"shop/cloud", "shop/none", "kube-system/cloud", "shop/", "/cloud", "/"},
}

// wantNothing asks for all that is foreign. Each kind has one answer, whether or not the thing exists.
func (c *rawClient) wantNothing(when string) {
	c.t.Helper()
	texts := map[string]bool{}
	for _, name := range foreign.classes {
		data, refused := c.class(c.t.Context(), name)
		if texts["class: "+refused] = true; data != "" || refused == "" {
			c.t.Errorf("%s, class %q: got %q, error %q", when, name, data, refused)
		}
	}
	for _, name := range foreign.secrets {
		namespace, name, _ := strings.Cut(name, "/")
		data, refused := c.secret(c.t.Context(), namespace, name)
		if texts["secret: "+refused] = true; data != "" || refused == "" {
			c.t.Errorf("%s, secret %s/%s: got %q, error %q", when, namespace, name, data, refused)
		}
	}
	if len(texts) != 2 {
		c.t.Errorf("%s: the answers depend on what exists: %v", when, texts)
	}
}

// A client tries to get what only another client's operation needs, and gets what its own does.
func TestHostile(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.store.setSecret("other", "1", "another-token")
	_, address := w.bridge()
	w.client("service", address, "VirtualMachineClass")
	names := []string{"m1"}
	if _, err := w.admin.Patch(t.Context(), cloudapi.KnobsPatch{Hold: &names}); err != nil {
		t.Fatal(err)
	}
	victim := optest.Call(t.Context(), w.caller, w.create("virtual", "m1"))
	bustest.Eventually(t, "the victim's create is under way", func() bool {
		stats, err := w.admin.Stats(t.Context())

		return err == nil && stats.Held == 1
	})

	hostile := newRawClient(t, address)
	hostile.wantNothing("not registered")
	hostile.register("AWSMachineClass")
	bustest.Eventually(t, "the hostile replica is on the bus", func() bool { return len(w.caller.Replicas()) == 2 })
	hostile.wantNothing("registered")
	out := make(chan optest.Answer, 1)
	go func() { out <- w.insist(w.listRequest("aws", "other")) }()
	request := hostile.next("list")
	hostile.wantNothing("with an operation under way")
	name := request.GetOperationparams().GetMachineClassMetaData().GetName()
	class, refused := hostile.class(t.Context(), name)
	if !strings.Contains(class, `"kind":"AWSMachineClass"`) || !strings.Contains(class, `"secretRef":{"name":"other","namespace":"shop"}`) {
		t.Errorf("its own class: %s %s", class, refused)
	}
	if secret, refused := hostile.secret(t.Context(), "shop", "other"); !strings.Contains(secret, base64.StdEncoding.EncodeToString([]byte("another-token"))) {
		t.Errorf("its own secret: %s %s", secret, refused)
	}

	bystander := newRawClient(t, address)
	if data, _ := bystander.class(t.Context(), name); data != "" {
		t.Errorf("a third client got the class %s", data)
	}
	hostile.send(listed(request.GetOperationID()))
	optest.WantOK(t, bustest.Receive(t, "the list", out))
	hostile.wantNothing("after the operation")
	if data, _ := hostile.class(t.Context(), name); data != "" {
		t.Errorf("after the operation it got the class %s", data)
	}
	none := []string{}
	if _, err := w.admin.Patch(t.Context(), cloudapi.KnobsPatch{Hold: &none}); err != nil {
		t.Fatal(err)
	}
	optest.WantOK(t, bustest.Receive(t, "the victim's create", victim))
}

// garbage sends and receives bytes that are no message.
type garbage struct{}

func (garbage) Marshal(any) ([]byte, error)     { return []byte{0xff, 0xff, 0xff}, nil }
func (garbage) Unmarshal(_ []byte, _ any) error { return nil }
func (garbage) Name() string                    { return "proto" }

// What breaks the protocol ends its own stream, with an error that says why, and no other.
func TestMalformed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, address := w.bridge()
	w.client("infra", address, "VirtualMachineClass")
	const kind = "AWSMachineClass"
	for name, tc := range map[string]struct {
		say  func(*rawClient)
		code codes.Code
		want string
	}{
		"other answer to register": {func(c *rawClient) { c.send(listed(c.next("register").GetOperationID())) }, codes.InvalidArgument, "has not the response of a register"},
		"no response":              {func(c *rawClient) { c.send(&infrapb.DriverSide{OperationID: 1}) }, codes.InvalidArgument, "has not the response of a register"},
		"other id":                 {func(c *rawClient) { c.send(registration(-7, kind)) }, codes.InvalidArgument, "operation -7, which is not under way"},
		"unknown kind":             {func(c *rawClient) { c.register("FakeMachineClass") }, codes.FailedPrecondition, "--kind=FakeMachineClass=<provider>"},
		"no kind":                  {func(c *rawClient) { c.register("") }, codes.FailedPrecondition, "AWSMachineClass=aws"},
		"long kind":                {func(c *rawClient) { c.register(strings.Repeat("x", 1000)) }, codes.InvalidArgument, "longer than 253 bytes"},
		"registers twice": {func(c *rawClient) {
			c.register(kind)
			c.send(registration(1, kind))
		}, codes.InvalidArgument, "operation 1, which is not under way"},
		"answers what was not asked": {func(c *rawClient) {
			c.register(kind)
			c.send(listed(2))
		}, codes.InvalidArgument, "operation 2, which is not under way"},
	} {
		c := newRawClient(t, address)
		tc.say(c)
		if err := c.ended(); status.Code(err) != tc.code || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: the stream ended with %v, want %v with %q", name, err, tc.code, tc.want)
		}
	}
	stream, err := newRawClient(t, address).client.Register(t.Context(), grpc.ForceCodec(garbage{}))
	if err == nil {
		err = stream.Send(nil)
	}
	for err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.Internal {
		t.Errorf("no protobuf: the stream ended with %v, want Internal", err)
	}
	if got := w.list("virtual"); len(got) != 0 {
		t.Errorf("the good client listed %v", got)
	}
}

// An answer of another kind ends the stream. Of a create that was sent the outcome is then unknown.
func TestWrongAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, address := w.bridge()
	c := newRawClient(t, address)
	c.register("VirtualMachineClass")
	bustest.Eventually(t, "the replica is on the bus", func() bool { return len(w.caller.Replicas()) == 1 })
	req := w.create("virtual", "m1")
	req.Timeout = 10 * time.Second
	done := make(chan optest.Answer, 1)
	go func() { done <- w.insist(req) }()
	c.answerList()
	c.send(listed(c.next("create").GetOperationID()))
	if err := c.ended(); status.Code(err) != codes.InvalidArgument {
		t.Errorf("the stream ended with %v, want InvalidArgument", err)
	}
	w.client("infra", address, "VirtualMachineClass")
	if out := optest.WantOK(t, <-done); out.Attempts < 2 {
		t.Errorf("the create ended at attempt %d, want one after the wrong answer", out.Attempts)
	}
}
