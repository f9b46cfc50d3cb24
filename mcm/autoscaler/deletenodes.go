package autoscaler

import (
	"context"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// annotationKeyFakeNode is on what the cluster-autoscaler makes up for an instance
// without a Node.
const annotationKeyFakeNode = "k8s.io/cluster-autoscaler/fake-node-reason"

// NodeGroupDeleteNodes removes exactly these nodes, or none of them when one may
// not go. Of a node that is going or gone already nothing is left to do, and that is
// a success: the cluster-autoscaler asks again and again. What never joined and is
// preserved is left out, so that it does not keep what is asked for together with it.
// Of nodes that all never joined as many go as the minimum lets: the
// cluster-autoscaler asks for those that failed without a look at it, and would wait
// for them as for nodes to come.
func (s *Server) NodeGroupDeleteNodes(
	ctx context.Context, req *externalgrpc.NodeGroupDeleteNodesRequest,
) (*externalgrpc.NodeGroupDeleteNodesResponse, error) {
	if isProvided(req.GetId()) {
		return &externalgrpc.NodeGroupDeleteNodesResponse{}, s.deleteProvided(ctx, req.GetId(), req.GetNodes())
	}
	err := s.write(ctx, req.GetId(), func(g *group, d *v1alpha1.MachineDeployment) (bool, error) {
		victims, spared, err := s.victims(ctx, g, req.GetNodes())
		switch {
		case err != nil:
			return false, err
		case len(victims) == 0 && spared != "":
			return false, preservedStatus(spared)
		case len(victims) == 0:
			return false, nil
		}
		if room := int(d.Spec.Replicas - g.min); 0 < room && room < len(victims) && areFake(req.GetNodes()) {
			victims = victims[:room]
		}
		if left := int64(d.Spec.Replicas) - int64(len(victims)); left < int64(g.min) {
			return false, status.Errorf(codes.FailedPrecondition, "node group %s has %d nodes: %d fewer would be less than its minimum of %d",
				g.id, d.Spec.Replicas, len(victims), g.min)
		}
		d.Spec.Replicas -= int32(len(victims))
		s.mark(d, victims)

		return true, nil
	})
	if err != nil {
		return nil, err
	}

	return &externalgrpc.NodeGroupDeleteNodesResponse{}, nil
}

// victims returns the names of the machines that are still to be marked, and that of
// one that is left out because it is preserved, if there is any.
func (s *Server) victims(ctx context.Context, g *group, nodes []*externalgrpc.ExternalGrpcNode) (names []string, spared string, err error) {
	now, err := s.current(ctx)
	if err != nil {
		return nil, "", err
	}
	seen := map[string]bool{}
	for _, node := range nodes {
		m := now.find(node.GetProviderID(), node.GetName())
		if m == nil {
			if err := s.mustBeGone(ctx, g.id, node); err != nil {
				return nil, "", err
			}

			continue
		}
		if m.group != g.id {
			return nil, "", status.Errorf(codes.InvalidArgument, "node %s belongs to node group %s, not %s", node.GetName(), m.group, g.id)
		}
		still, err := s.still(ctx, g, m)
		if err != nil {
			return nil, "", err
		}
		if still == nil || seen[m.Name] {
			continue
		}
		if isFake(node) && s.spared(g, still, m.node) {
			// The cluster-autoscaler asks for it together with all that is late, in each loop.
			spared = m.Name

			continue
		}
		if err := s.mayGo(ctx, g, &machine{Machine: still, group: m.group, node: m.node}, node); err != nil {
			return nil, "", err
		}
		seen[m.Name] = true
		names = append(names, m.Name)
	}

	return names, spared, nil
}

// still returns the machine as the cache has it by now; nil when it is going or
// gone.
func (s *Server) still(ctx context.Context, g *group, m *machine) (*v1alpha1.Machine, error) {
	newest := &v1alpha1.Machine{}
	err := s.cfg.Control.Get(ctx, client.ObjectKeyFromObject(m.Machine), newest)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, statusOf(err, "read Machine "+m.Name)
	case newest.UID != m.UID || g.going(newest):
		return nil, nil
	default:
		return newest, nil
	}
}

// mustBeGone tells a node that is gone, which is well, from one of somebody else's.
func (s *Server) mustBeGone(ctx context.Context, group string, node *externalgrpc.ExternalGrpcNode) error {
	if strings.HasPrefix(node.GetProviderID(), placeholderPrefix) || strings.HasPrefix(node.GetName(), placeholderPrefix) {
		return nil
	}
	there := &corev1.Node{}
	err := s.cfg.Nodes.Get(ctx, client.ObjectKey{Name: node.GetName()}, there)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return statusOf(err, "read Node "+node.GetName())
	}
	if id := node.GetProviderID(); id != "" && id != there.Spec.ProviderID {
		return nil // a later one of that name
	}

	return status.Errorf(codes.InvalidArgument, "node %s belongs to no machine of node group %s", node.GetName(), group)
}

// mayGo tells why a machine that has joined must not go now, or one that somebody
// wants to look at. One that has not stays during an update as long as there are more
// than the replicas: those are what runs, and to lower them would end one of it.
func (s *Server) mayGo(ctx context.Context, g *group, m *machine, node *externalgrpc.ExternalGrpcNode) error {
	if s.spared(g, m.Machine, m.node) {
		return preservedStatus(m.Name)
	}
	if isFake(node) {
		if staying := g.staying(); rolling(g.deployment) && staying > int(g.deployment.Spec.Replicas) {
			return status.Errorf(codes.FailedPrecondition, "node group %s is being updated, and has %d machines for %d nodes: "+
				"to give up machine %s would cost one that runs", g.id, staying, g.deployment.Spec.Replicas, m.Name)
		}

		return s.mustNotHaveJoined(ctx, m)
	}
	if m.node == nil {
		return nil
	}
	if node.GetAnnotations()[v1alpha1.AnnotationKeyScaleDownDisabled] == "true" ||
		m.node.Annotations[v1alpha1.AnnotationKeyScaleDownDisabled] == "true" {
		return status.Errorf(codes.FailedPrecondition, "node %s has the annotation %s", m.node.Name, v1alpha1.AnnotationKeyScaleDownDisabled)
	}
	if rolling(g.deployment) {
		return status.Errorf(codes.FailedPrecondition, "node group %s is being updated: node %s stays until that is over", g.id, m.node.Name)
	}

	return nil
}

func preservedStatus(machine string) error {
	return status.Errorf(codes.FailedPrecondition, "machine %s is preserved: its annotation %s, or that of its node, says for how long",
		machine, v1alpha1.AnnotationKeyPreserve)
}

// isFake tells of a node that stands for an instance without one.
func isFake(node *externalgrpc.ExternalGrpcNode) bool {
	_, ok := node.GetAnnotations()[annotationKeyFakeNode]

	return ok || strings.HasPrefix(node.GetProviderID(), placeholderPrefix) || strings.HasPrefix(node.GetName(), placeholderPrefix)
}

func areFake(nodes []*externalgrpc.ExternalGrpcNode) bool {
	return !slices.ContainsFunc(nodes, func(n *externalgrpc.ExternalGrpcNode) bool { return !isFake(n) })
}

// mustNotHaveJoined keeps a running node from going as one that never came: the
// cluster-autoscaler's list of instances may be two minutes old.
func (s *Server) mustNotHaveJoined(ctx context.Context, m *machine) error {
	there := m.node != nil
	if !there {
		var err error
		if there, err = s.hasNode(ctx, m.Machine); err != nil {
			return err
		}
	}
	if there {
		return status.Errorf(codes.FailedPrecondition, "machine %s has joined as node %s by now", m.Name, m.Labels[v1alpha1.LabelKeyNode])
	}

	return nil
}

// staying counts the machines that are not going.
func (g *group) staying() int {
	n := 0
	for _, m := range g.machines {
		if !g.going(m.Machine) {
			n++
		}
	}

	return n
}

// rolling tells that machines of an old template are being replaced: what to
// delete is the deployment's to choose then.
func rolling(d *v1alpha1.MachineDeployment) bool {
	if d.Spec.Paused {
		return false
	}
	for _, c := range d.Status.Conditions {
		if c.Type == v1alpha1.MachineDeploymentProgressing &&
			(c.Reason == v1alpha1.ReasonNewMachineSetAvailable || c.Reason == v1alpha1.ReasonDeploymentPaused) {
			return false
		}
	}

	return d.Status.UpdatedReplicas < d.Status.Replicas
}
