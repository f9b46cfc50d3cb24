package virtual

import (
	"context"
	"fmt"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk"
)

// A Pooled is a [Driver] that also serves the pools of one cloud as node groups. Groups
// belong to no class, so the process has the cloud's address and credentials.
type Pooled struct {
	*Driver

	// Cloud is the cloud with the pools.
	Cloud *cloudapi.Client
}

var (
	_ driversdk.Driver[Spec] = Pooled{}
	_ driversdk.NodeGroups   = Pooled{}
)

// poolCapacity is the capacity of every node of the cloud.
var poolCapacity = map[string]string{"cpu": "4", "memory": "16Gi", "ephemeral-storage": "50Gi", "pods": "110"}

// NodeGroups returns the pools of the control plane, and those without one.
func (p Pooled) NodeGroups(ctx context.Context, cluster string) ([]*driversdk.NodeGroup, error) {
	pools, err := p.Cloud.Pools(ctx)
	if err != nil {
		return nil, coded(err)
	}
	var groups []*driversdk.NodeGroup
	for n := range pools {
		if isFor(&pools[n], cluster) {
			groups = append(groups, groupOf(&pools[n]))
		}
	}

	return groups, nil
}

func isFor(p *cloudapi.Pool, cluster string) bool { return p.Cluster == "" || p.Cluster == cluster }

// check returns NotFound for a pool of another control plane. The cloud, which all of
// them share, does not check that.
func (p Pooled) check(ctx context.Context, cluster, group string) error {
	pools, err := p.Cloud.Pools(ctx)
	if err != nil {
		return coded(err)
	}
	for n := range pools {
		if pools[n].Name == group && isFor(&pools[n], cluster) {
			return nil
		}
	}

	return driversdk.Errorf(driversdk.NotFound, "control plane %s has no pool %q", cluster, group)
}

func groupOf(p *cloudapi.Pool) *driversdk.NodeGroup {
	labels := map[string]string{
		"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
		"node.kubernetes.io/instance-type": p.MachineType, "topology.kubernetes.io/region": p.Region,
	}
	if p.Zone != "" {
		labels["topology.kubernetes.io/zone"] = p.Zone
	}

	return &driversdk.NodeGroup{
		ID: p.Name, Min: p.Min, Max: p.Max, Target: p.Size,
		Description: fmt.Sprintf("pool of %s in %s", p.MachineType, p.Region),
		Template:    &driversdk.GroupTemplate{Capacity: poolCapacity, Labels: labels},
	}
}

// GroupInstances returns the instances of a pool. A slot has its own name as id until
// its instance exists, which has a provider id.
func (p Pooled) GroupInstances(ctx context.Context, cluster, group string) ([]*driversdk.GroupInstance, error) {
	if err := p.check(ctx, cluster, group); err != nil {
		return nil, err
	}
	list, err := p.Cloud.PoolInstances(ctx, group)
	if err != nil {
		return nil, coded(err)
	}
	instances := make([]*driversdk.GroupInstance, 0, len(list))
	for _, one := range list {
		i := &driversdk.GroupInstance{ID: one.Slot, State: driversdk.GroupInstanceCreating}
		switch {
		case one.Instance == nil && one.Code != "":
			i.Err = coded(&cloudapi.Error{Code: one.Code, Message: one.Message})
		case one.Instance == nil:
		default:
			i.ID = one.Instance.ProviderID
			switch one.Instance.State {
			case cloudapi.StateRunning:
				i.State = driversdk.GroupInstanceRunning
			case cloudapi.StateDeleting:
				i.State = driversdk.GroupInstanceDeleting
			}
		}
		instances = append(instances, i)
	}

	return instances, nil
}

// ResizeGroup resizes a pool. The cloud compares the expected size and changes it in one
// step [RESIZE-1].
func (p Pooled) ResizeGroup(ctx context.Context, req *driversdk.GroupResize) (int32, error) {
	if err := p.check(ctx, req.Cluster, req.Group); err != nil {
		return 0, err
	}
	pool, err := p.Cloud.ResizePool(ctx, req.Group, cloudapi.ResizeRequest{
		RequestID: req.RequestID, Expected: req.Expected, Size: req.Target,
	})
	if err != nil {
		return 0, poolError(err)
	}

	return pool.Size, nil
}

// DeleteFromGroup deletes instances by the ids that GroupInstances returns.
func (p Pooled) DeleteFromGroup(ctx context.Context, req *driversdk.GroupDelete) (int32, error) {
	if err := p.check(ctx, req.Cluster, req.Group); err != nil {
		return 0, err
	}
	pool, err := p.Cloud.RemoveFromPool(ctx, req.Group, cloudapi.RemoveRequest{Instances: req.Instances})
	if err != nil {
		return 0, poolError(err)
	}

	return pool.Size, nil
}

// poolError adds a code to an error about a pool.
func poolError(err error) error {
	switch cloudapi.CodeOf(err) {
	case cloudapi.CodeSizeChanged:
		return driversdk.NewError(driversdk.Aborted, err)
	case cloudapi.CodeOutOfBounds:
		return driversdk.NewError(driversdk.OutOfRange, err)
	case cloudapi.CodeConflict:
		return driversdk.NewError(driversdk.FailedPrecondition, err)
	default:
		return coded(err)
	}
}
