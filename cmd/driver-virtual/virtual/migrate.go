package virtual

import (
	"bytes"
	"context"
	"encoding/json"

	"github.com/machinebus/machinebus/driversdk"
)

// OldKind is the provider's own class kind from before MachineClass existed. Its spec
// held what is now providerSpec, together with the references to secrets.
const OldKind = "VirtualMachineClass"

// An oldClass is an object of OldKind. Its metadata is copied unchanged.
type oldClass struct {
	APIVersion string          `json:"apiVersion"`
	Kind       string          `json:"kind"`
	Metadata   json.RawMessage `json:"metadata"`
	Spec       struct {
		Spec

		SecretRef            json.RawMessage `json:"secretRef,omitempty"`
		CredentialsSecretRef json.RawMessage `json:"credentialsSecretRef,omitempty"`
	} `json:"spec"`
}

// A machineClass is the resulting MachineClass.
type machineClass struct {
	APIVersion           string          `json:"apiVersion"`
	Kind                 string          `json:"kind"`
	Metadata             json.RawMessage `json:"metadata"`
	Provider             string          `json:"provider"`
	ProviderSpec         providerSpec    `json:"providerSpec"`
	SecretRef            json.RawMessage `json:"secretRef,omitempty"`
	CredentialsSecretRef json.RawMessage `json:"credentialsSecretRef,omitempty"`
}

type providerSpec struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Spec
}

// MigrateClass converts a VirtualMachineClass to a MachineClass.
func (d *Driver) MigrateClass(_ context.Context, old driversdk.OldClass) (json.RawMessage, error) {
	if old.Kind != OldKind {
		return nil, driversdk.Errorf(driversdk.InvalidArgument, "kind %s: want %s", old.Kind, OldKind)
	}
	var from oldClass
	dec := json.NewDecoder(bytes.NewReader(old.Object))
	dec.DisallowUnknownFields() // unknown fields must not get lost
	if err := dec.Decode(&from); err != nil {
		return nil, driversdk.Errorf(driversdk.InvalidArgument, "%s: %w", OldKind, err)
	}
	if err := from.Spec.Validate(); err != nil {
		return nil, driversdk.Errorf(driversdk.InvalidArgument, "%s: spec: %w", OldKind, err)
	}
	to, err := json.Marshal(machineClass{
		APIVersion: "machine.sapcloud.io/v1alpha1", Kind: "MachineClass", Metadata: from.Metadata,
		Provider:     Provider,
		ProviderSpec: providerSpec{APIVersion: APIVersion, Kind: Kind, Spec: from.Spec.Spec},
		SecretRef:    from.Spec.SecretRef, CredentialsSecretRef: from.Spec.CredentialsSecretRef,
	})
	if err != nil {
		return nil, driversdk.Errorf(driversdk.Internal, "write the MachineClass: %w", err)
	}

	return to, nil
}
