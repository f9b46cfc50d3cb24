package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/machinebus/machinebus/driversdk/drivertest"
)

// An object holds the fields of a MachineClass or a Secret that the suite uses.
type object struct {
	Kind     string `json:"kind"`
	Metadata struct {
		Name        string            `json:"name"`
		Namespace   string            `json:"namespace"`
		Labels      map[string]string `json:"labels"`
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`

	Provider             string          `json:"provider"`
	ProviderSpec         json.RawMessage `json:"providerSpec"`
	SecretRef            reference       `json:"secretRef"`
	CredentialsSecretRef reference       `json:"credentialsSecretRef"`

	Data       map[string][]byte `json:"data"`
	StringData map[string]string `json:"stringData"`
}

type reference struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
}

func (r reference) in(namespace string) drivertest.Reference {
	if r.Name != "" && r.Namespace == "" {
		r.Namespace = namespace
	}

	return drivertest.Reference{Namespace: r.Namespace, Name: r.Name}
}

// readObjects returns the objects of a kind in a YAML file of one or more documents.
// Errors do not quote its content, which may be secret.
func readObjects(file, kind string) ([]object, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var found []object
	for n, document := range bytes.Split(append([]byte("\n"), content...), []byte("\n---")) {
		var o object
		if err := yaml.Unmarshal(document, &o); err != nil {
			return nil, fmt.Errorf("%s: document %d is not a valid %s in YAML", file, n+1, kind)
		}
		if o.Kind != kind {
			continue
		}
		if o.Metadata.Namespace == "" {
			o.Metadata.Namespace = "default"
		}
		found = append(found, o)
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("%s contains no object of kind %s", file, kind)
	}

	return found, nil
}

func readClass(file string) (class drivertest.Class, provider string, err error) {
	objects, err := readObjects(file, "MachineClass")
	if err != nil {
		return class, "", err
	}
	if len(objects) > 1 {
		return class, "", fmt.Errorf("%s contains %d MachineClasses: want one", file, len(objects))
	}
	o := objects[0]

	return drivertest.Class{
		Namespace: o.Metadata.Namespace, Name: o.Metadata.Name, ProviderSpec: o.ProviderSpec,
		Labels: o.Metadata.Labels, Annotations: o.Metadata.Annotations,
		SecretRef: o.SecretRef.in(o.Metadata.Namespace), CredentialsSecretRef: o.CredentialsSecretRef.in(o.Metadata.Namespace),
	}, strings.ToLower(o.Provider), nil
}

func readSecrets(file string) ([]drivertest.Secret, error) {
	objects, err := readObjects(file, "Secret")
	if err != nil {
		return nil, err
	}
	secrets := make([]drivertest.Secret, len(objects))
	for n, o := range objects {
		s := drivertest.Secret{Namespace: o.Metadata.Namespace, Name: o.Metadata.Name, Data: map[string][]byte{}}
		maps.Copy(s.Data, o.Data)
		for key, value := range o.StringData {
			s.Data[key] = []byte(value)
		}
		secrets[n] = s
	}

	return secrets, nil
}

// readExceptions returns the list of exceptions in a YAML file.
func readExceptions(file string) (list []drivertest.Exception, err error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	if err := yaml.UnmarshalStrict(content, &list); err != nil {
		return nil, fmt.Errorf("%s is not a list of exceptions, each with clause, why and cost: %w", file, err)
	}

	return list, nil
}
