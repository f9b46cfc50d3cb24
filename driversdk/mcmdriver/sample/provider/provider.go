// Package provider is a driver for virtual clouds, in the shape of the drivers of the machine
// controller manager. It imports nothing of this project: what it gets and returns is that
// project's alone.
package provider

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gardener/machine-controller-manager/pkg/apis/machine/v1alpha1"
	"github.com/gardener/machine-controller-manager/pkg/util/provider/driver"
	"github.com/gardener/machine-controller-manager/pkg/util/provider/machinecodes/codes"
	"github.com/gardener/machine-controller-manager/pkg/util/provider/machinecodes/status"
	corev1 "k8s.io/api/core/v1"
)

// Name is the provider of the MachineClasses that the driver takes.
const Name = "Sample"

// csiDriver is the CSI driver of a virtual cloud's persistent volumes.
const csiDriver = "virtual.machinebus.io"

// clusterTag begins the tag that says which cluster an instance belongs to.
const clusterTag = "kubernetes.io/cluster/"

// New returns the driver.
func New() driver.Driver { return plugin{} }

type plugin struct{}

// A providerSpec is what a class says of its instances.
type providerSpec struct {
	Endpoint    string            `json:"endpoint"`
	MachineType string            `json:"machineType"`
	Region      string            `json:"region"`
	Zone        string            `json:"zone"`
	Tags        map[string]string `json:"tags"`
}

// cluster returns the tag by which all instances of the class's cluster are found.
func (s *providerSpec) cluster() (key, value string) {
	for key, value := range s.Tags {
		if strings.HasPrefix(key, clusterTag) {
			return key, value
		}
	}

	return "", ""
}

// open checks a class and returns its cloud.
func open(class *v1alpha1.MachineClass, secret *corev1.Secret) (*cloud, *providerSpec, error) {
	if class.Provider != Name {
		return nil, nil, status.Error(codes.InvalidArgument, fmt.Sprintf("provider %q of the MachineClass is not %q", class.Provider, Name))
	}
	spec := &providerSpec{}
	if err := json.Unmarshal(class.ProviderSpec.Raw, spec); err != nil {
		return nil, nil, status.Error(codes.InvalidArgument, "providerSpec: "+err.Error())
	}
	if key, _ := spec.cluster(); key == "" || spec.Endpoint == "" {
		return nil, nil, status.Error(codes.InvalidArgument, "providerSpec: endpoint, or a tag "+clusterTag+"<name>, is missing")
	}
	token := string(secret.Data["apiToken"])
	if token == "" {
		return nil, nil, status.Error(codes.InvalidArgument, "the secret has no key apiToken")
	}

	return &cloud{endpoint: strings.TrimRight(spec.Endpoint, "/"), token: token}, spec, nil
}

// CreateMachine makes an instance.
func (plugin) CreateMachine(ctx context.Context, req *driver.CreateMachineRequest) (*driver.CreateMachineResponse, error) {
	cloud, spec, err := open(req.MachineClass, req.Secret)
	if err != nil {
		return nil, err
	}
	made, err := cloud.create(ctx, creation{
		Name: req.Machine.Name, MachineType: spec.MachineType, Region: spec.Region, Zone: spec.Zone,
		Tags: spec.Tags, UserData: req.Secret.Data["userData"], Identity: "none",
	})
	if err != nil {
		return nil, err
	}

	return &driver.CreateMachineResponse{
		ProviderID: made.ProviderID, NodeName: made.NodeName, Addresses: made.addresses(), LastKnownState: "created " + made.ID,
	}, nil
}

// InitializeMachine prepares an instance after its creation.
func (plugin) InitializeMachine(ctx context.Context, req *driver.InitializeMachineRequest) (*driver.InitializeMachineResponse, error) {
	cloud, spec, err := open(req.MachineClass, req.Secret)
	if err != nil {
		return nil, err
	}
	found, err := cloud.find(ctx, req.Machine, spec)
	if err != nil {
		return nil, err
	}
	if err := cloud.initialize(ctx, found.ID); err != nil {
		return nil, err
	}

	return &driver.InitializeMachineResponse{ProviderID: found.ProviderID, NodeName: found.NodeName, Addresses: found.addresses()}, nil
}

// DeleteMachine removes all instances of a machine.
func (plugin) DeleteMachine(ctx context.Context, req *driver.DeleteMachineRequest) (*driver.DeleteMachineResponse, error) {
	cloud, spec, err := open(req.MachineClass, req.Secret)
	if err != nil {
		return nil, err
	}
	found, err := cloud.of(ctx, req.Machine, spec)
	if err != nil {
		return nil, err
	}
	for _, i := range found {
		if err := cloud.remove(ctx, i.ID); err != nil && codeOf(err) != codes.NotFound {
			return &driver.DeleteMachineResponse{LastKnownState: "deleting " + i.ID}, err
		}
	}

	return &driver.DeleteMachineResponse{LastKnownState: "deleted"}, nil
}

// GetMachineStatus finds the instance of a machine.
func (plugin) GetMachineStatus(ctx context.Context, req *driver.GetMachineStatusRequest) (*driver.GetMachineStatusResponse, error) {
	cloud, spec, err := open(req.MachineClass, req.Secret)
	if err != nil {
		return nil, err
	}
	found, err := cloud.find(ctx, req.Machine, spec)
	if err != nil {
		return nil, err
	}
	answer := &driver.GetMachineStatusResponse{ProviderID: found.ProviderID, NodeName: found.NodeName, Addresses: found.addresses()}
	if !found.Initialized {
		return answer, status.Error(codes.Uninitialized, "instance "+found.ID+" is not initialized")
	}

	return answer, nil
}

// ListMachines returns the instances of the class's cluster.
func (plugin) ListMachines(ctx context.Context, req *driver.ListMachinesRequest) (*driver.ListMachinesResponse, error) {
	cloud, spec, err := open(req.MachineClass, req.Secret)
	if err != nil {
		return nil, err
	}
	all, err := cloud.list(ctx, spec)
	if err != nil {
		return nil, err
	}
	names := map[string]string{}
	for _, i := range all {
		names[i.ProviderID] = i.Name
	}

	return &driver.ListMachinesResponse{MachineList: names}, nil
}

// GetVolumeIDs returns the handles of the virtual cloud's volumes.
func (plugin) GetVolumeIDs(_ context.Context, req *driver.GetVolumeIDsRequest) (*driver.GetVolumeIDsResponse, error) {
	ids := map[string]bool{}
	for _, spec := range req.PVSpecs {
		if csi := spec.CSI; csi != nil && csi.Driver == csiDriver {
			ids[csi.VolumeHandle] = true
		}
	}

	return &driver.GetVolumeIDsResponse{VolumeIDs: slices.Sorted(maps.Keys(ids))}, nil
}
