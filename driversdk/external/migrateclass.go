package external

import (
	"context"
	"encoding/json"

	"github.com/machinebus/machinebus/driversdk"
)

var _ driversdk.ClassMigrator = (*Driver)(nil)

// MigrateClass writes a class of the provider's class type as a MachineClass. Its spec becomes the
// providerSpec, which [Driver.GetMachineClass] turns back.
func (d *Driver) MigrateClass(_ context.Context, old driversdk.OldClass) (json.RawMessage, error) {
	if old.Kind != d.classType.Kind {
		return nil, driversdk.Errorf(driversdk.InvalidArgument, "kind %s: this driver understands %s", old.Kind, d.classType.Kind)
	}
	var from struct {
		Metadata json.RawMessage            `json:"metadata"`
		Spec     map[string]json.RawMessage `json:"spec"`
	}
	if err := json.Unmarshal(old.Object, &from); err != nil {
		return nil, driversdk.Errorf(driversdk.InvalidArgument, "%s: %w", old.Kind, err)
	}
	class := map[string]any{
		"apiVersion": "machine.sapcloud.io/v1alpha1", "kind": "MachineClass", "metadata": from.Metadata, "providerSpec": from.Spec,
	}
	for _, field := range []string{"secretRef", "credentialsSecretRef"} {
		if ref, ok := from.Spec[field]; ok {
			class[field] = ref
			delete(from.Spec, field)
		}
	}

	return json.Marshal(class)
}
