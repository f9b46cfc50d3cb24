package virtual

import (
	"context"
	"maps"
	"strings"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk"
)

// Tags that identify the owner of an instance.
const (
	tagPrefix    = "machinebus.io/"
	tagUID       = cloudapi.TagMachineUID
	tagCluster   = tagPrefix + "cluster"
	tagOwner     = tagPrefix + "owner"
	tagNamespace = tagPrefix + "machine-namespace"
	tagMachine   = tagPrefix + "machine-name"
	tagClass     = tagPrefix + "class"
)

// tags returns the tags of a new instance [MACHINE-1] [OWNER-1].
func tags(req *driversdk.Request[Spec]) map[string]string {
	t := maps.Clone(req.Class.Spec.Tags)
	if t == nil {
		t = map[string]string{}
	}
	t[tagUID] = req.Machine.UID
	t[tagCluster] = req.Cluster
	if req.Owner != "" {
		t[tagOwner] = req.Owner
	}
	t[tagNamespace] = req.Machine.Namespace
	t[tagMachine] = req.Machine.Name
	t[tagClass] = classTag(req.Class)

	return t
}

func classTag(class *driversdk.Class[Spec]) string { return class.Namespace + "/" + class.Name }

// here reports whether an instance belongs to the request's control plane.
func here(req *driversdk.Request[Spec], i *cloudapi.Instance) bool {
	return i.Tags[tagCluster] == req.Cluster
}

// mine reports whether an instance was created for the request's machine.
func mine(req *driversdk.Request[Spec], i *cloudapi.Instance) bool {
	return here(req, i) && req.Machine.UID != "" && i.Tags[tagUID] == req.Machine.UID
}

// owned returns all instances of the request's machine, oldest first.
func owned(ctx context.Context, cloud *cloudapi.Client, req *driversdk.Request[Spec]) ([]cloudapi.Instance, error) {
	if req.Machine.UID == "" {
		return nil, nil // every instance is tagged with a uid
	}
	list, err := cloud.List(ctx, cloudapi.Filter{Tags: map[string]string{tagCluster: req.Cluster, tagUID: req.Machine.UID}})

	return list, coded(err)
}

// idOf returns the cloud's id in a provider id, "virtual:///<region>/<id>".
func idOf(providerID string) (string, error) {
	rest, ok := strings.CutPrefix(providerID, Provider+":///")
	_, id, split := strings.Cut(rest, "/")
	if !ok || !split || id == "" {
		return "", driversdk.Errorf(driversdk.InvalidArgument,
			"provider id %q does not belong to this driver: want %s:///<region>/<id>", providerID, Provider)
	}

	return id, nil
}

// instanceOf converts an instance of the cloud to the SDK's type.
func instanceOf(i *cloudapi.Instance) *driversdk.Instance {
	instance := &driversdk.Instance{
		ProviderID: i.ProviderID, NodeName: i.NodeName,
		MachineName: i.Tags[tagMachine], MachineUID: i.Tags[tagUID], Owner: i.Tags[tagOwner],
	}
	if instance.MachineName == "" { // the tag was removed
		instance.MachineName = i.Name
	}
	for _, a := range i.Addresses {
		instance.Addresses = append(instance.Addresses, driversdk.Address{Type: a.Type, Address: a.Address})
	}

	return instance
}
