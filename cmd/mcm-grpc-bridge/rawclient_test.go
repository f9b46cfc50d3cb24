package main

import (
	"context"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/cmd/mcm-grpc-bridge/infrapb"
)

// A rawClient is in this process, and says what a test wants.
type rawClient struct {
	t      *testing.T
	client infrapb.InfragrpcClient
	stream grpc.BidiStreamingClient[infrapb.DriverSide, infrapb.MCMside]
	asked  chan *infrapb.MCMside // closed when the stream has ended
	err    error                 // of the stream that ended last
}

// newRawClient connects, and opens a stream that has not registered.
func newRawClient(t *testing.T, address string) *rawClient {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	c := &rawClient{t: t, client: infrapb.NewInfragrpcClient(conn)}
	c.open()

	return c
}

func (c *rawClient) open() {
	c.t.Helper()
	var err error
	if c.stream, err = c.client.Register(c.t.Context()); err != nil {
		c.t.Fatal(err)
	}
	asked, stream := make(chan *infrapb.MCMside, 10), c.stream
	c.asked = asked
	go func() {
		defer close(asked)
		for {
			m, err := stream.Recv()
			if err != nil {
				c.err = err

				return
			}
			asked <- m
		}
	}()
}

// next returns the next request.
func (c *rawClient) next(operationType string) *infrapb.MCMside {
	c.t.Helper()
	m := bustest.Receive(c.t, "a request of type "+operationType, c.asked)
	if m == nil {
		c.t.Fatalf("the stream ended before a %s: %v", operationType, c.err)
	}
	if m.GetOperationType() != operationType {
		c.t.Fatalf("asked for a %s, want a %s", m.GetOperationType(), operationType)
	}

	return m
}

// ended returns why the stream has ended.
func (c *rawClient) ended() error {
	c.t.Helper()
	for bustest.Receive(c.t, "the end of the stream", c.asked) != nil {
		continue // what was asked before
	}

	return c.err
}

func (c *rawClient) send(m *infrapb.DriverSide) {
	c.t.Helper()
	if err := c.stream.Send(m); err != nil {
		c.t.Fatal(err)
	}
}

func (c *rawClient) register(kind string) {
	c.t.Helper()
	c.send(registration(c.next("register").GetOperationID(), kind))
}

// answerList answers the next list by no instances.
func (c *rawClient) answerList() {
	c.t.Helper()
	c.send(listed(c.next("list").GetOperationID()))
}

func registration(id int32, kind string) *infrapb.DriverSide {
	return &infrapb.DriverSide{OperationID: id, OperationType: "register", Response: &infrapb.DriverSide_RegisterResp{
		RegisterResp: &infrapb.DriverSideRegisterationResp{Group: "machine.sapcloud.io", Version: "v1alpha1", Kind: kind},
	}}
}

func listed(id int32) *infrapb.DriverSide {
	return &infrapb.DriverSide{OperationID: id, OperationType: "list", Response: &infrapb.DriverSide_Listresponse{
		Listresponse: &infrapb.DriverSideListResp{},
	}}
}

// class returns what GetMachineClass has: data or an error.
func (c *rawClient) class(ctx context.Context, name string) (data, refused string) {
	c.t.Helper()
	out, err := c.client.GetMachineClass(ctx, &infrapb.MachineClassMeta{Name: name, Revision: 1})
	if err != nil {
		c.t.Fatal(err)
	}

	return out.GetData(), out.GetError()
}

// secret returns what GetSecret has: data or an error.
func (c *rawClient) secret(ctx context.Context, namespace, name string) (data, refused string) {
	c.t.Helper()
	out, err := c.client.GetSecret(ctx, &infrapb.SecretMeta{NameSpace: namespace, SecretName: name, Revision: 1})
	if err != nil {
		c.t.Fatal(err)
	}

	return out.GetData(), out.GetError()
}

func registrationEnd() *infrapb.DriverSide { return &infrapb.DriverSide{OperationType: "unregister"} }

func createFailed(id int32, text string) *infrapb.DriverSide {
	return &infrapb.DriverSide{OperationID: id, OperationType: "create", Response: &infrapb.DriverSide_Createresponse{
		Createresponse: &infrapb.DriverSideCreateResp{ProviderID: "Error", Nodename: "Error", Error: text},
	}}
}
