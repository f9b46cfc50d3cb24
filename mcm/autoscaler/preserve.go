package autoscaler

import (
	"cmp"

	corev1 "k8s.io/api/core/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// isPreserved reports whether a machine is preserved for inspection, or is about to be. Its
// set counts it, and would delete another one in its place.
func (s *Server) isPreserved(g *group, m *v1alpha1.Machine, node *corev1.Node) bool {
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
	case "": // its set may choose it
		most := g.deployment.Spec.AutoPreserveFailedMachineMax

		return failed && most != nil && *most > 0
	default:
		return false
	}
}
