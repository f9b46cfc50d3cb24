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

// annotationKeyFakeNode is on nodes that the cluster-autoscaler invents for instances without
// a Node.
const annotationKeyFakeNode = "k8s.io/cluster-autoscaler/fake-node-reason"

// NodeGroupDeleteNodes deletes exactly these nodes, or none if one of them must stay. Nodes in
// deletion and deleted ones are a success, because the cluster-autoscaler repeats its
// requests. Preserved machines that never joined are left out, so that they do not block the
// others. If none of the nodes has joined, as many are deleted as the minimum allows: the
// cluster-autoscaler ignores the minimum for nodes that failed to join.
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
			return false, preservedError(spared)
		case len(victims) == 0:
			return false, nil
		}
		if room := int(d.Spec.Replicas - g.min); 0 < room && room < len(victims) && areFake(req.GetNodes()) {
			victims = victims[:room]
		}
		if left := int64(d.Spec.Replicas) - int64(len(victims)); left < int64(g.min) {
			return false, status.Errorf(codes.FailedPrecondition, "node group %s has %d nodes: %d fewer would be below its minimum of %d",
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

// victims returns the names of the machines to mark, and the name of one that is left out
// because it is preserved, if any.
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
		newest, err := s.newestMachine(ctx, g, m)
		if err != nil {
			return nil, "", err
		}
		if newest == nil || seen[m.Name] {
			continue
		}
		if isFake(node) && s.isPreserved(g, newest, m.node) {
			// In each loop the cluster-autoscaler asks for it together with all late nodes.
			spared = m.Name

			continue
		}
		if err := s.mayGo(ctx, g, &machine{Machine: newest, group: m.group, node: m.node}, node); err != nil {
			return nil, "", err
		}
		seen[m.Name] = true
		names = append(names, m.Name)
	}

	return names, spared, nil
}

// newestMachine returns the machine from the cache; nil if it is in deletion or gone.
func (s *Server) newestMachine(ctx context.Context, g *group, m *machine) (*v1alpha1.Machine, error) {
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

// mustBeGone returns an error if a node without a machine exists: it is not ours.
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
		return nil // a later node of that name
	}

	return status.Errorf(codes.InvalidArgument, "node %s belongs to no machine of node group %s", node.GetName(), group)
}

// mayGo returns an error if a machine must stay: because it is preserved, because its node is
// protected from scale-down, or because of an update. During an update a machine without a
// node must stay while there are more machines than replicas: lower replicas would delete a
// running one.
func (s *Server) mayGo(ctx context.Context, g *group, m *machine, node *externalgrpc.ExternalGrpcNode) error {
	if s.isPreserved(g, m.Machine, m.node) {
		return preservedError(m.Name)
	}
	if isFake(node) {
		if staying := g.staying(); rolling(g.deployment) && staying > int(g.deployment.Spec.Replicas) {
			return status.Errorf(codes.FailedPrecondition, "node group %s is being updated and has %d machines for %d replicas: "+
				"to delete machine %s now would also delete a running one; try again after the update",
				g.id, staying, g.deployment.Spec.Replicas, m.Name)
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
		return status.Errorf(codes.FailedPrecondition, "node group %s is being updated: node %s cannot be deleted before the update ends",
			g.id, m.node.Name)
	}

	return nil
}

func preservedError(machine string) error {
	return status.Errorf(codes.FailedPrecondition, "machine %s is preserved: its annotation %s, or that of its node, says for how long",
		machine, v1alpha1.AnnotationKeyPreserve)
}

// isFake reports whether a node is the cluster-autoscaler's invention for an instance without
// a Node.
func isFake(node *externalgrpc.ExternalGrpcNode) bool {
	_, ok := node.GetAnnotations()[annotationKeyFakeNode]

	return ok || strings.HasPrefix(node.GetProviderID(), placeholderPrefix) || strings.HasPrefix(node.GetName(), placeholderPrefix)
}

func areFake(nodes []*externalgrpc.ExternalGrpcNode) bool {
	return !slices.ContainsFunc(nodes, func(n *externalgrpc.ExternalGrpcNode) bool { return !isFake(n) })
}

// mustNotHaveJoined returns an error if the machine has a node: the cluster-autoscaler's list
// of instances may be two minutes old.
func (s *Server) mustNotHaveJoined(ctx context.Context, m *machine) error {
	there := m.node != nil
	if !there {
		var err error
		if there, err = s.hasNode(ctx, m.Machine); err != nil {
			return err
		}
	}
	if there {
		return status.Errorf(codes.FailedPrecondition, "machine %s has joined as node %s in the meantime",
			m.Name, m.Labels[v1alpha1.LabelKeyNode])
	}

	return nil
}

// staying returns the number of machines that are not in deletion.
func (g *group) staying() int {
	n := 0
	for _, m := range g.machines {
		if !g.going(m.Machine) {
			n++
		}
	}

	return n
}

// rolling reports whether machines of an old template are being replaced. Then the deployment
// chooses which machines to delete.
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
