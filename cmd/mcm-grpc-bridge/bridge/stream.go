package bridge

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/machinebus/machinebus/cmd/mcm-grpc-bridge/infrapb"
)

// The operation types of the protocol.
const (
	typeRegister   = "register"
	typeCreate     = "create"
	typeDelete     = "delete"
	typeList       = "list"
	typeUnregister = "unregister"
)

// registerLimit is how long a client may take to say what it is.
const registerLimit = 10 * time.Second

var (
	// errClosed ends the stream of a client that leaves in order.
	errClosed = errors.New("it has closed its stream")
	// errLost ends the stream of a client that is not there any more.
	errLost = errors.New("its connection is lost")
)

// A stream is one registered client. It has one request under way at most.
type stream struct {
	grpc   infrapb.Infragrpc_RegisterServer
	outbox chan *infrapb.MCMside // read by the one goroutine that sends

	ctx context.Context // ends with the stream; its cause says why
	end context.CancelCauseFunc

	mu       sync.Mutex
	last     int32    // operation id
	underWay *request // nil for none
}

// A request is one that was or will be sent. Its answer is sent to answered, which does not block.
type request struct {
	*infrapb.MCMside

	answered chan *infrapb.DriverSide
}

func newStream(grpc infrapb.Infragrpc_RegisterServer) *stream {
	s := &stream{grpc: grpc, outbox: make(chan *infrapb.MCMside)}
	s.ctx, s.end = context.WithCancelCause(grpc.Context())

	return s
}

// expect notes a request, so that no answer can be too early for it.
func (s *stream) expect(operationType string, params *infrapb.MCMsideOperationParams) *request {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last++
	s.underWay = &request{
		MCMside:  &infrapb.MCMside{OperationID: s.last, OperationType: operationType, Operationparams: params},
		answered: make(chan *infrapb.DriverSide, 1),
	}

	return s.underWay
}

// register begins to receive, and asks the client which kind of class it serves. No other goroutine
// sends yet.
func (s *stream) register() (*infrapb.DriverSideRegisterationResp, error) {
	r := s.expect(typeRegister, nil)
	go s.receive() // which gRPC ends once Register returns
	if err := s.grpc.Send(r.MCMside); err != nil {
		return nil, err
	}
	limit := time.NewTimer(registerLimit)
	defer limit.Stop()
	select {
	case m := <-r.answered:
		return m.GetRegisterResp(), nil
	case <-s.ctx.Done():
		return nil, s.why()
	case <-limit.C:
		return nil, status.Errorf(codes.DeadlineExceeded, "the driver did not answer the register request within %s", registerLimit)
	}
}

// why says why the stream has ended.
func (s *stream) why() error {
	err := context.Cause(s.ctx)
	if errors.Is(err, context.Canceled) || status.Code(err) == codes.Canceled {
		return errLost // the connection's own end came first
	}

	return err
}

// receive takes the client's messages until the stream ends.
func (s *stream) receive() {
	for {
		m, err := s.grpc.Recv()
		switch {
		case errors.Is(err, io.EOF):
			err = errClosed
		case err == nil:
			err = s.take(m)
		}
		if err != nil {
			s.end(err)

			return
		}
	}
}

// take hands an answer to its request. The client may be anything: what does not fit is its error.
func (s *stream) take(m *infrapb.DriverSide) error {
	if m.GetOperationType() == typeUnregister {
		return errClosed
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.underWay
	switch {
	case r == nil || r.GetOperationID() != m.GetOperationID():
		return status.Errorf(codes.InvalidArgument, "answer to operation %d, which is not under way on this stream", m.GetOperationID())
	case !answers(r.GetOperationType(), m):
		return status.Errorf(codes.InvalidArgument, "answer to operation %d has not the response of a %s", m.GetOperationID(), r.GetOperationType())
	}
	s.underWay = nil
	r.answered <- m

	return nil
}

// answers reports whether a message has the response of an operation type.
func answers(operationType string, m *infrapb.DriverSide) bool {
	switch operationType {
	case typeRegister:
		return m.GetRegisterResp() != nil
	case typeCreate:
		return m.GetCreateresponse() != nil
	case typeDelete:
		return m.GetDeleteresponse() != nil
	default:
		return m.GetListresponse() != nil
	}
}
