package bridge

import (
	"context"
	"net"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/cmd/mcm-grpc-bridge/infrapb"
	"github.com/machinebus/machinebus/cmd/mcm-grpc-bridge/servicepb"
	"github.com/machinebus/machinebus/driversdk"
)

// The forms have the same messages and methods, so the methods of one may serve both.
func TestForms(t *testing.T) {
	t.Parallel()
	describe := func(file protoreflect.FileDescriptor, service string) string {
		d := protodesc.ToFileDescriptorProto(file)
		d.Name, d.Options = nil, nil
		text := strings.ReplaceAll(prototext.Format(d), "."+d.GetPackage()+".", ".form.")

		return strings.Replace(strings.Replace(text, d.GetPackage(), "form", 1), service, "Form", 1)
	}
	infra, service := describe(infrapb.File_infrapb_infra_proto, "Infragrpc"), describe(servicepb.File_servicepb_service_proto, "Servicegrpc")
	// Formatting puts in spaces at random.
	if strings.Join(strings.Fields(infra), " ") != strings.Join(strings.Fields(service), " ") {
		t.Errorf("the forms differ:\n%s\n%s", infra, service)
	}
}

// The messages have the bytes of 2018: numbers and types of all fields.
func TestWire(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		message proto.Message
		want    string
	}{
		"create": {
			&infrapb.MCMside{OperationID: 7, OperationType: "create", Operationparams: &infrapb.MCMsideOperationParams{
				MachineClassMetaData: &infrapb.MachineClassMeta{Name: "c", Revision: 3}, Credentials: "k", MachineID: "i", MachineName: "m",
			}},
			"\x08\x07\x12\x06create\x1a\x10\x0a\x05\x0a\x01c\x10\x03\x12\x01k\x1a\x01i\x22\x01m",
		},
		"registered": {
			&infrapb.DriverSide{OperationID: 1, OperationType: "register", Response: &infrapb.DriverSide_RegisterResp{
				RegisterResp: &infrapb.DriverSideRegisterationResp{Name: "n", Group: "g", Kind: "k", Version: "v"},
			}},
			"\x08\x01\x12\x08register\x1a\x0c\x0a\x01n\x12\x01g\x1a\x01k\x22\x01v",
		},
		"created": {
			&infrapb.DriverSide{Response: &infrapb.DriverSide_Createresponse{
				Createresponse: &infrapb.DriverSideCreateResp{ProviderID: "p", Nodename: "n", Error: "e"},
			}},
			"\x22\x09\x0a\x01p\x12\x01n\x1a\x01e",
		},
		"deleted": {
			&infrapb.DriverSide{Response: &infrapb.DriverSide_Deleteresponse{Deleteresponse: &infrapb.DriverSideDeleteResp{Error: "e"}}},
			"\x2a\x03\x0a\x01e",
		},
		"listed": {
			&infrapb.DriverSide{Response: &infrapb.DriverSide_Listresponse{Listresponse: &infrapb.DriverSideListResp{
				List: []*infrapb.DriverSideMachine{{MachineID: "i", MachineName: "m"}}, Error: "e",
			}}},
			"\x32\x0b\x0a\x06\x0a\x01i\x12\x01m\x12\x01e",
		},
		"class":         {&infrapb.MachineClass{Data: "d", Error: "e"}, "\x0a\x01d\x12\x01e"},
		"secret":        {&infrapb.Secret{Data: "d", Error: "e"}, "\x0a\x01d\x12\x01e"},
		"secret wanted": {&infrapb.SecretMeta{SecretName: "s", NameSpace: "n", Revision: 3}, "\x0a\x01s\x12\x01n\x18\x03"},
	} {
		got, err := proto.MarshalOptions{Deterministic: true}.Marshal(tc.message)
		if err != nil || string(got) != tc.want {
			t.Errorf("%s: %v, bytes %q, want %q", name, err, got, tc.want)
		}
	}
	for _, method := range []string{
		infrapb.Infragrpc_Register_FullMethodName, infrapb.Infragrpc_GetMachineClass_FullMethodName, infrapb.Infragrpc_GetSecret_FullMethodName,
	} {
		if !strings.HasPrefix(method, "/infra.Infragrpc/") {
			t.Errorf("the method is %s", method)
		}
	}
	if name := serviceForm().ServiceName; name != "service.Servicegrpc" {
		t.Errorf("the other form is %s", name)
	}
}

// serve runs a server until the test ends, and returns a client of it. No driver registers there.
func serve(t *testing.T) infrapb.InfragrpcClient {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	s, done := New(Config{Replica: driversdk.Config{Logger: bustest.Quiet()}, Kinds: DefaultKinds()}), make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stop()
		_ = conn.Close()
		if err := bustest.Receive(t, "the end of the server", done); err != nil {
			t.Error(err)
		}
	})

	return infrapb.NewInfragrpcClient(conn)
}

// A client cannot use up the bridge, and the last one is refused with the reason.
func TestServer_TooManyStreams(t *testing.T) {
	t.Parallel()
	client := serve(t)
	var err error
	for n := 0; n <= mostStreams && err == nil; n++ {
		var stream grpc.BidiStreamingClient[infrapb.DriverSide, infrapb.MCMside]
		if stream, err = client.Register(t.Context()); err == nil {
			_, err = stream.Recv()
		}
		if err != nil && n < mostStreams {
			t.Fatalf("stream %d of %d: %v", n+1, mostStreams, err)
		}
	}
	if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "start another bridge") {
		t.Errorf("one stream too many: %v", err)
	}
}

// A client that never says what it is loses its stream.
func TestServer_SilentClient(t *testing.T) {
	t.Parallel()
	stream, err := serve(t).Register(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), "did not answer the register request") {
		t.Errorf("the stream ended with %v", err)
	}
}

// What a client gets wrong is an error of a take, whatever else it says.
func FuzzStream_Take(f *testing.F) {
	f.Add(int32(1), "create", byte(0), "id", "error")
	f.Add(int32(2), "unregister", byte(3), "", "")
	f.Add(int32(-1), "", byte(9), "\x00", "x")
	f.Fuzz(func(t *testing.T, id int32, operationType string, response byte, text, failure string) {
		m := &infrapb.DriverSide{OperationID: id, OperationType: operationType}
		fitting := false
		switch response % 5 {
		case 0:
			m.Response, fitting = &infrapb.DriverSide_Createresponse{Createresponse: &infrapb.DriverSideCreateResp{ProviderID: text, Error: failure}}, true
		case 1:
			m.Response = &infrapb.DriverSide_Deleteresponse{Deleteresponse: &infrapb.DriverSideDeleteResp{Error: failure}}
		case 2:
			m.Response = &infrapb.DriverSide_Listresponse{Listresponse: &infrapb.DriverSideListResp{Error: failure}}
		case 3:
			m.Response = &infrapb.DriverSide_Createresponse{}
		}
		s := &stream{}
		r := s.expect(typeCreate, nil)
		want := fitting && id == r.GetOperationID() && operationType != typeUnregister
		if err := s.take(m); (err == nil) != want {
			t.Errorf("%v was taken with %v", m, err)
		}
		if len(r.answered) == 1 != want {
			t.Errorf("%v answered: %t", m, !want)
		}
		if err := s.take(m); err == nil {
			t.Errorf("%v was taken twice", m)
		}
	})
}
