package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// AnnotationValueTrue is the value of AnnotationKeyCollectOrphans, AnnotationKeyScaleDownDisabled and
// AnnotationKeyScaleDownDisabledByMCM.
const AnnotationValueTrue = "true"

// KeepFromScaleDown sets or removes the annotation that keeps the cluster-autoscaler from
// removing a Node. It leaves an annotation alone that another writer has set.
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
