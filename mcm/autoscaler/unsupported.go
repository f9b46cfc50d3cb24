package autoscaler

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// GPULabel returns the label of nodes with GPUs, empty for none. The
// cluster-autoscaler asks once in its life.
func (s *Server) GPULabel(context.Context, *externalgrpc.GPULabelRequest) (*externalgrpc.GPULabelResponse, error) {
	return &externalgrpc.GPULabelResponse{Label: s.cfg.GPULabel}, nil
}

// GetAvailableGPUTypes returns none: GPUs are resources of the node template.
func (s *Server) GetAvailableGPUTypes(
	context.Context, *externalgrpc.GetAvailableGPUTypesRequest,
) (*externalgrpc.GetAvailableGPUTypesResponse, error) {
	return &externalgrpc.GetAvailableGPUTypesResponse{}, nil
}

// PricingNodePrice is not implemented: prices are not known.
func (s *Server) PricingNodePrice(
	context.Context, *externalgrpc.PricingNodePriceRequest,
) (*externalgrpc.PricingNodePriceResponse, error) {
	return nil, status.Error(codes.Unimplemented, "prices of nodes are not known")
}

// PricingPodPrice is not implemented, see PricingNodePrice.
func (s *Server) PricingPodPrice(
	context.Context, *externalgrpc.PricingPodPriceRequest,
) (*externalgrpc.PricingPodPriceResponse, error) {
	return nil, status.Error(codes.Unimplemented, "prices of pods are not known")
}
