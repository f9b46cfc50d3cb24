package machinedeployment

import (
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// ownAnnotations mean one thing on a deployment and another, or nothing, on a set.
var ownAnnotations = []string{
	corev1.LastAppliedConfigAnnotation,
	v1alpha1.AnnotationKeyRevision,
	v1alpha1.AnnotationKeyRevisionHistory,
	v1alpha1.AnnotationKeyDesiredReplicas,
	v1alpha1.AnnotationKeyMaxReplicas,
	v1alpha1.AnnotationKeyPreferNoSchedule,
	v1alpha1.AnnotationKeyUnfreeze,
	v1alpha1.AnnotationKeyTriggerDeletion,
	// A set must learn of it together with its new replicas: see resize.
	v1alpha1.AnnotationKeyLastReplicaChangeByScaler,
}

// shareAnnotations copies from a deployment what its sets have in common with it,
// or the other way round.
func shareAnnotations(to, from map[string]string) map[string]string {
	for key, value := range from {
		if slices.Contains(ownAnnotations, key) {
			continue
		}
		if to == nil {
			to = map[string]string{}
		}
		to[key] = value
	}

	return to
}

// revisionOf returns the revision of a deployment or a set; 0 when it has none
// that can be read.
func revisionOf(annotations map[string]string) int64 {
	revision, err := strconv.ParseInt(annotations[v1alpha1.AnnotationKeyRevision], 10, 64)
	if err != nil {
		return 0
	}

	return revision
}

// raiseRevision gives a set a later revision and keeps the one it had in its
// history.
func raiseRevision(set *v1alpha1.MachineSet, revision int64) {
	had := revisionOf(set.Annotations)
	if had >= revision {
		return
	}
	if set.Annotations == nil {
		set.Annotations = map[string]string{}
	}
	if had > 0 {
		var history []string
		if text := set.Annotations[v1alpha1.AnnotationKeyRevisionHistory]; text != "" {
			history = strings.Split(text, ",")
		}
		set.Annotations[v1alpha1.AnnotationKeyRevisionHistory] = strings.Join(append(history, strconv.FormatInt(had, 10)), ",")
	}
	set.Annotations[v1alpha1.AnnotationKeyRevision] = strconv.FormatInt(revision, 10)
}

// replicasNoted returns the number in one of a set's annotations about replicas.
func replicasNoted(set *v1alpha1.MachineSet, key string) (int32, bool) {
	n, err := strconv.ParseInt(set.Annotations[key], 10, 32)

	return int32(n), err == nil
}
