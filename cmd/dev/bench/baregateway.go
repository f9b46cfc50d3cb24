package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"strconv"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// bareGatewayCommand is the first argument with which this program is the peer of
// the gateway; the address and the files of a pki follow.
const bareGatewayCommand = "bare-gateway"

// A bareGateway returns the gateway's answers from constants, so that a loop costs only
// gRPC, TLS and the kernel.
type bareGateway struct {
	externalgrpc.UnimplementedCloudProviderServer

	groups []*externalgrpc.NodeGroup
	owners map[string]*externalgrpc.NodeGroup // by node
}

func newBareGateway() *bareGateway {
	g := &bareGateway{owners: map[string]*externalgrpc.NodeGroup{}}
	for i := range nodeGroups {
		id := namespace + "/" + groupName(i)
		g.groups = append(g.groups, &externalgrpc.NodeGroup{
			Id: id, MaxSize: managedNodes, Debug: "MachineDeployment " + id + " of class " + className,
		})
	}
	for i := range managedNodes {
		g.owners[nodeName(i)] = g.groups[i%nodeGroups]
	}
	return g
}

func (g *bareGateway) Refresh(context.Context, *externalgrpc.RefreshRequest) (*externalgrpc.RefreshResponse, error) {
	return &externalgrpc.RefreshResponse{}, nil
}

func (g *bareGateway) NodeGroups(context.Context, *externalgrpc.NodeGroupsRequest) (*externalgrpc.NodeGroupsResponse, error) {
	return &externalgrpc.NodeGroupsResponse{NodeGroups: g.groups}, nil
}

func (g *bareGateway) NodeGroupTargetSize(
	context.Context, *externalgrpc.NodeGroupTargetSizeRequest,
) (*externalgrpc.NodeGroupTargetSizeResponse, error) {
	return &externalgrpc.NodeGroupTargetSizeResponse{TargetSize: managedNodes / nodeGroups}, nil
}

func (g *bareGateway) NodeGroupForNode(
	_ context.Context, req *externalgrpc.NodeGroupForNodeRequest,
) (*externalgrpc.NodeGroupForNodeResponse, error) {
	owner := g.owners[req.GetNode().GetName()]
	if owner == nil {
		owner = &externalgrpc.NodeGroup{}
	}
	return &externalgrpc.NodeGroupForNodeResponse{NodeGroup: owner}, nil
}

func (g *bareGateway) NodeGroupGetOptions(
	_ context.Context, req *externalgrpc.NodeGroupAutoscalingOptionsRequest,
) (*externalgrpc.NodeGroupAutoscalingOptionsResponse, error) {
	return nil, status.Error(codes.Unimplemented, "node group "+req.GetId()+" has no options of its own")
}

// runBareGateway serves until it is ended, with the gateway's settings for cheap calls.
func runBareGateway(ctx context.Context, args []string) error {
	if len(args) != 3 { //nolint:mnd // as startBareGateway calls it
		return errors.New("want an address and the files of a certificate and its key")
	}
	runtime.GOMAXPROCS(1)
	pair, err := tls.LoadX509KeyPair(args[1], args[2])
	if err != nil {
		return err
	}
	roots, err := rootsOf(pair)
	if err != nil {
		return err
	}
	secured := &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: roots,
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", args[0])
	if err != nil {
		return err
	}
	const window, workers = 1 << 20, 2
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(secured)), grpc.NumStreamWorkers(workers),
		grpc.InitialWindowSize(window), grpc.InitialConnWindowSize(window))
	externalgrpc.RegisterCloudProviderServer(server, newBareGateway())
	defer context.AfterFunc(ctx, server.Stop)()
	return server.Serve(listener)
}

// startBareGateway starts this program as the peer in its own process, and returns its
// address.
func startBareGateway(site *stack.Site, p *pki) (address string, err error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("path of this program: %w", err)
	}
	port, err := stack.FreePort()
	if err != nil {
		return "", err
	}
	address = stack.Loopback(port)
	_, err = site.Start(bareGatewayCommand, self, bareGatewayCommand, address, p.cert, p.key)
	return address, err
}

func groupName(i int) string { return "group-" + strconv.Itoa(i) }

func nodeName(i int) string { return "node-" + strconv.Itoa(i) }
