package bridge

import (
	"context"

	"google.golang.org/grpc"

	"github.com/machinebus/machinebus/cmd/mcm-grpc-bridge/infrapb"
	"github.com/machinebus/machinebus/cmd/mcm-grpc-bridge/servicepb"
)

// serviceForm describes the form of package service. Its messages have the same bytes as those of
// package infra, so the same methods serve it.
func serviceForm() *grpc.ServiceDesc {
	return &grpc.ServiceDesc{
		ServiceName: servicepb.Servicegrpc_ServiceDesc.ServiceName,
		HandlerType: (*infrapb.InfragrpcServer)(nil),
		Methods: []grpc.MethodDesc{
			{MethodName: "GetMachineClass", Handler: unary(infrapb.InfragrpcServer.GetMachineClass)},
			{MethodName: "GetSecret", Handler: unary(infrapb.InfragrpcServer.GetSecret)},
		},
		Streams: []grpc.StreamDesc{{
			StreamName: "Register", ServerStreams: true, ClientStreams: true,
			Handler: func(server any, s grpc.ServerStream) error {
				return server.(infrapb.InfragrpcServer).Register( //nolint:errcheck // HandlerType
					&grpc.GenericServerStream[infrapb.DriverSide, infrapb.MCMside]{ServerStream: s})
			},
		}},
	}
}

// unary makes a handler of a method. The bridge has no interceptors.
func unary[In, Out any](method func(infrapb.InfragrpcServer, context.Context, *In) (*Out, error)) grpc.MethodHandler {
	return func(server any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		in := new(In)
		if err := decode(in); err != nil {
			return nil, err
		}

		return method(server.(infrapb.InfragrpcServer), ctx, in) //nolint:errcheck // HandlerType
	}
}
