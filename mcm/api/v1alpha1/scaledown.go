package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// AnnotationValueTrue is the value of AnnotationKeyCollectOrphans, AnnotationKeyScaleDownDisabled and
// AnnotationKeyScaleDownDisabledByMCM.
const AnnotationValueTrue = "true"

// KeepFromScaleDown sets the annotation that keeps the cluster-autoscaler from
// removing a Node, or removes it. One that somebody else has set is theirs, and
// stays.
func KeepFromScaleDown(node *corev1.Node, keep bool) {
	_, has := node.Annotations[AnnotationKeyScaleDownDisabled]
	ours := node.Annotations[AnnotationKeyScaleDownDisabledByMCM] == AnnotationValueTrue
	switch {
	case keep && !has:
		metav1.SetMetaDataAnnotation(&node.ObjectMeta, AnnotationKeyScaleDownDisabled, AnnotationValueTrue)
		metav1.SetMetaDataAnnotation(&node.ObjectMeta, AnnotationKeyScaleDownDisabledByMCM, AnnotationValueTrue)
	case !keep && ours:
		delete(node.Annotations, AnnotationKeyScaleDownDisabled)
		delete(node.Annotations, AnnotationKeyScaleDownDisabledByMCM)
	}
}
