package external

import (
	"encoding/json"
	"fmt"
	"maps"

	"github.com/machinebus/machinebus/driversdk"
)

// GetMachineClass returns the JSON of the class of the operation that runs, as a string. It has
// the provider's class type, and as its spec the providerSpec with the secretRef. Any other name
// is an error, which does not depend on whether there is such a class.
func (d *Driver) GetMachineClass(machineClassMeta *MachineClassMeta) (any, error) {
	op := d.underWay()
	if op == nil || machineClassMeta == nil || machineClassMeta.Name != op.class.Name {
		return nil, fmt.Errorf("no running operation needs this machine class: " +
			"ask during Create, Delete or List, and for the name that the call has")
	}

	return op.classJSON, nil
}

// GetSecret returns the JSON of the Secret that the class of the operation that runs refers to.
// Its data are those of the class's secretRef and credentialsSecretRef. During Create the
// placeholders in userData are filled in. Any other name is an error, which does not depend on
// whether there is such a Secret.
func (d *Driver) GetSecret(secretMeta *SecretMeta) (string, error) {
	op := d.underWay()
	if op == nil || secretMeta == nil || secretMeta.SecretName == "" ||
		secretMeta.SecretName != op.secret.Name || secretMeta.SecretNameSpace != op.secret.Namespace {
		return "", fmt.Errorf("no running operation needs this secret: " +
			"ask during Create, Delete or List, and for the name and namespace in spec.secretRef of the machine class")
	}

	return op.secretJSON, nil
}

// underWay returns the operation that runs and is not over for the manager, or nil. A call that
// ignores its deadline gets nothing any more: its user data may be another machine's by now.
func (d *Driver) underWay() *operation {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.running == nil || d.running.ctx.Err() != nil {
		return nil
	}

	return d.running
}

// metadata are the fields of a Kubernetes ObjectMeta that are known here.
type metadata struct {
	Name            string            `json:"name"`
	Namespace       string            `json:"namespace,omitempty"`
	UID             string            `json:"uid,omitempty"`
	ResourceVersion string            `json:"resourceVersion,omitempty"`
	Labels          map[string]string `json:"labels,omitempty"`
	Annotations     map[string]string `json:"annotations,omitempty"`
}

// reference is a Kubernetes SecretReference.
type reference struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace,omitempty"`
}

func classJSON(
	classType ClassType, class *driversdk.Class[json.RawMessage], secret driversdk.SecretReference,
) (string, error) {
	spec := map[string]json.RawMessage{}
	if len(class.Spec) > 0 {
		if err := json.Unmarshal(class.Spec, &spec); err != nil {
			return "", fmt.Errorf("providerSpec is not an object: %w", err)
		}
	}
	if secret.Name != "" {
		ref, err := json.Marshal(reference{Name: secret.Name, Namespace: secret.Namespace})
		if err != nil {
			return "", err
		}
		spec["secretRef"] = ref
	}
	text, err := json.Marshal(struct {
		APIVersion string                     `json:"apiVersion"`
		Kind       string                     `json:"kind"`
		Metadata   metadata                   `json:"metadata"`
		Spec       map[string]json.RawMessage `json:"spec"`
	}{classType.APIVersion, classType.Kind, metadata{
		Name: class.Name, Namespace: class.Namespace, UID: class.UID, ResourceVersion: class.ResourceVersion,
		Labels: class.Labels, Annotations: class.Annotations,
	}, spec})

	return string(text), err
}

// secretJSON has all the class's secret data in one Secret, because a class of 2018 refers to one.
func secretJSON(secret driversdk.Secret, userData []byte, ref driversdk.SecretReference) (string, error) {
	data := map[string][]byte{} // a driversdk.Secret marshals without its values
	maps.Copy(data, secret)
	if len(userData) > 0 {
		data["userData"] = userData
	}
	text, err := json.Marshal(struct {
		APIVersion string            `json:"apiVersion"`
		Kind       string            `json:"kind"`
		Metadata   metadata          `json:"metadata"`
		Type       string            `json:"type"`
		Data       map[string][]byte `json:"data"`
	}{"v1", "Secret", metadata{
		Name: ref.Name, Namespace: ref.Namespace, UID: ref.UID, ResourceVersion: ref.ResourceVersion,
	}, "Opaque", data})

	return string(text), err
}
