package autoscaler

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// Annotations that make a MachineDeployment a node group: those of the Cluster API provider
// and its earlier versions. Max is required, min is 0 by default.
const (
	AnnotationKeyMin = "cluster.x-k8s.io/cluster-api-autoscaler-node-group-min-size"
	AnnotationKeyMax = "cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size"

	annotationKeyOldMin = "cluster.k8s.io/cluster-api-autoscaler-node-group-min-size"
	annotationKeyOldMax = "cluster.k8s.io/cluster-api-autoscaler-node-group-max-size"
)

// A Group is a node group of the configuration.
type Group struct {
	Deployment client.ObjectKey
	Min, Max   int32
}

// ParseGroup parses min:max:namespace.name, the format of the machine controller manager's
// autoscaler.
func ParseGroup(text string) (Group, error) {
	lower, rest, ok1 := strings.Cut(text, ":")
	upper, rest, ok2 := strings.Cut(rest, ":")
	namespace, name, ok3 := strings.Cut(rest, ".")
	if !ok1 || !ok2 || !ok3 || namespace == "" || name == "" {
		return Group{}, fmt.Errorf("%q: want min:max:namespace.name, such as 1:5:default.workers", text)
	}
	g := Group{Deployment: client.ObjectKey{Namespace: namespace, Name: name}}
	var err error
	if g.Min, g.Max, err = parseSizes(lower, upper); err != nil {
		return Group{}, fmt.Errorf("%q: %w", text, err)
	}

	return g, nil
}

// sizes returns the bounds of a MachineDeployment as a node group; ok is false if it is none.
func (s *Server) sizes(d *v1alpha1.MachineDeployment) (lower, upper int32, ok bool, err error) {
	key := client.ObjectKeyFromObject(d)
	for _, g := range s.cfg.Groups {
		if g.Deployment == key {
			return g.Min, g.Max, g.Max > 0, nil
		}
	}
	for _, keys := range [][2]string{{AnnotationKeyMin, AnnotationKeyMax}, {annotationKeyOldMin, annotationKeyOldMax}} {
		low, hasMin := d.Annotations[keys[0]]
		high, hasMax := d.Annotations[keys[1]]
		if !hasMin && !hasMax {
			continue
		}
		if !hasMax {
			return 0, 0, false, fmt.Errorf("annotation %s is missing beside %s", keys[1], keys[0])
		}
		if !hasMin {
			low = "0"
		}
		if lower, upper, err = parseSizes(low, high); err == nil && upper == 0 {
			err = errors.New("the maximum is 0")
		}
		if err != nil {
			return 0, 0, false, fmt.Errorf("annotations %s and %s: %w", keys[0], keys[1], err)
		}

		return lower, upper, true, nil
	}

	return 0, 0, false, nil
}

func parseSizes(low, high string) (lower, upper int32, err error) {
	const bits = 32
	l, err1 := strconv.ParseInt(low, 10, bits)
	u, err2 := strconv.ParseInt(high, 10, bits)
	if err1 != nil || err2 != nil || l < 0 || u < l {
		return 0, 0, fmt.Errorf("minimum %q and maximum %q: want whole numbers, 0 <= minimum <= maximum", low, high)
	}

	return int32(l), int32(u), nil
}
