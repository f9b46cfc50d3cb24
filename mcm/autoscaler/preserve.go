package autoscaler

import (
	"cmp"

	corev1 "k8s.io/api/core/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// spared tells of a machine that is kept for somebody to look at, or is about to
// be. It counts for its set, which would delete another one in its place.
func (s *Server) spared(g *group, m *v1alpha1.Machine, node *corev1.Node) bool {
	if until := m.Status.CurrentStatus.PreserveExpiryTime; until != nil {
		return until.After(s.cfg.Now())
	}
	wish := cmp.Or(m.Annotations[v1alpha1.AnnotationKeyLastAppliedNodePreserveValue], m.Annotations[v1alpha1.AnnotationKeyPreserve])
	if node != nil {
		wish = cmp.Or(node.Annotations[v1alpha1.AnnotationKeyPreserve], wish)
	}
	failed := m.Status.CurrentStatus.Phase == v1alpha1.MachineFailed
	switch wish {
	case v1alpha1.PreserveNow:
		return true
	case v1alpha1.PreserveWhenFailed, v1alpha1.PreserveAuto:
		return failed
	case "": // its set is about to choose
		most := g.deployment.Spec.AutoPreserveFailedMachineMax

		return failed && most != nil && *most > 0
	default:
		return false
	}
}
