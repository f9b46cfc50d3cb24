package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/cmd/internal/stack"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A grpcRig holds both peers that speak gRPC: a driver that is called, and one
// that has opened a stream to its manager. Their messages are the bus's.
type grpcRig struct {
	request, reply *driverv1.Envelope
	takes          *slowly

	manager, driver *grpc.Server
	toDriver        *grpc.ClientConn // for unary calls
	toManager       *grpc.ClientConn // for the driver's stream

	opened  chan struct{}
	sending sync.Mutex // a stream has one sender
	stream  grpc.ServerStream

	mu      sync.Mutex
	waiting map[string]chan *driverv1.Envelope
}

const (
	grpcService = "bench.Driver"
	unaryMethod = "/" + grpcService + "/Status"
	streamName  = "Register"
)

func newGRPCRig(ctx context.Context, r *readRig, takes *slowly) (_ *grpcRig, err error) {
	g := &grpcRig{
		request: r.request, reply: r.reply, takes: takes,
		opened: make(chan struct{}), waiting: map[string]chan *driverv1.Envelope{},
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.close())
		}
	}()
	if g.driver, g.toDriver, err = g.serve(ctx); err != nil {
		return nil, err
	}
	if g.manager, g.toManager, err = g.serve(ctx); err != nil {
		return nil, err
	}
	stream, err := g.toManager.NewStream(context.WithoutCancel(ctx), &grpc.StreamDesc{
		StreamName: streamName, ServerStreams: true, ClientStreams: true,
	}, "/"+grpcService+"/"+streamName)
	if err != nil {
		return nil, err
	}
	go g.drive(stream) // ends with the connection
	limit := time.NewTimer(readySoon)
	defer limit.Stop()
	select {
	case <-g.opened:
		return g, nil
	case <-limit.C:
		return nil, errors.New("the driver's stream does not reach the manager")
	}
}

// serve starts a server with the service, and connects to it.
func (g *grpcRig) serve(ctx context.Context) (*grpc.Server, *grpc.ClientConn, error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", stack.Loopback(0))
	if err != nil {
		return nil, nil, err
	}
	server := grpc.NewServer()
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: grpcService, HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Status", Handler: g.onUnary}},
		Streams: []grpc.StreamDesc{{StreamName: streamName, Handler: g.onStream, ServerStreams: true, ClientStreams: true}},
	}, g)
	go func() { _ = server.Serve(listener) }() // ends with Stop; callers see what fails
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	return server, conn, err
}

func (g *grpcRig) close() error {
	var errs []error
	for _, conn := range []*grpc.ClientConn{g.toDriver, g.toManager} {
		if conn != nil {
			errs = append(errs, conn.Close())
		}
	}
	for _, server := range []*grpc.Server{g.driver, g.manager} {
		if server != nil {
			server.Stop()
		}
	}
	return errors.Join(errs...)
}

// answer is what the driver says to a request.
func (g *grpcRig) answer(ctx context.Context, request *driverv1.Envelope) (*driverv1.Envelope, error) {
	if err := g.takes.wait(ctx); err != nil {
		return nil, err
	}
	return &driverv1.Envelope{
		OperationId: request.GetOperationId(), Attempt: request.GetAttempt(), Replica: g.reply.GetReplica(), Body: g.reply.GetBody(),
	}, nil
}

func (g *grpcRig) onUnary(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) { //nolint:revive // as gRPC wants it
	request := &driverv1.Envelope{}
	if err := decode(request); err != nil {
		return nil, err
	}
	return g.answer(ctx, request)
}

func (g *grpcRig) callUnary(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	return g.toDriver.Invoke(ctx, unaryMethod, g.numbered(), &driverv1.Envelope{})
}

// numbered is the request with an id of its own.
func (g *grpcRig) numbered() *driverv1.Envelope {
	request := proto.CloneOf(g.request)
	request.OperationId = "read." + strconv.FormatUint(reads.Add(1), 10)
	return request
}

// onStream is the manager's end of the stream: it passes replies to their callers.
func (g *grpcRig) onStream(_ any, stream grpc.ServerStream) error {
	g.stream = stream
	close(g.opened)
	for {
		reply := &driverv1.Envelope{}
		if err := stream.RecvMsg(reply); err != nil {
			return err
		}
		g.mu.Lock()
		waiter := g.waiting[reply.GetOperationId()]
		delete(g.waiting, reply.GetOperationId())
		g.mu.Unlock()
		if waiter != nil {
			waiter <- reply
		}
	}
}

func (g *grpcRig) callStream(ctx context.Context) error {
	request, waiter := g.numbered(), make(chan *driverv1.Envelope, 1)
	g.mu.Lock()
	g.waiting[request.GetOperationId()] = waiter
	g.mu.Unlock()
	g.sending.Lock()
	err := g.stream.SendMsg(request)
	g.sending.Unlock()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, readTimeout, fmt.Errorf("no reply on the stream within %s", readTimeout))
	defer cancel()
	select {
	case <-waiter:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// drive is the driver's end: a goroutine for each request.
func (g *grpcRig) drive(stream grpc.ClientStream) {
	var sending sync.Mutex
	for {
		request := &driverv1.Envelope{}
		if stream.RecvMsg(request) != nil {
			return // closed
		}
		go func() {
			reply, err := g.answer(stream.Context(), request)
			if err != nil {
				return // closed meanwhile
			}
			sending.Lock()
			defer sending.Unlock()
			_ = stream.SendMsg(reply) // the caller times out and reports it
		}()
	}
}
