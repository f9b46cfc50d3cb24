package driversdk

import (
	"context"
	"time"
)

// NodeGroups is a [Driver] whose cloud keeps node groups itself (instance groups,
// scale sets, pools), so that a cluster-autoscaler can scale them without
// MachineDeployments. What a group is like is kept in the cloud: any replica may be
// asked anything [GROUP-4].
//
// Answer within 2 s if you can: then the gateway asks once more, perhaps another
// replica and while this one is still at it, under the same request id. The
// cluster-autoscaler gives up after 5 s, by default, when ctx ends as well. So start
// what takes long in the cloud, and return once the wish is on record there.
type NodeGroups interface {
	// NodeGroups returns all groups that are for a control plane.
	NodeGroups(ctx context.Context, cluster string) ([]*NodeGroup, error)
	// GroupInstances returns the instances of one group, those to come and those
	// being deleted included [INSTANCES-1]. An absent group is [NotFound].
	GroupInstances(ctx context.Context, cluster, group string) ([]*GroupInstance, error)
	// ResizeGroup sets the target size and returns it. Comparing with Expected and
	// changing are one step in the cloud [RESIZE-1]; a request that was done before
	// succeeds and changes nothing [RESIZE-4].
	ResizeGroup(ctx context.Context, req *GroupResize) (target int32, err error)
	// DeleteFromGroup removes the named instances and none else, together with as
	// many from the target size, which it returns: all or none of them [REMOVE-1].
	// What is gone or going is done already [REMOVE-2]. The cluster-autoscaler sends one
	// request for each node, ten at the same time by default.
	DeleteFromGroup(ctx context.Context, req *GroupDelete) (target int32, err error)
}

// A NodeGroup is a group of like nodes in the cloud.
type NodeGroup struct {
	// ID is made of letters, digits and any of "._/-".
	ID string
	// Min and Max are the bounds for the autoscaler.
	Min, Max int32
	// Target is how many instances are wished for, without those being deleted.
	Target int32
	// Description is one line for people.
	Description string
	// Template describes a node before there is one; nil for a group that never
	// grows from zero.
	Template *GroupTemplate
	// Options are the group's own settings; nil for those of all groups.
	Options *GroupOptions
}

// A GroupTemplate describes the nodes of a group.
type GroupTemplate struct {
	// Capacity is by resource, in Kubernetes' notation; cpu and memory are needed.
	Capacity map[string]string
	Labels   map[string]string
	Taints   []Taint
}

// GroupOptions are settings of the cluster-autoscaler; a nil one is as for all
// groups.
type GroupOptions struct {
	UtilizationThreshold, GPUUtilizationThreshold *float64
	UnneededTime, UnreadyTime, ProvisionTime      *time.Duration
}

// A GroupInstance is one of a group.
type GroupInstance struct {
	// ID is the Node's spec.providerID as soon as the instance can join; before,
	// any name of its own.
	ID    string
	State GroupInstanceState
	// Err says why an instance that is Creating does not come. Its code decides:
	// after [ResourceExhausted] the autoscaler turns to another group.
	Err error
}

// A GroupInstanceState is where an instance of a group stands.
type GroupInstanceState int

// The states.
const (
	GroupInstanceRunning GroupInstanceState = iota + 1
	GroupInstanceCreating
	GroupInstanceDeleting
)

// A GroupResize is a step from one target size to another.
type GroupResize struct {
	Cluster, Group string
	// RequestID is the same when the request comes again because its answer was
	// lost.
	RequestID string
	// Expected is the size that the asker knows: where it is another by now the
	// answer is [Aborted]. Target is the size to come: above Max is [OutOfRange],
	// and one that would take an instance that has come [FailedPrecondition].
	Expected, Target int32
}

// A GroupDelete names instances of a group that have to go. One of another group is
// [InvalidArgument], fewer than Min left is [FailedPrecondition].
type GroupDelete struct {
	Cluster, Group string
	RequestID      string
	Instances      []string
}
