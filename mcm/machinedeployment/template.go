package machinedeployment

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"strconv"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// decisive returns the part of a template whose change starts a rollout. The
// rest, which is what the controllers keep in sync on Nodes and how they treat
// machines, reaches the machines that there are.
func decisive(t *v1alpha1.MachineTemplateSpec) v1alpha1.MachineTemplateSpec {
	d := *t.DeepCopy()
	delete(d.Labels, v1alpha1.LabelKeyMachineTemplateHash)
	d.CreationTimestamp = metav1.Time{}
	d.ManagedFields = nil
	d.Spec.NodeTemplateSpec = v1alpha1.NodeTemplateSpec{}
	d.Spec.MachineConfiguration = v1alpha1.MachineConfiguration{}
	d.Spec.Class.Kind = ""

	return d
}

// sameTemplate reports whether a change from a to b needs no rollout.
func sameTemplate(a, b *v1alpha1.MachineTemplateSpec) bool {
	return equality.Semantic.DeepEqual(decisive(a), decisive(b))
}

// hash is the value of the hash label. Templates that need no rollout between
// them have the same, so that a set is never made twice; collisions of others are
// resolved by their count.
func hash(t *v1alpha1.MachineTemplateSpec, collisions *int32) (string, error) {
	text, err := json.Marshal(decisive(t))
	if err != nil {
		return "", fmt.Errorf("hash a machine template: %w", err)
	}
	h := fnv.New32a()
	h.Write(text)
	if collisions != nil {
		h.Write([]byte(strconv.Itoa(int(*collisions))))
	}

	return strconv.FormatUint(uint64(h.Sum32()), 10), nil
}

// setName is the name of the deployment's set with that hash.
func setName(deployment, hash string) string {
	const chars = 5
	encoded := rand.SafeEncodeString(hash)

	return deployment + "-" + encoded[:min(chars, len(encoded))]
}
